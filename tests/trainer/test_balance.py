# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who takes which rows, and when that changes: pure functions."""

from __future__ import annotations

import itertools

import pytest

from nanochat.parallel import balance
from nanochat.parallel.balance import Balancer, Shares, shares_for, step_seconds, work_split
from nanochat.run.state import SMOOTHING, TrainingProgress


def busy(shares: Shares, speeds: list[float], head_work: float) -> list[float]:
    """Seconds per step of each rank; its speed is the fraction of a step's work that it does per second."""
    return [w / s for w, s in zip(work_split(shares, head_work), speeds, strict=True)]


def heard(balancer: Balancer, seconds: list[float], most: float) -> tuple[Shares | None, float]:
    """The balancer's decision after identical steps, and the seconds until then."""
    passed = 0.0
    while passed < most:
        passed += max(seconds)
        if (found := balancer.hear(seconds)) is not None:
            return found, passed
    return None, passed


def test_rows_go_by_speed_and_a_rank_keeps_one_where_the_head_is_whole() -> None:
    assert shares_for(Shares([12, 0, 0], [1, 1, 1]), (4, 2, 1)).rows == [8, 3, 1]
    assert shares_for(Shares([6, 6], [1, 1]), (100, 1)).rows == [12, 0]
    assert shares_for(Shares([6, 6], []), (100, 1)) == Shares([11, 1], [])


def test_a_slowed_rank_is_given_less_within_a_minute() -> None:
    """Steps of a tenth of a second to twelve seconds, slowed to a half and to a tenth; afterwards nothing changes."""
    for step, slowed in itertools.product((0.1, 1.0, 6.0, 12.0), (0.5, 0.1)):
        shares, speeds = Shares([6, 6], [1, 1]), [0.5 / step, 0.5 / step]
        balancer = Balancer(shares, 0.6)
        assert heard(balancer, busy(shares, speeds, 0.6), 100 * step)[0] is None
        speeds[1] *= slowed
        found, seconds = heard(balancer, busy(shares, speeds, 0.6), 600)
        assert found is not None and found.rows[1] < 6 and found.head[1] < found.head[0]
        # A check takes at least two steps, and one may already have begun.
        assert seconds <= max(60, 6 * step / slowed)
        again = Balancer(found, 0.6)
        assert heard(again, busy(found, speeds, 0.6), 20 * balance.LOOK_SECONDS)[0] is None
        assert step_seconds(found, speeds, 0.6) < step_seconds(shares, speeds, 0.6) / (1 + balance.DEAD_BAND)


def test_small_differences_and_a_single_look_change_nothing() -> None:
    shares = Shares([6, 6], [500, 500])
    balancer = Balancer(shares, 0.6)
    assert heard(balancer, [1.0, 1.15], 300)[0] is None
    for dummy in range(5):
        # Checks alternate: one out of balance, one in balance.
        assert heard(balancer, [1.0, 2.0], 9.5)[0] is None
        assert heard(balancer, [1.0, 1.0], 20)[0] is None
    for number in range(200):
        assert balancer.hear([0.5, 5.0 if number % 10 == 0 else 0.5]) is None


def test_steps_of_which_a_rank_tells_nothing_and_the_first_ones_are_left_out() -> None:
    balancer = Balancer(Shares([6, 6], [1, 1]), 0.6)
    for dummy in range(2):
        assert balancer.hear([100.0, 1.0]) is None
    assert all(balancer.hear([0.0, 50.0]) is None for dummy in range(100))
    assert all(balancer.hear([1.0, 1.0]) is None for dummy in range(100))


def test_the_smooth_loss_of_a_loss_that_stands_still_is_that_loss() -> None:
    progress = TrainingProgress()
    for step in range(3):
        progress.step = step
        assert progress.add_loss(4.0) == pytest.approx(4.0)
    progress.step = 3
    assert progress.add_loss(3.0) == pytest.approx(4.0 - (1 - SMOOTHING) / (1 - SMOOTHING**4))
