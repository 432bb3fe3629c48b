# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks a host for what is missing of a run here until nothing is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._run.files import CopyError, apply_piece, have_of

ROUNDS = 1000


class ActionModule(ActionBase):
    """The module of the same name, again and again."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Copy what is new."""
        variables = task_vars or {}
        result: dict[str, Any] = super().run(tmp, variables)
        arguments = dict(self._task.args)
        name = arguments.get("run") or os.path.basename(str(arguments.get("run_dir") or "").rstrip("/"))
        if not name:
            # Which run is the newest one only the host knows.
            seen = self._ask({**arguments, "room": 0}, {}, variables)
            if seen.get("failed"):
                return {**result, **seen}
            name = arguments["run"] = seen["run"]
        if not name:
            return {**result, "changed": False, "run": None, "folder": None, "files": []}
        host = variables["inventory_hostname"].replace("/", "_")
        folder = Path(arguments["dest"]).expanduser().absolute() / name / host
        try:
            written = self._copy(arguments, folder, variables)
        except (CopyError, OSError) as error:
            message = f"Files of the run {name} could not be brought to {folder}: {error}"
            return {**result, "failed": True, "msg": message}
        there = written is not None
        result.update(changed=bool(written), run=name if there else None, folder=str(folder) if there else None)
        return {**result, "files": sorted(written or ())}

    def _ask(self, arguments: dict[str, Any], have: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            "nanochat.ddp.run_files", module_args={**arguments, "have": have}, task_vars=variables
        )
        return answer

    def _copy(self, arguments: dict[str, Any], folder: Path, variables: dict[str, Any]) -> set[str] | None:
        """Bring everything; returns what was (or in check mode would be) written, None where there is no such run."""
        written: set[str] = set()
        for dummy in range(ROUNDS):
            have = have_of(str(folder)) if folder.is_dir() else {}
            seen = self._ask(arguments, have, variables)
            if seen.get("failed"):
                raise CopyError(str(seen.get("msg")))
            if seen["run"] is None:
                return None
            written |= {part["path"] for part in [*seen["pieces"], *seen["whole"]]}
            if self._task.check_mode:
                return written
            for part in seen["pieces"]:
                apply_piece(str(folder), part)
            if not seen["more"]:
                for part in seen["whole"]:
                    self._fetch(seen["run_dir"], part, folder)
                return written
        raise CopyError(f"there is more than {ROUNDS} pieces of it")

    def _fetch(self, run_dir: str, part: dict[str, Any], folder: Path) -> None:
        """A big file by the connection's own means, under its name only once it is whole."""
        path = folder / part["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.new-{os.getpid()}")
        try:
            self._connection.fetch_file(f"{run_dir}/{part['path']}", str(beside))
            if beside.stat().st_size != part["size"]:
                raise CopyError(f"{part['path']} came with {beside.stat().st_size} of {part['size']} bytes")
            os.utime(beside, (part["mtime"], part["mtime"]))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
