# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of trainer_files: reads the sources, asks the host for differences, sends just those."""

from __future__ import annotations

import base64

from ansible.plugins.action import ActionBase

from ..module_utils._contract.document import words
from ..module_utils._trainer.files import digests_of
from ..plugin_utils._sources import sources


class ActionModule(ActionBase):
    """Two round trips if something differs, otherwise one."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        task_vars = task_vars or {}
        result: dict[str, object] = super().run(tmp, task_vars)
        tree = sources(self._task.args)
        arguments = {"host": task_vars.get("inventory_hostname"), **self._task.args, "files": digests_of(tree)}

        def ask(**contents: dict[str, str]) -> dict[str, object]:
            """Without contents the module only compares."""
            name = "nanochat.ddp.trainer_files"
            return dict(self._execute_module(name, module_args={**arguments, **contents}, task_vars=task_vars))

        asked = ask()
        if asked.get("changed") and not asked.get("failed"):
            asked = ask(contents={path: base64.b64encode(tree[path]).decode() for path in words(asked, "written")})
        asked.pop("invocation", None)
        result.update(asked)
        return result
