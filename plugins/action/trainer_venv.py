# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of trainer_venv: reads the locks, and brings uv to a host that lacks it."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

from ..module_utils._trainer.venv import uv_beside
from ..plugin_utils._wheels import TRAINER, bring_uv, cache_folder, read_lock


class ActionModule(ActionBase):
    """Two round trips if uv must be brought, otherwise one."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        task_vars = task_vars or {}
        result: dict[str, object] = super().run(tmp, task_vars)
        given = {"host": task_vars.get("inventory_hostname"), **self._task.args}
        if given.get("state", "present") == "present":
            names = given.get("packages") or ["trainer"]
            lock = read_lock(
                Path(str(given.get("src") or TRAINER)).expanduser(), names, str(given.get("torch_index", "auto"))
            )
            given.update(lock=lock.text, digest=lock.digest, pins=lock.pins)

        def ask() -> dict[str, object]:
            return dict(self._execute_module("nanochat.ddp.trainer_venv", module_args=given, task_vars=task_vars))

        asked = ask()
        if asked.get("lacks_uv") and not asked.get("failed"):
            try:
                self._bring_uv(str(asked["lacks_uv"]), str(asked["venv"]))
                asked = ask()
            except AnsibleError as why:
                asked = {
                    "failed": True,
                    "reason": "network",
                    "tags": asked.get("tags"),
                    "msg": f"{given['host']}: {why.message}",
                }
        asked.pop("invocation", None)
        result.update(asked)
        return result

    def _bring_uv(self, machine: str, venv: str) -> None:
        """Beside the environment; renamed, so that no half copy is ever run."""
        program, there = bring_uv(cache_folder(), machine), uv_beside(venv)
        part = f"{there}.{os.getpid()}"
        self._transfer_file(str(program), part)
        self._fixup_perms2([part], execute=True)
        self._low_level_execute_command(
            f"mv {self._connection._shell.quote(part)} {self._connection._shell.quote(there)}"
        )
