# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stopping, dying and going on: whatever happened between, the end is that of an uninterrupted run, to the bit."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import kill_and_resume
import pytest
import ranks
import torch
from test_optim_file import as_theirs
from trainings import DATA, STEPS, Job

from nanochat.run import checkpoint_manager as checkpoints


def test_field_18_a_rank_that_lost_its_checkpoints_gets_them_from_another(tmp_path: Path, uninterrupted: str) -> None:
    job = Job(tmp_path, 2)
    job.run("--save-every", "4", "--keep-checkpoints", "-1")
    for step in (8, STEPS):
        job.damage(step, 0)
    shutil.rmtree(job.checkpoints(1))
    job.run("--resume", "--save-every", "4")
    assert [job.events("start", rank)[-1]["resumed_from"] for rank in (0, 1)] == [4, 4]
    assert job.final_digest() == uninterrupted
    shutil.rmtree(job.checkpoints(0))
    job.run("--resume-from-step", "8")
    assert job.events("start")[-1]["resumed_from"] == 8
    assert job.final_digest() == uninterrupted


class SharedFolder(Job):
    """Both ranks on one host."""

    def base(self, rank: int) -> Path:
        return self.folder / "host0"


@pytest.mark.parametrize("kind", [Job, pytest.param(SharedFolder, marks=pytest.mark.long)])
def test_error_feedback_is_resumed_bit_for_bit(kind: type[Job], tmp_path: Path) -> None:
    job = kind(tmp_path, 2)
    job.run("--sync", "int8", "--save-every", "4")
    job.resumes_alike("--sync", "int8")
    assert job.events("start")[-1]["resumed_from"] == 8


def test_missing_error_feedback_and_that_of_matrices_with_new_owners_start_at_zero(tmp_path: Path) -> None:
    """Rounding errors of gradients and of updates are kept apart. Everything else is restored."""
    flags = ("--sync", "int4", "--head", "shared", "--rank-rows", "6,6")
    job = Job(tmp_path / "whole", 2)
    job.run(*flags, "--head-shares", "1,1", "--num-iterations", "4")
    moved, lost = (Job(shutil.copytree(job.folder, tmp_path / name, symlinks=True), 2) for name in ("moved", "lost"))
    shutil.rmtree(lost.checkpoints(1))
    assert "Error feedback" not in job.run(*flags, "--head-shares", "1,1", "--resume")[0]
    for one, shares, which in ((moved, "9,1", "rank 0, 1"), (lost, "1,1", "rank 1")):
        out = one.run(*flags, "--head-shares", shares, "--resume")[0]
        assert f"Error feedback starts at zero on {which}, because none was saved for these ranks and rows" in out
        assert one.final_digest() != job.final_digest()


def test_a_width_that_does_not_divide_into_blocks_is_refused(tmp_path: Path) -> None:
    for result in Job(tmp_path, 2).fails("--sync", "int8", "--depth", "3", "--aspect-ratio", "10", "--head-dim", "10"):
        assert "--sync int8: a model 30 wide cannot be divided into blocks of 16; use bf16." in result.err


def test_sigterm_on_one_rank_makes_all_save_and_exit_0(tmp_path: Path, uninterrupted: str) -> None:
    job = Job(tmp_path, 2)
    processes = job.start("--num-iterations", str(STEPS), slow=True)
    job.wait_for_step(3)
    processes[1].send_signal(signal.SIGTERM)
    ranks.passed(ranks.finish(processes))
    assert job.events("end")[-1]["reason"] == "stopped"
    made = len(job.events("step"))
    assert made < STEPS
    job.run("--resume")
    assert job.events("start")[-1]["resumed_from"] == made
    assert job.final_digest() == uninterrupted


@pytest.mark.long
def test_field_18_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    kill_and_resume.endure(tmp_path, 5)


