# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the work of a step is shared out again when ranks turn out to be faster or slower than thought (--rebalance).

The ranks tell each other with the token ids of a step how long they were busy in one before. From the same numbers they all come
to the same decision, so nothing else is asked. What changes is which rank takes which rows, its part of a head that is shared out,
and with it the matrices that it updates; which rows a step learns from stays as it is. No torch here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from nanochat.rules.shares import head_weights, share_rows

# Shares change where a step is expected to become shorter by more than this part of what it would be, in so many looks one after
# the other, each of so many seconds and steps at least. A slowed host is given less within a minute.
DEAD_BAND = 0.1
LOOKS = 2
LOOK_SECONDS, LOOK_STEPS = 10.0, 2
# Steps that do not count, after a start and after a change: memory is touched for the first time.
WARM_UP = 2


class Shares(NamedTuple):
    """What each rank has of a step: rows, and the weight of its part of a head that is shared out (none if it is whole)."""

    rows: list[int]
    head: list[int]


def work(shares: Shares, head_work: float) -> list[float]:
    """The part of a step's work that each rank has; head_work: that of the head in the whole."""
    rows = [one / sum(shares.rows) for one in shares.rows]
    if not shares.head:
        return rows
    head = [one / sum(shares.head) for one in shares.head]
    return [(1 - head_work) * r + head_work * h for r, h in zip(rows, head, strict=True)]


def fitting(now: Shares, speeds: Sequence[float]) -> Shares:
    """The shares for ranks of these speeds. With a whole head a rank without rows would have no gradient to give."""
    rows = share_rows(sum(now.rows), speeds, 0 if now.head else 1)
    return Shares(rows, head_weights(speeds) if now.head else [])


def step_seconds(shares: Shares, speeds: Sequence[float], head_work: float) -> float:
    """How long the rank that takes longest is busy; a speed is the part of a step's work that a rank does in a second."""
    return max(one / speed for one, speed in zip(work(shares, head_work), speeds, strict=True))


class Balancer:
    """Hears of every step how long each rank was busy in it, and says when the shares are to change, and to what."""

    def __init__(self, shares: Shares, head_work: float) -> None:
        self.shares, self.head_work = shares, head_work
        self._heard = 0
        self._steps: list[list[float]] = []
        self._speeds: list[list[float]] = []  # of the looks that found the shares wrong
        self.speeds: list[float] = []  # those for which the shares are to change

    def hear(self, busy: Sequence[float]) -> Shares | None:
        """Seconds by rank, 0 where a rank has none to tell; the shares to change to, if they are to."""
        if not all(busy):
            return None
        self._heard += 1
        if self._heard <= WARM_UP:
            return None
        self._steps.append(list(busy))
        if len(self._steps) < LOOK_STEPS or sum(map(max, self._steps)) < LOOK_SECONDS:
            return None
        seconds = [statistics.median(one) for one in zip(*self._steps, strict=True)]
        self._steps.clear()
        return self._look(seconds)

    def _look(self, seconds: Sequence[float]) -> Shares | None:
        """What one look comes to: seconds of each rank in its usual step."""
        speeds = [w / s for w, s in zip(work(self.shares, self.head_work), seconds, strict=True)]
        if not self._pays(speeds):
            self._speeds.clear()
            return None
        self._speeds.append(speeds)
        if len(self._speeds) < LOOKS:
            return None
        mean = [statistics.fmean(one) for one in zip(*self._speeds, strict=True)]
        self._speeds.clear()
        if not self._pays(mean):
            return None
        self.speeds = mean
        return fitting(self.shares, mean)

    def _pays(self, speeds: Sequence[float]) -> bool:
        better = step_seconds(fitting(self.shares, speeds), speeds, self.head_work)
        return step_seconds(self.shares, speeds, self.head_work) > (1 + DEAD_BAND) * better
