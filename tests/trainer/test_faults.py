# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults in the middle of a run: what is kept, what is said, and that what is said is true."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from kill_and_resume import same
from trainings import Job

from nanochat.kit.common import Ranks, UserError
from nanochat.kit.settings import parse
from nanochat.parallel.comm import Comm, connect
from nanochat.record.journal import Journal
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run import program
from nanochat.run.checkpoint_manager import NotSaved
from nanochat.run.loop import train
from nanochat.run.saving import prove_identical
from nanochat.run.setup import set_up
from nanochat.run.state import Run

HERE = "test_faults"


def enter_folder(folder: str | Path, rank: int) -> None:
    os.environ.update(Job(Path(folder), rank + 1).environment(rank))


def ready(comm: Comm, folder: str | Path, *flags: str) -> Run:
    """A run of this rank that is set up; its loader's thread ends with this process."""
    torch.set_num_threads(1)
    enter_folder(folder, comm.rank)
    settings = parse(Job(Path(folder), comm.world).argv(flags)[2:])
    run = set_up(settings, comm, Journal(settings, Ranks(comm.rank, comm.rank, comm.world)))

    def close() -> None:
        """Close the loader of that moment: dealing rows again replaces it."""
        run.feed.loader.close()

    atexit.register(close)
    return run


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Job]:
    # Not the test's own monkeypatch, which it may undo before the last run.
    with pytest.MonkeyPatch.context() as environment:
        for name in ("NANOCHAT_BASE_DIR", "NANOCHAT_DATA_DIR", "TEST_ROUTE"):
            environment.setenv(name, "")
        yield Job(tmp_path, 1)


def run_alone(job: Job, *flags: str) -> Run:
    """A whole run in this process."""
    run = ready(connect(Ranks(0, 0, 1), "cpu", 20.0, {}), job.folder, *flags)
    try:
        run.journal.end(train(run))
    except UserError as error:
        run.journal.end("error", str(error), error.cause, error.blames or ())
        raise
    finally:
        run.feed.loader.close()
    return run


# -- weights that differ


def drift(comm: Comm, folder: str) -> None:
    run = ready(comm, folder, "--num-iterations", "4")
    try:
        prove_identical(run, "at step 0")
        if comm.rank == 1:
            next(iter(run.weights.values())).view(-1)[0] += 1
        prove_identical(run, "at step 4")
    except UserError as error:
        program.fail(run.journal, comm, error)


def test_field_21_weights_that_differ_are_named_and_no_record_says_identical(tmp_path: Path) -> None:
    for rank, result in enumerate(ranks.call(HERE, "drift", 2, str(tmp_path))):
        assert result.code == 2, result
        assert "different weights at step 4; the first tensor that differs is resid_lambdas" in result.err
        job = Job(tmp_path, 2)
        assert [event["identical"] for event in job.events("digest", rank)] == [True, False]
        (end,) = job.events("end", rank)
        assert (end["cause"], end["reason"]) == ("weights-differ", "error")
    assert len({job.events("digest", rank)[-1]["digest"] for rank in (0, 1)}) == 2


# -- weights that give no finite loss


def spoil_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """From this step on, every loss is NaN."""
    from nanochat.parallel.sync import Sync

    make = Sync.step

    def spoilt(self: Sync, loss: torch.Tensor, schedule: Any) -> float:
        made = make(self, loss, schedule)
        return float("nan") if self.optimizer.steps > step else made

    monkeypatch.setattr(Sync, "step", spoilt)


