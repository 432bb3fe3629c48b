# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run that ends at a time: its place by an injected clock, and real ranks that stop, go on and end on time."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from trainings import Job

from nanochat.kit.common import UserError
from nanochat.parallel.sync import UNKNOWN
from nanochat.rules.schedule import WHOLE, StepSchedule, plan_training
from nanochat.run import loop
from nanochat.run.deadline import Deadline, advance, end_of_run

SIZES = {"scaling_parameters": 10**7, "reference_parameters": 10**8, "flops_per_token": 10**8}


@pytest.mark.parametrize(
    ("timed", "share", "pauses_there"), [(True, 0.94, True), (True, 0.96, False), (False, 0.96, True)]
)
def test_a_timed_run_has_no_pauses_near_its_end(timed: bool, share: float, pauses_there: bool) -> None:
    run: Any = SimpleNamespace(plan=SimpleNamespace(timed=timed), progress=SimpleNamespace(place=int(share * WHOLE)))
    assert loop.pauses(run, 12, 6) is pauses_there
    assert not loop.pauses(run, 13, 6)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def steps(
    seconds: float,
    place: int = 0,
    takes: Callable[[int], float] = lambda step: 1.0,
    ahead: bool = False,
    after: Mapping[str, float] | None = None,
    eval_steps: float = 0.0,
) -> tuple[list[int], float]:
    """The places of all steps, and when the last one ends. takes: the seconds of each step; ahead: ask for each step's last one in the
    middle of the one before; after: what follows the last."""
    clock, places = Clock(), []
    deadline = Deadline(seconds, eval_steps=eval_steps, now=clock)
    for what, took in (after or {}).items():
        deadline.took(what, took)
    step, last = 0, deadline.last_step(0)
    while True:
        deadline.begin_step()
        places.append(place)
        took = takes(step)
        clock.seconds += took / 2
        early = deadline.last_step(step + 1, ahead=True) if ahead else None
        clock.seconds += took / 2
        deadline.end_step(took)
        if last != UNKNOWN:
            place = advance(place, last - step + 1)
        if last == step:
            assert place == WHOLE
            return places, clock.seconds
        step += 1
        last = deadline.last_step(step) if early is None else early


@pytest.mark.parametrize("ahead", [False, True])
def test_the_place_follows_the_time(ahead: bool) -> None:
    places, end = steps(100.0, ahead=ahead)
    assert len(places) in (99, 100, 101)
    assert [place / WHOLE for place in places[::10]] == pytest.approx(
        [0.1 * n for n in range(len(places[::10]))], abs=0.02
    )
    assert places == sorted(places)
    assert 97 <= end <= 101


def test_slower_machine_ends_on_time_and_cools_down() -> None:
    places, end = steps(1000.0, takes=lambda step: 2.0 if step < 200 else 6.0, ahead=True)
    assert 985 <= end <= 1001
    plan = dataclasses.replace(plan_training(**SIZES, num_iterations=500, total_batch_size=4096), timed=True)
    last = StepSchedule.at(plan, len(places), places[-1])
    assert last.lr_multiplier < 0.08
    assert last.muon_weight_decay < 0.001


def test_time_after_the_last_step_is_reserved() -> None:
    assert 73 <= steps(100.0, after={"eval": 20.0, "save": 5.0})[1] <= 75
    # An evaluation that was not measured yet counts by its tokens.
    assert 87 <= steps(100.0, eval_steps=30.0)[1] <= 90


def test_resumed_run_cools_down_from_its_place() -> None:
    places, dummy = steps(50.0, WHOLE // 2)
    assert [places[number] / WHOLE for number in (0, 25, -1)] == pytest.approx([0.5, 0.75, 0.98], abs=0.015)
    # Time that is over leaves one step.
    assert steps(-3600.0, WHOLE // 2)[0] == [WHOLE // 2]


def test_the_end_comes_from_environment_or_run_folder(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({"ends": 1700000000.5}), encoding="utf-8")
    assert end_of_run(tmp_path, {}) == 1700000000.5
    assert end_of_run(tmp_path, {"NANOCHAT_ENDS": "1800000000"}) == 1800000000
    with pytest.raises(UserError, match="NANOCHAT_ENDS"):
        end_of_run(tmp_path, {"NANOCHAT_ENDS": "07:30"})
    with pytest.raises(UserError, match="NANOCHAT_ENDS"):
        end_of_run(tmp_path / "none", {})


def ends_in(job: Job, seconds: float) -> float:
    """Tell the job's hosts when it ends; the second one's clock is an hour off, but does not count."""
    ends = time.time() + seconds
    for rank in range(job.world):
        job.base(rank).mkdir(parents=True, exist_ok=True)
        (job.base(rank) / "training.json").write_text(json.dumps({"ends": ends + 3600 * rank}), encoding="utf-8")
    return ends


@pytest.mark.long
def test_real_ranks_stop_resume_and_end_on_time(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    ends = ends_in(job, 40.0)
    flags = ("--timed", "--resume", "--num-iterations", "50", "--eval-every", "10000", "--eval-tokens", "128")
    processes = job.start(*flags)
    job.wait_for_step(5)
    processes[0].send_signal(signal.SIGTERM)
    ranks.passed(ranks.finish(processes))
    first = [event["share"] for event in job.events("step")]
    # A later end, as if the run had paused.
    ends = ends_in(job, 12.0)
    job.run(*flags)
    each = [
        [(event["step"], event["share"], event["lr_multiplier"]) for event in job.events("step", rank)]
        for rank in (0, 1)
    ]
    assert each[0] == each[1]
    shares = [share for dummy, share, dummy2 in each[0]]
    assert shares == sorted(shares)
    assert shares[len(first)] == pytest.approx(first[-1], abs=0.2)
    assert shares[-1] > 0.8
    assert each[0][-1][2] < 0.3
    assert len({job.events("digest", rank)[-1]["digest"] for rank in (0, 1)}) == 1
    assert [event["share"] for event in job.events("eval")] == [1.0]
    over = job.events("end")[-1]
    assert over["reason"] == "finished"
    assert job.events("step")[-1]["steps"] == job.events("step")[-1]["step"] + 1
    assert abs(over["time"] - ends) < 5
    meta = json.loads(sorted(job.checkpoints(0).glob("meta_*.json"))[-1].read_text(encoding="utf-8"))
    assert meta["loop_state"]["place"] == WHOLE
