# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remembers between the looks of an until loop where in the log the last one ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.utils.display import Display
from ansible_collections.nanochat.ddp.plugins.action.run_watch import PatientAction
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import number, words
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _configuration

display = Display()


def tell_of_forks(variables: Mapping[str, Any]) -> None:
    """Once, by the first host: which logs cannot be followed with the others."""
    hosts = variables.get("ansible_play_hosts") or []
    if len(hosts) > _configuration.forks() and variables["inventory_hostname"] == hosts[0]:
        display.warning(_configuration.lacking(len(hosts), _configuration.forks(), chosen=True))


def show(host: str, result: Mapping[str, Any]) -> None:
    """The lines, each with its host."""
    lines = words(result, "lines")
    if lines:
        display.display("\n".join(f"{host} | {line}" for line in lines))


class ActionModule(PatientAction):
    """The module of the same name, which goes on where it was."""

    # One process makes all the looks of a host's loop, but with a new object for each.
    _offsets: ClassVar[dict[str, int]] = {}

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """One look; under another display than ours, which would show none of the lines, all of them to the end."""
        variables = task_vars or {}
        result = self.look(tmp, variables)
        if _configuration.shows_results():
            return result
        show(str(variables["inventory_hostname"]), result)
        while not result.get("over") and not result.get("failed") and not result.get("unreachable"):
            result = self.look(tmp, variables)
            show(str(variables["inventory_hostname"]), result)
        return result

    def look(self, tmp: Any, variables: dict[str, object]) -> dict[str, object]:
        """What was written since the last look."""
        result: dict[str, object] = super().run(tmp, variables)
        if result.get("failed"):
            return result
        arguments = dict(self._task.args)
        follow = boolean(arguments.get("follow", False))
        key = f"{self._task._uuid} {variables['inventory_hostname']}"
        if follow and key not in self._offsets:
            tell_of_forks(variables)
        if follow and key in self._offsets:
            arguments["offset"] = self._offsets[key]
        answer = self.ask("nanochat.ddp.run_log", arguments, variables)
        if answer is None and key not in self._offsets:
            return {**result, "unreachable": True, "msg": "the host cannot be reached"}
        result.update(answer or {"changed": False, "lines": [], "over": False, "offset": self._offsets[key]})
        if "offset" in result:
            self._offsets[key] = number(result, "offset")
        if not follow or result.get("failed"):
            result["over"] = True
        return result
