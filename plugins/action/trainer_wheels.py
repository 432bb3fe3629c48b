# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetches on the controller the wheels that a lock names, for hosts that reach no package index."""

from __future__ import annotations

from pathlib import Path

from ansible.plugins.action import ActionBase

from ..module_utils._kit.files import locked
from ..plugin_utils._wheels import TRAINER, bring_wheels, read_lock

OPTIONS = {
    "dest": {"type": "path", "required": True},
    "python": {"type": "str", "required": True},
    "machine": {"type": "str", "required": True},
    "src": {"type": "path"},
    "packages": {"type": "list", "elements": "str", "default": ["trainer"]},
    "torch_index": {"type": "str", "default": "auto"},
}


class ActionModule(ActionBase):
    """Runs on the controller alone."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        result: dict[str, object] = super().run(tmp, task_vars or {})
        given = self.validate_argument_spec(OPTIONS)[1]
        if self._task.check_mode:
            return {**result, "changed": True}
        lock = read_lock(Path(given["src"] or TRAINER), given["packages"], given["torch_index"])
        folder = Path(given["dest"])
        folder.mkdir(parents=True, exist_ok=True)
        with locked(str(folder) + ".lock", 1800):
            result["changed"] = bring_wheels(lock.text, given["python"], given["machine"], folder, given["torch_index"])
        return result
