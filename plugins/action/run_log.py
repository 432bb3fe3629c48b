# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remembers between the looks of an until loop where in the log the last one ended."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

RETRY_SECONDS = 5.0


class ActionModule(ActionBase):
    """The module of the same name, which goes on where it was."""

    _supports_check_mode = True
    _supports_async = False
    # One process makes all the looks of a host's loop, but with a new object for each.
    _offsets: ClassVar[dict[str, int]] = {}

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """One look."""
        variables = task_vars or {}
        result: dict[str, Any] = super().run(tmp, variables)
        arguments = dict(self._task.args)
        follow = boolean(arguments.get("follow", False))
        key = f"{self._task._uuid} {variables['inventory_hostname']}"
        if follow and key in self._offsets:
            arguments["offset"] = self._offsets[key]
        try:
            result.update(self._execute_module(module_args=arguments, task_vars=variables))
        except AnsibleConnectionFailure:
            if key not in self._offsets:
                raise
            self._connection.close()
            time.sleep(RETRY_SECONDS)
            result.update(changed=False, lines=[], over=False, offset=self._offsets[key])
        if "offset" in result:
            self._offsets[key] = result["offset"]
        if not follow or result.get("failed"):
            result["over"] = True
        return result
