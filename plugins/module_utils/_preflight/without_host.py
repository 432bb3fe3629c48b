# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The speed that the other hosts would have without each one, by the rehearsal's measurements. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Mapping, Optional, Sequence

from .._contract.plan import Plan
from .._plan.step_model import Speed, StepJob, job_of, predict
from .._rules.shares import share_rows
from .rates import Links, slowest_between


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
    return training.get("batch_split") in ("auto", "speed")


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
