# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Local steps: apart in between, the same to the bit at every meeting, and resumed as if nothing had been."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ranks
import torch
from test_sync import LENGTH, VOCABULARY, tiny_model
from torch import Tensor
from trainings import STEPS, Job

from nanochat.kit.common import Ranks, UserError
from nanochat.kit.settings import parse
from nanochat.model.fused import TrainingPass
from nanochat.model.gradients import is_table
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.parallel import local, meeting
from nanochat.parallel.agreement import digests
from nanochat.parallel.comm import connect
from nanochat.parallel.local import LocalSync, first_meeting, first_meetings, fit
from nanochat.parallel.sync import Notice
from nanochat.rules.schedule import StepSchedule

if TYPE_CHECKING:
    from nanochat.parallel.comm import Comm

HERE = "test_local"


def train(
    comm: Comm,
    every: int,
    rows: list[int],
    steps: int,
    mode: str = "exact",
    outer: tuple[float, float] | None = None,
    losses: list[tuple[float, float]] | None = None,
    overlap: int = 0,
    still: range = range(0),
    last: int = 0,
) -> dict[str, Tensor]:
    """Some steps over rows of few and changing tokens, so that rows of the tables rest for long.

    losses: takes the loss of each step on this rank, and what the step says; still: steps that change nothing; last: the
    step at which all meet in any case, if it is not the last of these.
    """
    torch.set_num_threads(1)
    model = tiny_model()
    training, optimizer = TrainingPass(model), Optimizer(model, LearningRates())
    sync = LocalSync(comm, training, optimizer, [n * LENGTH for n in rows], every, mode, outer, overlap)
    sync.begin(0, (last or steps) if comm.world > 1 else -1)
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        low = 7 * step + 3 * comm.rank
        drawn = torch.randint(low, low + 40, (rows[comm.rank], LENGTH + 1), generator=generator) % VOCABULARY
        sync.offer_ids([drawn[:, :-1]])
        token_ids, dummy = sync.take_ids()
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        ids, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        loss = training.forward_backward(ids, targets, 1 / ids.numel(), sync.on_ready)
        own = float(loss)
        said = sync.step(loss, StepSchedule(0.0 if step in still else 0.5 + 0.01 * step, 0.9, 0.01))
        if losses is not None:
            losses.append((own, said))
    # Also pays out what momentum is left, which after a meeting is none.
    sync.begin(steps, steps)
    return {name: p.detach() for name, p in model.named_parameters()}


def train_and_tell(comm: Comm, cases: list[list[Any]]) -> None:
    for case in cases:
        print(json.dumps(digests(train(comm, *case))))


# 40 steps apart are more than the optimizer remembers by itself.
CASES = {
    2: [[1, [2, 2], 3], [4, [1, 3], 10], [40, [1, 1], 45], [4, [1, 1], 8, "bf16"], [4, [1, 3], 8, "int4"]],
    3: [[3, [2, 1, 1], 8], [3, [2, 1, 1], 6, "int8"]],
}
# Means that travel behind one, two or all steps up to the next meeting.
CASES[2] += [[4, [1, 3], 18, mode, None, None, overlap] for mode, overlap in (("exact", 1), ("exact", 2), ("int8", 3))]
CASES[3] += [[3, [2, 1, 1], 14, "exact", None, None, 2]]


@pytest.mark.parametrize("world", CASES)
def test_field_25_ranks_are_alike_after_a_meeting(world: int) -> None:
    outs = ranks.passed(ranks.call(HERE, "train_and_tell", world, CASES[world]))
    told = [[json.loads(line) for line in out.splitlines()] for out in outs]
    assert len(told[0]) == len(CASES[world])
    for one in told[1:]:
        assert one == told[0]


def mean_by_hand(comm: Comm) -> None:
    """Each rank's weights after one step alone, and after one step with a meeting."""
    before = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    together = train(comm, 1, [1, 1], 1, outer=(1.0, 0.0))
    lone = connect(Ranks(comm.rank, 0, 1), "cpu", 5.0, {})
    alone = train(lone, 99, [1, 1], 1)
    for name in together:
        change, count = alone[name] - before[name], torch.tensor(2.0)
        if is_table(name):
            # A row counts where it was touched; decay alone is a thousand times smaller.
            touched = (change.abs().amax(dim=1, keepdim=True) > 0.01).float()
            change, count = change * touched, comm.all_reduce(touched, "the touched rows").clamp_min(1)
        comm.all_reduce(change, "the change")
        error = float((together[name] - before[name] - change / count).norm() / change.norm().clamp_min(1e-3))
        assert error < 1e-2 if is_table(name) else error < 1e-4, (name, error)


