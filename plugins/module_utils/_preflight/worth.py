# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each host's contribution: the speed that the others would have without it. Pure functions.

The same model of a step is used before a run, with the rehearsal's measurements, and during it, with those of its steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import speed_text
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    Link,
    Speed,
    StepJob,
    job_of,
    muon_share,
    predict,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.rates import Links, slowest_between
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.shares import share_rows

# A host costs more than it adds if the others are this much faster without it.
COSTS = 1.08
MOST_ROWS = 100_000
# With more hosts than this, only those that cost more than they add are listed.
FEW_HOSTS = 4


class Team(NamedTuple):
    """The remaining hosts and their speed."""

    hosts: List[str]
    tokens_per_second: float


def team_speed(
    plan: Plan, speeds: Sequence[Speed], links: Links, rows: Sequence[int], hosts: Sequence[str]
) -> Optional[float]:
    """Tokens per second of some hosts with all rows of a step; None if their links are unknown."""
    stay = [(speed, share) for speed, share in zip(speeds, rows) if speed.host in hosts]
    link = slowest_between(links, hosts)
    if not stay or (link is None and len(stay) > 1):
        return None
    weights = [1.0 / speed.pass_seconds if follows_speed(plan) else float(share) for speed, share in stay]
    if not all(weight > 0 for weight in weights):
        return None
    shares = share_rows(sum(rows), weights)
    part = part_of(job_of(plan), {speed.host: share for (speed, dummy), share in zip(stay, shares)})
    return predict(part, [one for one, dummy in stay], link, shares).tokens_per_second


def follows_speed(plan: Plan) -> bool:
    """Whether the hosts' rows follow their speeds."""
    training = plan["training"]
    return training.get("batch_split") in ("auto", "speed") or bool(training.get("rebalance"))


def part_of(job: StepJob, rows: Mapping[str, int]) -> StepJob:
    """The same job for these hosts alone, with these rows."""
    hosts = tuple(host for host in job.hosts if host in rows)
    return dataclasses.replace(job, hosts=hosts, rows=tuple(rows[host] for host in hosts), head_shares=())


def neighbours(plan: Plan) -> List[str]:
    """Nodes that share a machine: without one of them the rest would have its processors, which no
    measurement covers."""
    places = [node.get("address") for node in plan["nodes"]]
    return [node["host"] for node in plan["nodes"] if places.count(node.get("address")) > 1]


def without_each(plan: Plan, speeds: Sequence[Speed], links: Links, rows: Sequence[int]) -> Dict[str, float]:
    """Tokens per second of the others without each host, if known."""
    hosts = [speed.host for speed in speeds]
    beside = neighbours(plan)
    found: Dict[str, float] = {}
    for host in hosts:
        others = [other for other in hosts if other != host]
        speed = team_speed(plan, speeds, links, rows, others) if others and host not in beside else None
        if speed is not None:
            found[host] = round(speed, 1)
    return found


def best_team(plan: Plan, speeds: Sequence[Speed], links: Links, rows: Sequence[int]) -> Optional[Team]:
    """The fastest of the teams of two or more left without one host, without those of the slowest links (a second host
    on Wi-Fi would hide the first one's cost), or without the slowest hosts. None if unknown."""
    hosts, beside = [speed.host for speed in speeds], set(neighbours(plan))
    of_links = sorted(hosts, key=lambda host: -max((link.mbit for link in links.get(host, {}).values()), default=0.0))
    of_speed = [speed.host for speed in sorted(speeds, key=lambda speed: speed.pass_seconds)]
    tried = [[other for other in hosts if other != host] for host in hosts]
    tried += [order[:count] for order in (of_links, of_speed) for count in range(2, len(hosts) - 1)]
    found: List[Team] = []
    for some in tried:
        stay = [host for host in hosts if host in some]
        if len(stay) > 1 and not beside - set(stay):
            speed = team_speed(plan, speeds, links, rows, stay)
            found += [] if speed is None else [Team(stay, round(speed, 1))]
    return max(found, key=lambda team: team.tokens_per_second, default=None)


# During a run


def speed_seen(plan: Plan, host: str, run: Mapping[str, Any]) -> Optional[Speed]:
    """A host's speed from its newest steps. Its optimizer time counts as its share of Muon, which is most of it."""
    rows, computing, optimizer = run.get("rows"), run.get("compute_seconds"), run.get("optimizer_seconds")
    if not rows or not computing or optimizer is None:
        return None
    return Speed(host, computing * plan["training"]["device_batch"] / rows, 0.0, optimizer / muon_share(job_of(plan)))


def worth_of_runs(runs: Mapping[str, Mapping[str, Any]]) -> Dict[str, float]:
    """Tokens per second without each host, from run_info; empty unless all hosts of the plan report."""
    plan = next((cast(Plan, run["plan_facts"]) for run in runs.values() if run.get("plan_facts")), None)
    try:
        return _worth_of_runs(plan, runs) if plan else {}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # That plan is of another version, or damaged; a status must not fail for it.
        return {}


def _worth_of_runs(plan: Plan, runs: Mapping[str, Mapping[str, Any]]) -> Dict[str, float]:
    hosts = [node["host"] for node in plan["nodes"]]
    there = [runs[host] for host in hosts if host in runs]
    # While a host is away, the figures belong to other shares.
    if len(hosts) < 2 or len(there) < len(hosts) or any(run.get("world") != len(hosts) for run in there):
        return {}
    speeds = [speed for speed in (speed_seen(plan, host, runs[host]) for host in hosts) if speed]
    rows = [int(runs[host].get("rows") or 0) for host in hosts]
    if len(speeds) < len(hosts) or sum(rows) > MOST_ROWS:
        return {}
    links = {host: {peer: Link(*pair) for peer, pair in runs[host]["links"].items()} for host in hosts}
    return without_each(plan, speeds, links, rows)


def worth_lines(runs: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """Each host's contribution as text; of many hosts only those that cost more than they add."""
    without = worth_of_runs(runs)
    now = next((run["tokens_per_second"] for run in runs.values() if run.get("tokens_per_second")), None)
    if not now:
        return []
    lines = []
    for host, speed in without.items():
        costs = speed >= COSTS * now
        if costs or len(runs) <= FEW_HOSTS:
            line = "without %s %s tok/s, with it %s" % (host, speed_text(speed), speed_text(now))
            lines.append(line + (": it costs more than it brings" if costs else ""))
    return lines
