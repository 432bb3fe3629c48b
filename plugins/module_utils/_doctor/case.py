# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Input of the doctor's judge: the plan, each host's answer, and the time limits."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from .._contract.plan import Plan
from .._run.stalls import ObservedRank, StallLimits, state_of
from .answers import Answer
from .deaths import RankDeath, death_of
from .evidence import RankEvidence
from .reading import works


class Case(NamedTuple):
    """One examination."""

    plan: Plan
    answers: Dict[str, Answer]
    limits: StallLimits

    def rank(self, host: str) -> int:
        return next((int(node["rank"]) for node in self.plan["nodes"] if node["host"] == host), -1)

    def host_of(self, rank: int) -> Optional[str]:
        return next((str(node["host"]) for node in self.plan["nodes"] if node["rank"] == rank), None)

    def by_rank(self) -> List[str]:
        """The hosts that were asked, in the order of their ranks."""
        return sorted(self.answers, key=self.rank)

    def leader(self) -> str:
        """The master if it answered, or else the first host that did."""
        master, known = str(self.plan["master"]["host"]), self.known()
        return master if master in known else min(known)

    def name(self, host: str) -> str:
        return "rank %d (%s)" % (self.rank(host), host)

    def states(self) -> Dict[str, str]:
        return {host: str(state_of(found["run"])) for host, found in self.known().items()}

    def in_state(self, state: str) -> List[str]:
        """The hosts that report this state."""
        return [host for host, seen in self.states().items() if seen == state]

    def without_answer(self, hosts: Sequence[str]) -> str:
        """Why these hosts have no evidence."""
        return "; ".join("%s %s" % (self.name(host), self.answers[host].words) for host in hosts)

    def death(self, host: str) -> RankDeath:
        return death_of(self.known()[host], self.rank(host))

    def known(self) -> Dict[str, RankEvidence]:
        return {host: answer.evidence for host, answer in self.answers.items() if answer.evidence is not None}

    def runs(self) -> Dict[str, Mapping[str, Any]]:
        """The run of each host; empty for a silent one."""
        return {host: answer.evidence["run"] if answer.evidence else {} for host, answer in self.answers.items()}

    def silent(self) -> List[str]:
        """The hosts that returned nothing."""
        return sorted(host for host, answer in self.answers.items() if answer.is_silent)

    def ranks(self, count_cpu: bool = True) -> Dict[str, ObservedRank]:
        """Input for stalls.py; without `count_cpu` as if no rank used the CPU."""
        ranks = {host: ObservedRank({}, silent=math.inf) for host in self.answers}
        for host, found in self.known().items():
            quiet = 0.0 if count_cpu and works(found) else math.inf
            ranks[host] = ObservedRank(found["run"], quiet, found["run"].get("session_age") or 0.0)
        return ranks
