# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Schedules and scaling, by the worked example of a real run."""

from __future__ import annotations

import dataclasses

import pytest

from nanochat.rules import schedule
from nanochat.rules.schedule import StepSchedule, TrainingPlan, plan_training

D8 = {
    "scaling_parameters": 25_166_016 + 16_777_216,
    "reference_parameters": 84_935_088 + 25_165_824,
    "flops_per_token": 273_679_632,
}


@pytest.fixture
def plan() -> TrainingPlan:
    return plan_training(**D8, num_iterations=5000, total_batch_size=4096)


def test_worked_example(plan: TrainingPlan) -> None:
    assert plan.lr_scale == pytest.approx(0.0884, abs=5e-5)
    assert plan.weight_decay == pytest.approx(0.064965, abs=5e-7)
    tokens = plan.num_iterations * plan.total_batch_size
    assert tokens == 20_480_000
    assert tokens * D8["flops_per_token"] == pytest.approx(5.6e15, rel=0.01)
    assert tokens / 125_829_354 == pytest.approx(0.16, abs=0.005)


def test_learning_rate(plan: TrainingPlan) -> None:
    def at(step: int) -> float:
        return schedule.lr_multiplier(plan, step, step)

    assert at(0) == 1 / 40
    assert at(4) == pytest.approx(0.125)
    assert at(39) == at(40) == at(1750) == 1.0
    assert at(1751) == pytest.approx(1 - 0.95 / 3250)
    assert at(1750 + 1625) == pytest.approx((1 + 0.05) / 2)
    assert at(5000) == pytest.approx(0.05)


def test_momentum_of_a_fine_tuning_rises_sooner_and_not_so_far(plan: TrainingPlan) -> None:
    plan = dataclasses.replace(plan, num_iterations=500, momentum=schedule.FINE_TUNING)
    found = [schedule.muon_momentum(plan, step, step) for step in (0, 150, 300, 499, 500)]
    assert found == pytest.approx([0.85, 0.90, 0.95, 0.95, 0.95])


def test_momentum(plan: TrainingPlan) -> None:
    def at(step: int) -> float:
        return schedule.muon_momentum(plan, step, step)

    assert [at(0), at(200), at(400), at(1749)] == pytest.approx([0.85, 0.91, 0.97, 0.97])
    assert [at(1750 + 1625), at(5000)] == pytest.approx([0.935, 0.90])


def test_weight_decay(plan: TrainingPlan) -> None:
    halves = [schedule.muon_weight_decay(plan, step) / plan.weight_decay for step in (0, 2500, 5000)]
    assert halves == pytest.approx([1.0, 0.5, 0.0], abs=1e-12)


def test_iterations_from_what_is_given() -> None:
    given = plan_training(**D8, num_iterations=7, target_flops=1e15, total_batch_size=4096)
    flops = plan_training(**D8, target_flops=1e15, total_batch_size=4096)
    ratio = plan_training(**D8, target_param_data_ratio=12, total_batch_size=4096)
    assert given.num_iterations == 7
    assert flops.num_iterations == round(1e15 / (D8["flops_per_token"] * 4096))
    assert ratio.num_iterations == 12 * D8["scaling_parameters"] // 4096


def test_auto_batch_is_a_power_of_two_and_the_reference_at_depth_12() -> None:
    reference = {**D8, "scaling_parameters": D8["reference_parameters"]}
    assert plan_training(**reference).total_batch_size == 524288
    small = plan_training(**D8)  # 524288 * (1 / 2.625) ** 0.383 = 362,268 = 2 ** 18.47
    assert small.total_batch_size == 2**18
    assert small.lr_scale == pytest.approx(0.5**0.5)


def test_timed_run_that_ends_early_comes_down_before_it_has_warmed_up(plan: TrainingPlan) -> None:
    timed = dataclasses.replace(plan, timed=True)
    rates = [StepSchedule.at(timed, step, step * schedule.WHOLE // 30).lr_multiplier for step in range(31)]
    assert rates[:12] == [(step + 1) / 40 for step in range(12)]
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[30] == pytest.approx(0.05)
    assert StepSchedule.at(timed, 30, schedule.WHOLE).muon_momentum == pytest.approx(0.859)
