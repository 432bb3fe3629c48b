# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Calls a verb of this collection, on a host or on the controller."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ..module_utils._kit.printable import printable
from ..plugin_utils._agent import verbs
from ..plugin_utils._agent.carrier import Call

display = Display()


class ActionModule(ActionBase):
    """One task, one verb. What its answer tells people (`show`) is printed."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """The verb's answer."""
        result: dict[str, object] = super().run(tmp, task_vars)
        params = dict(self._task.args)
        verb = params.pop("verb")
        answer = verbs.answer(Call(self, task_vars or {}), verb, params)
        if answer.get("show") and not answer.get("failed"):
            display.display(printable(answer["show"]))
        return {**result, "changed": False, **answer}