def test_one_local_step_is_the_mean_of_the_ranks_steps() -> None:
    ranks.passed(ranks.call(HERE, "mean_by_hand", 2))


def landed(comm: Comm, mode: str) -> None:
    """Means that come two steps late, in which nothing moved, against the same means waited for."""
    late, waited = (train(comm, 4, [1, 3], 6, mode, None, None, n, range(4, 6), 99) for n in (2, 0))
    before = train(comm, 4, [1, 3], 4, mode, None, None, 3, range(0), 99)
    for name, values in waited.items():
        torch.testing.assert_close(late[name], values, rtol=1e-5, atol=1e-6, msg=name)
        # Right after the meeting nothing has come yet.
        assert not torch.allclose(before[name], values, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("mode", ["exact", "int8"])
def test_means_that_come_late_move_the_weights_as_those_that_are_waited_for(mode: str) -> None:
    ranks.passed(ranks.call(HERE, "landed", 2, mode))


def losses_by_hand(comm: Comm) -> None:
    """The loss that each step reports: this rank's, and at a meeting the mean over all rows."""
    losses: list[tuple[float, float]] = []
    train(comm, 2, [1, 3], 2, losses=losses)
    (apart, said_apart), (last, said) = losses
    assert said_apart == pytest.approx(apart)
    mean = comm.all_reduce(torch.tensor([last * [0.25, 0.75][comm.rank]]), "the losses")
    assert said == pytest.approx(float(mean)) != last


def test_the_loss_of_a_meeting_is_the_mean_over_the_rows_of_all() -> None:
    ranks.passed(ranks.call(HERE, "losses_by_hand", 2))


def momentum_by_hand(comm: Comm) -> None:
    """The outer step of one meeting, over the plain mean of the same one."""
    before = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    plain, fast = (train(comm, 1, [1, 1], 1, outer=outer) for outer in ((1.0, 0.0), (0.9, 0.8)))
    for name, start in before.items():
        # The first step of Nesterov's is 0.9 * (1 + 0.8) of the mean.
        factor = 1.0 if is_table(name) or start.dim() != 2 or start.numel() < 1024 else 1.62
        expected = start + factor * (plain[name] - start)
        torch.testing.assert_close(fast[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_momentum_is_for_matrices_and_never_for_scalars() -> None:
    ranks.passed(ranks.call(HERE, "momentum_by_hand", 2))


# Common steps up to the fourth and from the 29th on, with a checkpoint every two steps.
LONG = (
    "--local-steps", "2", "--num-iterations", "31", "--save-every", "2", "--keep-checkpoints", "-1", "--sync", "int8",
)  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("whole"), 2)
    out = job.run(*LONG, "--eval-every", "13", "--eval-tokens", "500")[0]
    assert "--eval-every 13 becomes every 14 steps" in out
    assert "the first 4 and last 2 steps are in lockstep" in out
    return job


def went_on(folder: Path, uninterrupted: Job, world: int, step: int, flags: tuple[str, ...]) -> Job:
    """The run as it was at a step, and went on from there."""
    job = Job(folder, world)
    shutil.copytree(uninterrupted.folder, folder, dirs_exist_ok=True)
    job.run(*flags, "--resume-from-step", str(step))
    assert job.events("start")[-1]["resumed_from"] == step
    assert job.events("end")[-1]["identical"] is True
    return job


def test_all_meet_in_common_steps_at_begin_and_end_and_every_so_many_in_between(uninterrupted: Job) -> None:
    # A checkpoint proves it too.
    assert sorted({event["step"] for event in uninterrupted.events("digest")}) == [1, *range(2, 29, 2), 30, 31]
    assert [(event["step"], event["apart"]) for event in uninterrupted.events("phase")] == [(4, True), (29, False)]
    assert [event["step"] for event in uninterrupted.events("eval")] == [14, 28, 31]
    sent = [step for step, event in enumerate(uninterrupted.events("step")) if event["bytes_sent"]]
    assert sent == [*range(4), *range(5, 29, 2), 28, 29, 30]


@pytest.mark.parametrize(
    "step", [pytest.param(2, marks=pytest.mark.long), 4, pytest.param(16, marks=pytest.mark.long), 30]
)
def test_field_25_a_run_of_local_steps_resumes_to_the_bit(step: int, tmp_path: Path, uninterrupted: Job) -> None:
    """In the common steps at its begin, where the first of its own begin, among them, and in the common ones at its end."""
    job = went_on(tmp_path, uninterrupted, 2, step, LONG)
    assert job.events("digest")[-1] == {**uninterrupted.events("digest")[-1], "time": job.events("digest")[-1]["time"]}


# Meetings at 8 and then every four steps up to 48, of which those at 12, 24, 36 and 48 are waited for.
LATE = (
    "--local-steps", "4", "--local-overlap", "3", "--num-iterations", "51", "--save-every", "12", "--keep-checkpoints", "-1",
    "--sync", "int8",
)  # fmt: skip


def test_field_25_means_that_come_late_leave_a_run_that_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", 2)
    out = whole.run(*LATE)[0]
    assert "every 4 steps, sent during the next 3 steps" in out
    last = whole.events("digest")[-1]
    assert (last["step"], whole.events("end")[-1]["identical"]) == (51, True)
    job = went_on(tmp_path / "resumed", whole, 2, 24, LATE)
    assert job.events("digest")[-1] == {**last, "time": job.events("digest")[-1]["time"]}


def test_the_newest_step_is_gone_on_from_also_where_a_rank_has_lost_its_own_part(
    tmp_path: Path, uninterrupted: Job
) -> None:
    job = Job(tmp_path, 2)
    shutil.copytree(uninterrupted.folder, tmp_path, dirs_exist_ok=True)
    for step in (30, 31):
        for rank in (0, 1):
            job.damage(rank, step)
    # Of this step one rank still has all, but the other, like a host that was replaced, not what was its own.
    job.damage(1, 28)
    job.run(*LONG, "--resume")
    assert [job.events("start", rank)[-1]["resumed_from"] for rank in (0, 1)] == [28, 28]
    assert job.events("end")[-1]["identical"] is True


@pytest.mark.parametrize(
    ("world", "flags", "phases", "close"),
    [
        (3, LONG, [(29, False)], 0.04),
        # Both ranks' own losses of their rows at a meeting, or one of all rows.
        (2, ("--sync", "exact", "--num-iterations", "31"), [], 1e-4),
        (1, LONG, [], 0.04),
    ],
)
def test_a_run_of_local_steps_goes_on_in_other_ways(
    world: int, flags: tuple[str, ...], phases: list[tuple[int, bool]], close: float, tmp_path: Path, uninterrupted: Job
) -> None:
    job = went_on(tmp_path, uninterrupted, world, 26, flags)
    before = len(uninterrupted.events("phase"))
    assert [(event["step"], event["apart"]) for event in job.events("phase")][before:] == phases
    steps = job.events("step")[-5:]
    assert [event["step"] for event in steps] == [26, 27, 28, 29, 30]
    both = [uninterrupted.events("step", rank)[26]["loss"] for rank in (0, 1)]
    assert steps[0]["loss"] == pytest.approx(sum(both) / 2, rel=close)
    # With what it had learnt, and with momentum.
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1 < uninterrupted.events("step")[0]["loss"] - 0.5


def test_local_steps_take_up_a_run_of_common_ones(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.run("--num-iterations", "5")
    job.run("--resume", "--local-steps", "4")
    assert [event["step"] for event in job.events("digest")][-3:] == [8, STEPS, STEPS]
    assert job.events("end")[-1]["identical"] is True


def test_meetings_are_where_weights_are_needed() -> None:
    settings = parse(["--local-steps", "10", "--save-every", "25", "--eval-every", "20", "--sample-every", "-1"])
    fitted = fit(settings, 100, 2)
    assert (fitted.save_every, fitted.eval_every, fitted.sample_every) == (30, 20, -1)
    often = parse(["--local-steps", "10", "--save-every", "1"])
    assert fit(often, 100, 2).save_every == 10
    assert fit(settings, 100, 1) == dataclasses.replace(settings, local_steps=0)
    # In common steps up to the third and from the 23rd on.
    assert [first_meeting(begun, 10, 25) for begun in (0, 2, 3, 10, 21, 23)] == [1, 3, 10, 20, 23, 24]
    assert first_meeting(4, 0, 25) == 5
    assert first_meetings(0, 10, 25) == {1, 10, 24}
    # Where means come late, the next meeting for which all wait.
    assert first_meetings(0, 10, 200, 5, [30]) == {1, 30, 191}
    assert first_meetings(40, 10, 200, 5, [70, 30]) == {60, 191}
    assert first_meetings(40, 10, 200, 0, [70, 30]) == {50, 191}
    assert first_meetings(40, 10, 200, 5, []) == {190, 191}
    assert first_meetings(0, 0, 25) == {1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--local-steps", "-1"], "must not be negative"),
        (["--local-steps", "2", "--sync", "ddp"], "use one of exact, bf16, int8, int4"),
        (["--local-steps", "2", "--head", "shared", "--rank-rows", "0,2"], "a rank without rows needs"),
        (["--local-steps", "20"], "so the ranks would meet only at the end"),
        (["--local-steps", "5", "--local-overlap", "5"], "must be less than --local-steps"),
        (["--local-steps", "5", "--local-overlap", "-1"], "must not be negative"),
        (["--local-overlap", "1"], "must be less than --local-steps"),
    ],
)
def test_local_steps_are_refused_where_they_make_no_sense(flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        fit(parse(flags), 10, 2)


def test_local_steps_are_refused_with_a_gpu_before_anything_is_made() -> None:
    with pytest.raises(UserError, match="--local-steps 2: is for CPUs on slow links"):
        fit(parse(["--local-steps", "2"]), 10, 2, "cuda")


def small_pieces(comm: Comm, case: list[Any]) -> None:
    """The same in one piece and in many, and what a rank waits for in which order."""
    whole = digests(train(comm, *case))
    waited: list[str] = []
    wait = comm.wait

    def told(*pending: Any) -> None:
        waited.extend(what for dummy, what in pending)
        wait(*pending)

    comm.wait = told  # type: ignore[method-assign]
    local.PIECE = meeting.PIECE = 100
    assert digests(train(comm, *case)) == whole
    # Behind the rows of a slow link the mean would come too late.
    assert max(i for i, what in enumerate(waited) if "mean" in what) < waited.index(
        "the changes of transformer.wte.weight"
    )
    assert sum(what.startswith("the changes of transformer.wte") for what in waited) > 4


def test_rows_travel_in_pieces_and_after_the_mean() -> None:
    ranks.passed(ranks.call(HERE, "small_pieces", 2, [4, [1, 1], 4]))


def stop_apart(
    comm: Comm, told: int, every: int, overlap: int, slow: int, fast: int, stop_at: int, pause: float
) -> None:
    """Rank 0 has made so many steps when rank 1 has made more: all end after the same step, alike.

    told: the rank that is asked to stop, at one of its steps; pause: how long rank 0 goes on to rest, in timeouts.
    """
    torch.set_num_threads(1)
    comm.timeout = 6.0
    model = tiny_model()
    training, optimizer = TrainingPass(model), Optimizer(model, LearningRates())
    sync = LocalSync(comm, training, optimizer, [LENGTH] * comm.world, every, overlap=overlap)
    sync.begin(0, 5000)
    drawn = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(comm.rank))
    stop = False
    while not stop:
        if comm.rank == 0 and sync.made == slow:
            while not comm.posted("ahead"):
                time.sleep(0.01)
            time.sleep(pause * comm.timeout)
        if comm.rank == 1 and sync.made == fast:
            comm.post("ahead")
        sync.offer_ids([drawn[:, :-1]], Notice(stop=comm.rank == told and sync.made == stop_at))
        token_ids, stop = sync.take_ids()
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        ids, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        sync.step(training.forward_backward(ids, targets, 1 / ids.numel(), sync.on_ready), StepSchedule(0.5, 0.9, 0.01))
    print(json.dumps([sync.made, digests({name: p.detach() for name, p in model.named_parameters()})]))


@pytest.mark.parametrize(
    "case",
    [
        (0, 1000, 0, 3, 7, 3, 0.0),
        (1, 1000, 0, 3, 7, 7, 0.0),
        # The fast rank waits for a mean that the slow one would send two steps later only.
        (0, 8, 6, 9, 13, 9, 0.0),
        (1, 8, 6, 9, 13, 13, 0.0),
        # It waits longer than one timeout, for a rank that lives.
        (0, 8, 6, 9, 13, 15, 1.5),
    ],
)
def test_a_stop_calls_an_early_meeting_of_ranks_that_are_apart(case: tuple[float, ...]) -> None:
    outs = [json.loads(out) for out in ranks.passed(ranks.call(HERE, "stop_apart", 2, *case))]
    assert outs[0] == outs[1]
    assert case[4] < outs[0][0] < 900
