# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a host's log, or follows it to the end of the run while printing its lines."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from ansible.utils.display import Display
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import words
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import find
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.printable import printable
from ansible_collections.nanochat.ddp.plugins.module_utils._run import log
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import ONE_RUN
from ansible_collections.nanochat.ddp.plugins.plugin_utils._company import FollowingAction, abandoned
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import unexpanded

display = Display()


def run_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A host's run, by that host's settings."""
    run = settings.get("ddp_run")
    return {"base_dir": settings.get("ddp_base_dir") or find("ddp_base_dir").default, **({"run": run} if run else {})}


class ActionModule(FollowingAction):
    """The module of the same name, which prints the lines and continues where it was."""

    MODULE: ClassVar[str] = "nanochat.ddp.run_log"
    CODE: ClassVar[ModuleType] = log
    ANSWER: ClassVar[Mapping[str, Any]] = {"lines": list[str], "over": bool, "offset": int}

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """The last poll of this host's log, once all accompanying hosts have ended too."""
        variables: Mapping[str, Any] = task_vars or {}
        result: dict[str, object] = super().run(tmp, task_vars)
        if result.get("over"):
            return result
        host = str(variables["inventory_hostname"])
        if self.asked(host, variables)["follow"] and not self._names_folder:
            self.take_along(variables)
        result.update(self.follow(host, variables))
        while self.accompanied() and not abandoned():
            pass
        return result

    @property
    def _names_folder(self) -> bool:
        """Whether the task names a folder, which may differ between hosts."""
        return bool(self._task.args.get("run_dir") or self._task.args.get("base_dir"))

    def asked(self, host: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The task's validated options; without a folder, the one from the host's settings."""
        checks = ONE_RUN if self._names_folder else {}
        options = self.validate_argument_spec(unexpanded(log.OPTIONS), **checks)[1]
        given = {name: value for name, value in options.items() if value is not None}
        return given if self._names_folder else {**run_of(variables["hostvars"][host]), **given}

    def follow(self, host: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Print the log and new lines until the run ends; returns the last poll."""
        asked = self.asked(host, variables)
        seen = self.ask(asked, variables)
        if seen is None:
            return {"unreachable": True, "over": True, "msg": "the host cannot be reached"}
        width = max(map(len, variables["ansible_play_hosts"]))
        while not abandoned():
            lines = words(seen, "lines")
            if lines:
                display.display(printable("\n".join(f"{host:<{width}} | {line}" for line in lines)))
            if seen.get("failed") or seen["over"] or not asked["follow"]:
                break
            # While the host is unreachable, its last state counts.
            seen = self.ask({**asked, "offset": seen["offset"]}, variables) or {**seen, "lines": []}
        return {**seen, "over": True}
