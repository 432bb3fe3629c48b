# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgements over all hosts of a job: whether they are the same, what they lack, and whether to start the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...module_utils._preflight.setup import disagreements, what_is_there
from .evidence import OF_PLAN, JudgeTask, Options, evidence_of

LAUNCH: Options = {
    **OF_PLAN,
    "restart": {"type": "bool", "default": False},
    "fresh": {"type": "bool", "default": False},
}
# Required keys of each part's evidence.
KEYS = {
    "files": ("digest",),
    "venv": ("venv", "torch", "packages", "python_version"),
    "data": ("digest",),
}
SAMENESS: Options = {
    "hosts": {"type": "list", "elements": "str", "required": True},
    "master": {"type": "str"},
    **{part: {"type": "dict"} for part in KEYS},
}


def judge_setup(task: JudgeTask) -> dict[str, object]:
    """Which steps have nothing to copy."""
    plan = task.options["plan"]
    hosts = [node["host"] for node in plan["nodes"]]
    return {**what_is_there(plan, evidence_of(hosts, task.options["evidence"], "files", "venv", "data"))}


def judge_launch(task: JudgeTask) -> dict[str, object]:
    """Whether to start the run, and why."""
    options = task.options
    plan = options["plan"]
    seen = evidence_of((node["host"] for node in plan["nodes"]), options["evidence"], "run")
    runs = [one["run"] for one in seen.values()]
    decision, reason = _launch_action(runs, plan["digest"], options["restart"], options["fresh"])
    show = "" if decision == "start" else f"The run {plan['run']} is left alone: {reason}."
    return {"decision": decision, "reason": reason, "show": show}


def _launch_action(
    runs: Sequence[Mapping[str, object]], plan_digest: str, restart: bool, fresh: bool
) -> tuple[str, str]:
    """From all hosts' states (from run_info), because a run lives or ends as a whole."""
    states = {str(run["state"]) for run in runs}
    if fresh:
        return "start", "you asked for a fresh start"
    if any(run.get("plan_digest") != plan_digest for run in runs):
        return "start", "the plan is new on at least one host"
    if "finished" in states and states <= {"finished", "away"}:
        # A host that was away at the end has nothing left to do either.
        return "keep", "it already finished with this plan; -e ddp_fresh=true trains it from scratch"
    if restart:
        return "start", "you asked for a restart"
    if states == {"running"}:
        return "keep", "it is already running with this plan"
    return "start", "it is " + " and ".join(sorted(states)) + " on its hosts"


def judge_sameness(task: JudgeTask) -> dict[str, object]:
    """Fails with a sentence for each host whose trainer, packages or data differ from those of the master, or of the first host."""
    options = task.options
    hosts = dict.fromkeys([options["master"] or options["hosts"][0], *options["hosts"]])
    given = {part: options[part] for part in KEYS if options[part] is not None}
    found = {part: evidence_of(hosts, given[part], *KEYS[part]) for part in given}
    differing = list(disagreements(found))
    return {"failed": bool(differing), "msg": "\n".join(differing)}