def heartbeat(job: Job) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((job.base(0) / "heartbeat-rank0.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def test_a_last_evaluation_that_a_stop_interrupted_is_made_after_resuming(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    (process,) = job.start("--eval-every", str(STEPS), "--eval-tokens", str(10**9))
    ranks.wait_until(lambda: heartbeat(job).get("phase") == "eval" and heartbeat(job)["batch"])
    process.send_signal(signal.SIGTERM)
    ranks.passed(ranks.finish([process]))
    assert (job.events("end")[-1]["reason"], job.events("eval")) == ("stopped", [])
    assert checkpoints.steps_in(job.checkpoints(0)) == [STEPS]
    job.run("--eval-every", str(STEPS), "--eval-tokens", "500", "--resume")
    assert (job.events("end")[-1]["reason"], len(job.events("eval"))) == ("finished", 1)


def test_an_older_checkpoint_and_changed_data_are_told_at_the_start(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    shutil.copytree(DATA / "base_data_climbmix", tmp_path / "data")
    job.more = {rank: {"NANOCHAT_DATA_DIR": str(tmp_path / "data")} for rank in (0, 1)}
    job.run("--save-every", "4", "--keep-checkpoints", "-1")
    assert [job.events("start", rank)[-1]["notices"] for rank in (0, 1)] == [[], []]
    job.damage(STEPS)
    older = f"The checkpoint of step {STEPS} is damaged on every rank, so the older one of step 8 is used"
    assert older in job.run("--resume", "--num-iterations", "8")[0]
    assert [job.events("start", rank)[-1]["notices"] for rank in (0, 1)] == [[older], [older]]
    # Other text under the same name.
    first, *dummy, last = sorted((tmp_path / "data").iterdir())
    shutil.copy(last, first)
    out = job.run("--resume")[0]
    changed = f"Step 8: the data have changed since ({first.name}), and training continues with what is there now"
    assert changed in out and job.events("start")[-1]["notices"] == [older, changed]
    assert job.events("end")[-1]["reason"] == "finished"


def test_a_run_resumes_from_another_trainers_checkpoint(tmp_path: Path) -> None:
    """Upstream keeps no lists, and not the loader's state: without it, all resume at the same position."""
    job = Job(tmp_path / "ours", 2)
    job.run("--num-iterations", "6")
    for result in job.fails("--resume", "--num-iterations", "5"):
        assert "has step 6, but this run ends at step 5" in result.err
    # Upstream begins with infinity, and compares every evaluation with it.
    meta = json.loads((job.checkpoints(0) / "meta_000006.json").read_text())
    assert meta["loop_state"]["min_val_bpb"] == math.inf
    theirs, empty = (
        Job(shutil.copytree(job.folder, tmp_path / name, symlinks=True), 2) for name in ("theirs", "empty")
    )
    for one, keys in (
        (job, ("state", "param_groups", "nanochat_ddp_state")),
        (theirs, ("state", "param_groups")),
        (empty, ()),
    ):
        for rank in range(2):
            (one.checkpoints(rank) / f"ckpt_000006_rank{rank}.json").unlink()
            path = one.checkpoints(rank) / f"optim_000006_rank{rank}.pt"
            file = torch.load(path)
            torch.save({"state": {}, "param_groups": []} | {key: file[key] for key in keys}, path)
        told = one.run("--resume")[0]
        why = re.search(r"the optimizer starts without momentum, because (.*)", told)
        assert why is None if one is not empty else why and why[1].startswith("its parameter groups have sizes []")
        assert [event["step"] for event in one.events("step")] == list(range(STEPS))
    assert theirs.final_digest() == job.final_digest() != empty.final_digest()


def test_upstreams_parts_on_separate_disks_start_without_momentum(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.run("--num-iterations", "6")
    for rank, part in as_theirs(torch.load(job.checkpoints(0) / "optim_000006_rank0.pt"), 2).items():
        (job.checkpoints(rank) / f"ckpt_000006_rank{rank}.json").unlink()
        torch.save(part, job.checkpoints(rank) / f"optim_000006_rank{rank}.pt")
    for name in ("model_000006.pt", "meta_000006.json"):
        (job.checkpoints(1) / name).unlink()
    assert "without momentum, because the files of ranks 1 (of 2) are missing" in job.run("--resume")[0]
