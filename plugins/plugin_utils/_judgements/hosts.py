# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgements over all hosts of a job: whether they are the same, whether to start the run, and the doctor's verdict (its reasoning is in
module_utils/_doctor/judge.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...module_utils._contract.plan import Plan
from ...module_utils._doctor.bundle import bundle
from ...module_utils._doctor.judge import diagnose
from ...module_utils._kit.printable import printable
from ...module_utils._preflight.judge import public
from .evidence import JudgeTask, evidence_of, keep

# Required keys of each part's evidence.
KEYS = {
    "files": ("digest",),
    "venv": ("venv", "torch", "packages", "python_version"),
    "data": ("digest",),
}


def judge_launch(
    task: JudgeTask, plan: Plan, evidence: Mapping[str, Any], restart: bool = False, fresh: bool = False
) -> dict[str, object]:
    """Whether to start the run, and why."""
    seen = evidence_of((node["host"] for node in plan["nodes"]), evidence, "run")
    decision, reason = _launch_action([one["run"] for one in seen.values()], plan["digest"], restart, fresh)
    return {"decision": decision, "reason": reason}


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


def judge_sameness(
    task: JudgeTask, hosts: Sequence[str], master: str | None = None, **evidence: Mapping[str, Any]
) -> dict[str, object]:
    """Fails with a sentence for each host whose files, venv or data (those that are given) differ from those of the master, or of the
    first host."""
    ordered = dict.fromkeys([master or hosts[0], *hosts])
    found = {part: evidence_of(ordered, seen, *KEYS[part]) for part, seen in evidence.items()}
    differing = list(disagreements(found))
    return {"failed": bool(differing), "msg": "\n".join(differing)}


DIFFERS = {
    "files": "{host} has different trainer files from {first}; run --tags trainer again.",
    "data": "{host} reads different files from {first}: {one} in its run folder, {right} there. "
    "Run --tags data again, with -e data_verify=full if it persists.",
}


def disagreements(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A sentence for each host that differs from the first; `found` has files, venv and data (if compared) by host."""
    for part, of_hosts in found.items():
        (first, right), *others = of_hosts.items()
        for host, one in others:
            if part != "venv" and one["digest"] != right["digest"]:
                yield DIFFERS[part].format(host=host, first=first, one=one["digest"], right=right["digest"])
            if part == "venv" and not same_packages(right, one):
                names = differing_packages(right, one) or ["torch"]
                yield (
                    f"{host} has {versions_text(one, names)}, {first} has {versions_text(right, names)}; ranks of "
                    f"different versions would disagree. Remove {one['venv']} there and run --tags trainer again."
                )


def same_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether torch is the same, and all packages too if the Python is."""
    if public(one["torch"]) != public(other["torch"]):
        return False
    # Another Python may need another version of packages that only read data.
    return not differing_packages(one, other) or one["python_version"] != other["python_version"]


def differing_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Packages with different versions; those that only one has were not required of the other."""
    ours, theirs = versions(one), versions(other)
    return sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])


def versions(venv: Mapping[str, Any]) -> dict[str, str]:
    """Package -> released version, without the build tag."""
    return {name: public(version) for name, version in venv["packages"].items()}


def versions_text(venv: Mapping[str, Any], names: Sequence[str]) -> str:
    """For people; torch is always listed."""
    found = {"torch": public(venv["torch"]) or "none", **versions(venv)}
    return ", ".join(f"{name} {found[name]}" for name in names)


# The doctor


def judge_verdict(
    task: JudgeTask, plan: Plan, evidence: Mapping[str, Any], secrets: Sequence[Any] = (), file: str | None = None
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
