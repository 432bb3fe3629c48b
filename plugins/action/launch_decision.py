# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the run is left alone or started, once for all hosts; the reasoning is in module_utils/_session/launch.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ansible_collections.nanochat.ddp.plugins.module_utils._session.launch import launch_action
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judging import JudgingAction, evidence_of


class ActionModule(JudgingAction):
    """Judges what run_info returned for every node."""

    OPTIONS: ClassVar[dict[str, dict[str, object]]] = {
        "plan": {"type": "dict", "required": True},
        "evidence": {"type": "dict", "required": True},
        "restart": {"type": "bool", "default": False},
        "fresh": {"type": "bool", "default": False},
    }

    def judge(self, options: Mapping[str, Any], task_vars: Mapping[str, Any]) -> dict[str, object]:
        """What is to be done, and why."""
        plan = options["plan"]
        seen = evidence_of((node["host"] for node in plan["nodes"]), options["evidence"], "run")
        runs = [one["run"] for one in seen.values()]
        decided = launch_action(runs, plan["digest"], options["restart"], options["fresh"])
        return {"decision": decided["action"], "reason": decided["reason"]}
