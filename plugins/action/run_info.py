# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module of the same name, without what starting a module costs the host; the module itself where that does not work."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import ONE_RUN
from ansible_collections.nanochat.ddp.plugins.module_utils._run.look import LOOK
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import quick_look

# Not of the type path, which would be expanded here.
UNEXPANDED: dict[str, dict[str, object]] = {"run_dir": {"type": "str"}, "base_dir": {"type": "str"}}


class ActionModule(ActionBase):
    """One look."""

    _supports_check_mode = True
    _supports_async = False
    _supports_diff = False

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """The answer of the host."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        dummy, options = self.validate_argument_spec(argument_spec={**LOOK, **UNEXPANDED}, **ONE_RUN)
        seen = quick_look(self, options, variables)
        result.update(seen if seen is not None else self._execute_module(task_vars=variables))
        return result
