# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Estimates the bits per byte of a training from finished ones with the same model and data. Pure functions."""

from __future__ import annotations

import math
from typing import List, Mapping, NamedTuple, Optional, Sequence

from .._contract import lineage
from .._contract.document import items, number, section, text
from .._contract.plan import Plan
from .._contract.training import Curve, curve_of
from .hosts import Host

# Factors between the tokens of two trainings: to count as alike, and to interpolate between them.
NEAR, COMPARABLE = 1.5, 4.0


class Similar(NamedTuple):
    """A finished training with the same model, data and evaluation."""

    curve: Curve
    tokens: int
    total_batch: int

    @property
    def bits(self) -> float:
        return self.curve["evals"][-1][1]

    def factor(self, tokens: int) -> float:
        """How many times more or fewer tokens that is."""
        return max(tokens / self.tokens, self.tokens / tokens)


def similar(hosts: Sequence[Host], plan: Plan, training: str) -> List[Similar]:
    """The hosts' finished trainings that compare with this plan's, the newest of each host first; training: its own id."""
    found = []
    for one in [one for host in hosts for one in items(host.probe, "finished")]:
        curve, tokens, batch = curve_of(one), number(one, "tokens"), number(one, "total_batch")
        own = training and text(one, "training") == training
        if curve and tokens > 0 and not own and compares(one, plan):
            found.append(Similar(curve, tokens, batch))
    return found


def compares(one: Mapping[str, object], plan: Plan) -> bool:
    was, now = section(one, "lineage"), lineage.of_plan(plan)
    data = section(was, "data").get("id")
    same = section(was, "model") == now["model"] and data is not None and data == now["data"].get("id")
    return same and number(one, "eval_tokens") == plan["training"]["eval_tokens"]


def course(plan: Plan, found: Sequence[Similar]) -> Optional[Curve]:
    """The evaluations to compare the run's own with: those of the most similar training, with the same batch."""
    tokens, batch = plan["training"]["tokens"], plan["training"]["total_batch"]
    near = [one for one in found if one.total_batch == batch and one.factor(tokens) <= NEAR]
    return min(near, key=lambda one: one.factor(tokens)).curve if near else None


def expected(plan: Plan, found: Sequence[Similar]) -> str:
    """The bits per byte at the end with their source, in words; empty if no training is near enough.

    Between one with fewer and one with more tokens they follow a power of the tokens.
    """
    tokens = plan["training"]["tokens"]
    found = sorted((one for one in found if one.factor(tokens) <= COMPARABLE), key=lambda one: one.factor(tokens))
    below = next((one for one in found if one.tokens <= tokens), None)
    above = next((one for one in found if one.tokens > tokens), None)
    if below and above:
        part = math.log(tokens / below.tokens) / math.log(above.tokens / below.tokens)
        sources, bits = [below, above], below.bits ** (1 - part) * above.bits**part
    else:
        sources = [one for one in (below, above) if one and one.factor(tokens) <= NEAR]
        bits = sources[0].bits if sources else 0.0
    if not sources:
        return ""
    said = [f"{one.curve['run']} ended at {one.bits:.4f} after {one.tokens / 1e6:.3g}M tokens" for one in sources]
    return f"expected at the end: about {bits:.3g} bits per byte; with this model and data, {' and '.join(said)}"
