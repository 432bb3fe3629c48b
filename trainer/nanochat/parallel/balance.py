# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Redistributes the work of a step when ranks are faster or slower than expected (--rebalance).

With a step's token ids, ranks exchange how long they were busy in an earlier one. From the same numbers they all reach
the same decision, without further messages. It changes which rank takes which rows, its part of a shared head,
and the matrices that it updates; the rows of a step stay the same. Without torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from nanochat.rules.shares import head_weights, share_rows

# Shares change if a step should become shorter by more than this fraction, judged by the median of the last steps: so many seconds and
# steps. The first two may be slow, because they touch memory for the first time. A slowed host gets less work within a minute.
DEAD_BAND = 0.1
LOOK_SECONDS, LOOK_STEPS = 20.0, 5


class Shares(NamedTuple):
    """Each rank's share of a step: rows, and the weight of its part of a shared head (empty for a whole one)."""

    rows: list[int]
    head: list[int]


def work_split(shares: Shares, head_work: float) -> list[float]:
    """Each rank's fraction of a step's work; head_work: the head's fraction."""
    rows = [one / sum(shares.rows) for one in shares.rows]
    if not shares.head:
        return rows
    head = [one / sum(shares.head) for one in shares.head]
    return [(1 - head_work) * r + head_work * h for r, h in zip(rows, head, strict=True)]


def shares_for(now: Shares, speeds: Sequence[float]) -> Shares:
    """The shares for these speeds. With a whole head, a rank without rows would have no gradient."""
    rows = share_rows(sum(now.rows), speeds, 0 if now.head else 1)
    return Shares(rows, head_weights(speeds) if now.head else [])


def step_seconds(shares: Shares, speeds: Sequence[float], head_work: float) -> float:
    """Busy time of the slowest rank; a speed is the fraction of a step's work that a rank does per second."""
    return max(one / speed for one, speed in zip(work_split(shares, head_work), speeds, strict=True))


class Balancer:
    """Receives every rank's busy time per step, and decides when and how to change the shares."""

    def __init__(self, shares: Shares, head_work: float) -> None:
        self.shares, self.head_work = shares, head_work
        self._steps: list[Sequence[float]] = []
        self.speeds: list[float] = []  # that the new shares suit

    def hear(self, busy: Sequence[float]) -> Shares | None:
        """Add the seconds by rank (0: unknown); returns new shares, if any."""
        if not all(busy):
            return None
        self._steps.append(busy)
        if len(self._steps) < LOOK_STEPS or sum(map(max, self._steps)) < LOOK_SECONDS:
            return None
        work = work_split(self.shares, self.head_work)
        usual = [statistics.median_high(one) for one in zip(*self._steps, strict=True)]
        self._steps.clear()
        self.speeds = [part / seconds for part, seconds in zip(work, usual, strict=True)]
        better = shares_for(self.shares, self.speeds)
        pays = step_seconds(self.shares, self.speeds, self.head_work) > (1 + DEAD_BAND) * step_seconds(
            better, self.speeds, self.head_work
        )
        return better if pays else None
