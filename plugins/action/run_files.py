# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests missing files of a run from a host until none are missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ..module_utils._contract import validate
from ..module_utils._contract.document import Document, items, number
from ..module_utils._contract.run_folder import RunNameError, plain_run_name
from ..module_utils._kit import host_code
from ..module_utils._run import files
from ..module_utils._run.collected import host_folder
from ..module_utils._run.files import BIG, SMALL, CopyError, place_of
from ..module_utils._run.find import ONE_RUN
from ..plugin_utils._look import across_sleep, code_answer, unexpanded

ROUNDS = 1000
# Read once, before Ansible forks for each host.
host_code.sources_text(files.__name__)


def ask(
    action: ActionBase, arguments: dict[str, object], have: Mapping[str, object], variables: dict[str, object]
) -> dict[str, object]:
    """The host's answer."""
    asked = {**arguments, "have": have}

    def once() -> dict[str, object]:
        answer = code_answer(action, files, asked, variables)
        if answer is None:
            answer = action._execute_module("nanochat.ddp.run_files", module_args=asked, task_vars=variables)
        return answer

    return across_sleep(action, once)


def bring(
    action: ActionBase, arguments: dict[str, object], folder: Path, variables: dict[str, object]
) -> set[str] | None:
    """Copy everything; returns the files that were (or in check mode would be) written, None if there is no such run."""
    written: set[str] = set()
    for dummy in range(ROUNDS):
        have = files.known_copies(str(folder)) if folder.is_dir() else {}
        seen = ask(action, arguments, have, variables)
        if seen.get("failed"):
            raise CopyError(str(seen.get("msg")))
        if seen.get("run") is None:
            return None
        pieces, whole = items(seen, "pieces"), items(seen, "whole")
        for part, patterns in [*((part, SMALL) for part in pieces), *((part, BIG) for part in whole)]:
            place_of(str(folder), part.get("path"), patterns)
            written.add(str(part["path"]))
        if action._task.check_mode:
            return written
        for part in pieces:
            files.apply_piece(str(folder), part)
        if not seen.get("more"):
            for part in whole:
                fetch(action, validate.absolute_path(seen.get("run_dir")), part, folder)
            for part in whole:
                files.set_aside_beyond(str(folder), str(part["path"]))
            return written
    raise CopyError(f"it has more than {ROUNDS} chunks")


def fetch(action: ActionBase, run_dir: str, part: Document, folder: Path) -> None:
    """Copy a big file with the connection plugin; it gets its name once complete."""
    path = Path(place_of(str(folder), part["path"], BIG))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        across_sleep(action, lambda: action._connection.fetch_file(f"{run_dir}/{part['path']}", str(beside)))
        if beside.stat().st_size != part.get("size"):
            raise CopyError(f"{part['path']} came with {beside.stat().st_size} of {part.get('size')} bytes")
        # The host's own stamp; while it is the same, so is the file.
        stamp = number(part, "mtime")
        os.utime(beside, (stamp, stamp))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class ActionModule(ActionBase):
    """Repeats the module of the same name."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """Copy new files."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        arguments = dict(self.validate_argument_spec(unexpanded(files.OPTIONS), **ONE_RUN)[1])
        name = arguments.get("run") or os.path.basename(str(arguments.get("run_dir") or "").rstrip("/"))
        if not name:
            # Only the host knows its newest run.
            seen = ask(self, {**arguments, "room": 0}, {}, variables)
            if seen.get("failed"):
                return {**result, **seen}
            name = arguments["run"] = seen.get("run")
        if not name:
            return {**result, "changed": False, "run": None, "folder": None, "files": []}
        try:
            # It becomes a folder here, from an untrusted source.
            runs = Path(arguments["dest"]).expanduser().absolute() / plain_run_name(name)
            folder = runs / host_folder(variables["inventory_hostname"])
            written = bring(self, arguments, folder, variables)
        except (CopyError, RunNameError, validate.InvalidHostData, OSError) as error:
            message = f"Files of the run {str(name)[:80]!r} could not be copied from {variables['inventory_hostname']}: {error}"
            return {**result, "failed": True, "msg": message}
        there = written is not None
        result.update(changed=bool(written), run=name if there else None, folder=str(folder) if there else None)
        return {**result, "files": sorted(written or ())}
