# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Input of the doctor's judge: the plan, the health of the run, and each host's evidence, or why there is none; and all of it to share.

Unreachable, too slow to answer, and a failed module are three different cases.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from .._contract.plan import Plan
from .._kit.words import plain_reason
from .._run.health import Health, Seen, StallLimits
from .._run.state import CRASHED
from .evidence import RankDeath, RankEvidence, death_of, works

MASK = "***"


class Answer(NamedTuple):
    """A host's evidence; otherwise why there is none, and whether it returned nothing at all."""

    evidence: Optional[RankEvidence]
    words: str = ""
    is_silent: bool = False


def answer_of(result: Optional[Mapping[str, Any]]) -> Answer:
    """The result of doctor_info on a host, whatever happened to the task."""
    told = result or {"msg": "the host was not contacted"}
    if told.get("evidence"):
        return Answer(told["evidence"])
    if told.get("timedout"):
        return Answer(None, "did not answer within %s s" % told["timedout"].get("period", "some"), True)
    said = (plain_reason(str(told.get("msg") or "")).splitlines() or ["no reason was given"])[0]
    is_silent = bool(told.get("unreachable"))
    return Answer(None, "%s: %s" % ("cannot be reached" if is_silent else "could not be examined", said), is_silent)


class Case:
    """One examination; results: what doctor_info returned by host."""

    def __init__(self, plan: Plan, results: Mapping[str, Any]) -> None:
        self.plan, self.results = plan, results
        self.ranks = {node["host"]: node["rank"] for node in plan["nodes"]}
        # In the order of their ranks.
        self.answers = {host: answer_of(results[host]) for host in sorted(results, key=self.rank)}
        self.known = {host: one.evidence for host, one in self.answers.items() if one.evidence is not None}
        self.silent = sorted(host for host, one in self.answers.items() if one.is_silent)
        self.limits = StallLimits(timeout=float(plan.get("timeout_seconds") or StallLimits().timeout))
        seen = [self._seen(host) for host in self.answers]
        self.health = Health(seen, self.limits)
        self.stalled = self.health.stalled
        # Whether the run would count as stalled if no rank used CPU.
        self.lags = Health([one._replace(without_cpu=math.inf) for one in seen], self.limits).stalled
        self.states = {host: str(self.health.seen[host].state) for host in self.known}

    def _seen(self, host: str) -> Seen:
        found = self.known.get(host)
        if found is None:
            return Seen(host, silent=math.inf)
        return Seen(host, found["run"], without_cpu=0.0 if works(found) else math.inf)

    def part(self, hosts: Iterable[str]) -> Case:
        """The same of some hosts."""
        return Case(self.plan, {host: self.results[host] for host in hosts if host in self.results})

    def rank(self, host: str) -> int:
        return self.ranks.get(host, -1)

    def host_of(self, rank: int) -> Optional[str]:
        return next((host for host, one in self.ranks.items() if one == rank), None)

    def leader(self) -> str:
        """The host of the lowest rank that answered."""
        return next(iter(self.known))

    def name(self, host: str) -> str:
        return "rank %d (%s)" % (self.rank(host), host)

    def in_state(self, state: str) -> List[str]:
        """The hosts that report this state."""
        return [host for host, seen in self.states.items() if seen == state]

    def without_answer(self, hosts: Iterable[str]) -> str:
        """Why these hosts have no evidence."""
        return "; ".join("%s %s" % (self.name(host), self.answers[host].words) for host in hosts)

    def death(self, host: str) -> RankDeath:
        return death_of(self.known[host], self.rank(host))

    def own_deaths(self) -> List[str]:
        """The hosts whose rank crashed by itself."""
        return [host for host in self.in_state(CRASHED) if not self.death(host).is_echo]


# -- a file that can be shared ------------------------------------------------------------------------------------------


def bundle(case: Case, secrets: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> Dict[str, object]:
    """The verdict, the plan and all evidence, without secrets and environment variables."""
    nodes = [{key: value for key, value in node.items() if key != "env"} for node in case.plan["nodes"]]
    values = {str(value) for one in secrets for value in one.values() if len(str(value)) > 3}
    hosts = {host: answer.evidence or answer.words for host, answer in case.answers.items()}
    whole = {**told, "plan": dict(case.plan, nodes=nodes), "hosts": hosts}
    return dict(without(whole, sorted(values, key=len, reverse=True)))


def without(found: Any, secrets: Sequence[str]) -> Any:
    """The same with every secret masked, at any depth."""
    if isinstance(found, Mapping):
        return {key: without(value, secrets) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [without(value, secrets) for value in found]
    if isinstance(found, str):
        for secret in secrets:
            found = found.replace(secret, MASK)
    return found
