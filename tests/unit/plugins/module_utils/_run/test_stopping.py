# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a stop may take: as long as the run's own steps and saves."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stopping import stop_seconds

NODES = [{"checkpoint_bytes": 500_000_000}]
PLAN: dict[str, Any] = {"timeout_seconds": 300, "trainer": {"source": "ours"}, "nodes": NODES}
START = {"kind": "start", "time": 1.0}


def step(seconds: Any) -> dict[str, Any]:
    return {"kind": "step", "time": 2.0, "step": 1, "seconds": seconds}


def saved(seconds: Any) -> dict[str, Any]:
    return {"kind": "checkpoint", "time": 2.0, "step": 1, "seconds": seconds}


def test_field_44_slow_steps_and_slow_disks_get_their_time():
    # This step, the next and the save, also where each takes twice as long as before.
    assert stop_seconds([START, step(100.0), saved(80.0)], {}, PLAN) >= 2 * (2 * 100 + 80)
    quick = stop_seconds([START, step(0.5), saved(0.5)], {}, PLAN)
    assert 30 <= quick < 40, "a quick run that hangs is not waited for without end"


def test_the_slowest_of_the_latest_steps_counts():
    assert stop_seconds([START, step(1.0), step(60.0), step(1.0), saved(1)], {}, PLAN) > 120


def test_an_evaluation_that_goes_on_ends_first():
    events = [START, step(1.0), saved(1.0), {"kind": "eval", "seconds": 200.0}]
    assert stop_seconds(events, {}, PLAN) > 200


def test_before_the_first_save_its_size_tells():
    assert stop_seconds([START, step(1.0)], {}, PLAN) >= 50


def test_what_the_trainer_tells_is_believed():
    told = {"step_seconds": 3.0, "save_seconds": 40.0, "phase": "sync"}
    assert 46 <= stop_seconds([START], told, PLAN) < 140


@pytest.mark.parametrize("phase", [None, "start", "rendezvous", "agree", "resume"])
def test_before_training_there_is_nothing_to_save(phase):
    assert stop_seconds([], {"phase": phase}, PLAN) == 10


def test_a_first_step_that_takes_long_is_waited_for():
    assert stop_seconds([START], {"phase": "forward_backward"}, PLAN) == 300


def test_another_trainer_gets_the_time_of_the_plan():
    assert stop_seconds([], {}, {**PLAN, "trainer": {"source": "git"}}) == 300


@pytest.mark.parametrize("odd", [None, "x", [], {}, -1, float("nan"), float("inf"), 10**40, 10**400, True])
def test_odd_figures_are_passed_over(odd):
    heartbeat = {"step_seconds": odd, "save_seconds": odd, "phase": odd if isinstance(odd, str) else None}
    plan = {"timeout_seconds": odd, "trainer": odd, "nodes": odd}
    assert 0 < stop_seconds([START, step(odd), saved(odd), {"kind": "eval", "seconds": odd}], heartbeat, plan) < 10**7
