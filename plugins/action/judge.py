# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides once for all hosts, on the controller, from their tasks' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ansible.plugins.action import ActionBase

from ..module_utils._contract.findings import PlanError
from ..plugin_utils._judgements import hosts, plan, preflight, verdict
from ..plugin_utils._judgements.evidence import OF_PLAN, JudgeTask, Options


class Judgement(NamedTuple):
    """Its options besides `of`, and the judging function."""

    options: Options
    judge: Callable[[JudgeTask], dict[str, object]]


JUDGEMENTS = {
    "settings": Judgement(plan.HOSTS, plan.judge_settings),
    "questions": Judgement(plan.TOLERANT, plan.judge_questions),
    "plan": Judgement(plan.OPTIONS, plan.judge_plan),
    "setup": Judgement(OF_PLAN, hosts.judge_setup),
    "sameness": Judgement(hosts.SAMENESS, hosts.judge_sameness),
    "launch": Judgement(hosts.LAUNCH, hosts.judge_launch),
    "preflight": Judgement(preflight.OPTIONS, preflight.judge_preflight),
    "verdict": Judgement(verdict.OPTIONS, verdict.judge_verdict),
}


class ActionModule(ActionBase):
    """Validates the selected judgement's options and returns its result; contacts no host."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = False

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        result: dict[str, object] = super().run(tmp, task_vars)
        judgement = JUDGEMENTS.get(str(self._task.args.get("of")))
        of = {"of": {"type": "str", "choices": list(JUDGEMENTS), "required": True}}
        options = self.validate_argument_spec({**of, **(judgement.options if judgement else {})})[1]
        task = JudgeTask(options, task_vars or {}, self._task.check_mode)
        try:
            return {**result, "changed": False, **JUDGEMENTS[options["of"]].judge(task)}
        except PlanError as error:
            return {**result, "changed": False, "failed": True, "msg": str(error), "problems": error.findings}
