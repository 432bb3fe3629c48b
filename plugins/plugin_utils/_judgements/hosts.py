# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgements over all hosts of a job: whether to start the run, and the doctor's verdict, whose reasoning is in _doctor/judge.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...module_utils._contract.plan import Plan
from ...module_utils._doctor.case import bundle
from ...module_utils._doctor.judge import diagnose
from ...module_utils._kit.printable import printable
from .._agent.carrier import Call
from .evidence import evidence_of, keep


def judge_launch(
    call: Call, plan: Plan, evidence: Mapping[str, Any], restart: bool = False, fresh: bool = False
) -> dict[str, object]:
    """Whether to start the run, and why."""
    seen = evidence_of((node["host"] for node in plan["nodes"]), evidence, "run")
    decision, reason = _launch_action([one["run"] for one in seen.values()], plan["digest"], restart, fresh)
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


# The doctor


def judge_verdict(
    call: Call, plan: Plan, evidence: Mapping[str, Any], secrets: Sequence[Any] = (), file: str | None = None
) -> dict[str, object]:
    """The doctor's single finding with its evidence, stored in a file."""
    told = diagnose(plan, evidence_of((node["host"] for node in plan["nodes"]), evidence))
    summary = {"verdict": told["verdict"], "summary": told["evidence"]}
    keep(file, bundle(plan, evidence, secrets, summary), "The evidence", 0o600)
    return {**told, "text": printable(text_of(told, file))}


def text_of(told: Mapping[str, Any], path: str | None) -> str:
    """The verdict for people."""
    verdict = told["verdict"]
    lines = [f"{verdict['code']}: {verdict['seen']}", f"  why: {verdict['why']}", f"  do:  {verdict['remedy']}"]
    lines += [f"  {line}" for line in told["evidence"]]
    return "\n".join([*lines, *([f"  full evidence: {path}"] if path else [])])