def test_a_checkpoint_whose_weights_give_nan_is_removed(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        spoil_after(patch, 6)
        flags = ("--save-every", "3", "--keep-checkpoints", "1")
        with pytest.raises(
            UserError, match=r"loss is nan at step 6, .* was removed; start again with --resume-from-step 3 and"
        ):
            run_alone(alone, *flags)
    assert alone.events("end")[-1]["cause"] == "non-finite-loss"
    assert checkpoints.steps_in(alone.checkpoints(0)) == [3]
    assert run_alone(alone, *flags, "--resume").progress.resumed_from == 3


def test_a_resumed_run_whose_loss_is_nan_names_an_older_checkpoint(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run_alone(alone, "--num-iterations", "6", "--save-every", "3")
    spoil_after(monkeypatch, 0)
    with pytest.raises(UserError, match=r"unusable; start again with --resume-from-step 3"):
        run_alone(alone, "--resume")
    # They were sound when saved, and may be again with other settings.
    assert checkpoints.steps_in(alone.checkpoints(0)) == [3, 6]


# -- checkpoints on a disk that is too small


@pytest.mark.parametrize(
    ("room", "kept", "told"),
    [
        (2, [6, 8], "Deleting all checkpoints before the last good one to make room."),
        (1, [2], "Training continues; the checkpoint of step 2 is still intact."),
        (0, [], "there is no checkpoint yet."),
    ],
)
def test_field_18_older_checkpoints_make_room_and_the_last_good_one_stays(
    room: int, kept: list[int], told: str, alone: Job, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def check_space(folder: Path, needed: int) -> None:
        if len(checkpoints.whole_steps(folder)) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "check_space", check_space)
    # Only the last save must succeed.
    with contextlib.nullcontext() if room > 1 else pytest.raises(NotSaved, match="No space left on device"):
        run_alone(alone, "--num-iterations", "8", "--save-every", "2", "--keep-checkpoints", "2")
    assert checkpoints.whole_steps(alone.checkpoints(0)) == checkpoints.steps_in(alone.checkpoints(0)) == kept
    assert told in capsys.readouterr().out


# -- checkpoints of earlier runs


def test_a_start_from_scratch_sets_older_checkpoints_aside(alone: Job) -> None:
    run_alone(alone, "--num-iterations", "4", "--save-every", "2")
    older = {path.name for path in alone.checkpoints(0).iterdir()}
    run_alone(alone, "--num-iterations", "2", "--matrix-lr", "0.01")
    assert {path.name for path in (alone.checkpoints(0) / "earlier-1").iterdir()} == older
    run = run_alone(alone, "--num-iterations", "3", "--matrix-lr", "0.01", "--resume")
    assert run.progress.resumed_from == 2
    # The same from a named step.
    run_alone(alone, "--num-iterations", "3", "--resume-from-step", "2")
    assert checkpoints.steps_in(alone.checkpoints(0) / "earlier-2") == [3]
    assert checkpoints.steps_in(alone.checkpoints(0)) == [2, 3]


# -- restoring


def train_and_keep(comm: Comm, folder: str, *flags: str) -> None:
    """A run whose weights and optimizer state are kept."""
    run = ready(comm, folder, *flags)
    train(run)
    keep(run, folder)


def keep(run: Run, folder: str) -> None:
    kept = {"weights": run.weights, "state": run.sync.whole_state()}
    if run.comm.rank == 0:
        torch.save(kept, Path(folder) / "kept.pt")


def compare_restored(comm: Comm, folder: str, *flags: str) -> None:
    run = ready(comm, folder, *flags)
    kept = torch.load(Path(folder) / "kept.pt", weights_only=True)
    assert same(run.weights, kept["weights"])
    assert same(run.sync.whole_state(), kept["state"])


@pytest.mark.parametrize(("before", "after"), [("whole", "shared"), ("shared", "whole")])
def test_another_number_of_ranks_resumes_another_way_with_all_saved_state(
    before: str, after: str, tmp_path: Path
) -> None:
    ranks.passed(ranks.call(HERE, "train_and_keep", 2, str(tmp_path), "--num-iterations", "4", "--head", before))
    ranks.passed(ranks.call(HERE, "compare_restored", 3, str(tmp_path), "--resume", "--sync", "int8", "--head", after))


# -- output that cannot be written


def test_a_log_that_cannot_be_written_does_not_end_a_training(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    cases = {"full": os.open("/dev/full", os.O_WRONLY), "closed": writer, "latin": os.open(os.devnull, os.O_WRONLY)}
    processes = {}
    for name, output in cases.items():
        job = Job(tmp_path / name, 1)
        environment = ranks.environment(0, 1, 0, job.environment(0)) | {"PYTHONIOENCODING": "ascii"}
        argv = [sys.executable, *job.argv(["--num-iterations", "2", "--sample-every", "1"])]
        processes[name] = subprocess.Popen(
            argv, cwd=ranks.TRAINER, env=environment, stdout=output, stderr=subprocess.PIPE, text=True
        )
        os.close(output)
    for name, process in processes.items():
        error = process.communicate(timeout=ranks.PATIENCE_SECONDS)[1]
        assert (process.returncode, error) == (0, ""), (name, error)
        assert Job(tmp_path / name, 1).events("end")[-1]["reason"] == "finished"


def test_a_bug_is_located_even_if_its_traceback_cannot_be_written(alone: Job, capsys: Any) -> None:
    run = ready(connect(Ranks(0, 0, 1), "cpu", 20.0, {}), alone.folder)
    for folder, words in (
        (alone.folder, f"crash-{os.getpid()}.txt"),
        (alone.folder / "gone", "raised in test_a_bug_is"),
    ):
        run.journal.folder = folder
        told = None
        try:
            raise ZeroDivisionError("a mistake")
        except ZeroDivisionError as error:
            told = program.unexpected(run.journal, error)
        assert words in str(told)
    sys.stderr, kept = open("/dev/full", "w"), sys.stderr  # noqa: PTH123, SIM115
    try:
        assert program.fail(run.journal, None, told) == 2  # type: ignore[arg-type]
    finally:
        sys.stderr = kept
    assert alone.events("end")[-1]["cause"] == "bug"


# -- a disk that is full while a checkpoint is received


def take_from_another(comm: Comm, folder: str, fails: str) -> None:
    if comm.rank == 1:
        full = OSError(errno.ENOSPC, "No space left on device")

        def refuse(*dummy: object) -> None:
            raise full

        if fails == "space":
            checkpoints.check_space = refuse  # type: ignore[assignment]
        else:
            checkpoints.NewFile.finish = refuse  # type: ignore[method-assign, assignment]
    ready(comm, folder, "--resume")


@pytest.mark.parametrize("fails", ["space", "rename"])
def test_field_18_a_full_disk_of_a_receiving_rank_is_reported(fails: str, tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    ranks.passed(ranks.call(HERE, "train_and_keep", 2, str(tmp_path), "--num-iterations", "2"))
    shutil.rmtree(job.checkpoints(1))
    first, second = ranks.call(HERE, "take_from_another", 2, str(tmp_path), fails)
    words = r"cannot be copied from rank 0 to .*: No space left on device; make room"
    for result in (first, second):
        assert result.code == 2, result
        assert "Traceback" not in result.err
        assert re.search(words, result.err)
    assert ranks.last_json(second.out) == {"cause": "disk-full", "blames": None}
    assert ranks.last_json(first.out) == {"cause": "disk-full", "blames": [1]}
    assert [path.name for path in job.checkpoints(1).iterdir()] == []
