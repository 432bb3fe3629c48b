# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller side of setup_info: tells the host the digests of the trainer's files."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.files import digests_of
from ansible_collections.nanochat.ddp.plugins.plugin_utils._sources import sources


class ActionModule(ActionBase):
    """One short trip."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        arguments = dict(self._task.args)
        arguments["files"] = digests_of(sources(arguments))
        arguments.setdefault("host", variables.get("inventory_hostname"))
        answer: dict[str, object] = self._execute_module(
            module_name="nanochat.ddp.setup_info", module_args=arguments, task_vars=variables
        )
        answer.pop("invocation", None)
        result.update(answer)
        return result
