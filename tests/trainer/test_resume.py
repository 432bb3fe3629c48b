# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stopping, dying and going on: whatever happened between, the end is that of an uninterrupted run, to the bit."""

from __future__ import annotations

import json
import math
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

KILLS = [1, pytest.param(5, marks=pytest.mark.long)]


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


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest at the end of a whole run of two ranks with --sync int8."""
    job = Job(tmp_path_factory.mktemp("packed"), 2)
    job.run("--sync", "int8")
    return job.final_digest()


@pytest.mark.parametrize("kind", [Job, SharedFolder])
def test_error_feedback_is_resumed_bit_for_bit(kind: type[Job], tmp_path: Path, packed: str) -> None:
    job = kind(tmp_path, 2)
    job.run("--sync", "int8", "--save-every", "4")
    job.damage(STEPS)
    assert "Error feedback" not in "".join(job.run("--sync", "int8", "--resume"))
    assert job.events("start")[-1]["resumed_from"] == 8
    assert job.final_digest() == packed


def test_missing_error_feedback_starts_at_zero(tmp_path: Path, packed: str) -> None:
    job = Job(tmp_path, 2)
    job.run("--sync", "int8", "--num-iterations", "6")
    shutil.rmtree(job.checkpoints(1))
    out = job.run("--sync", "int8", "--resume")[0]
    assert "Error feedback starts at zero on rank 1, because none was saved for these ranks and rows" in out
    # Everything else is restored, so only the bits differ.
    assert job.final_digest() != packed


def test_a_width_that_does_not_divide_into_blocks_is_refused(tmp_path: Path) -> None:
    for result in Job(tmp_path, 2).fails("--sync", "int8", "--depth", "3", "--aspect-ratio", "10", "--head-dim", "10"):
        assert "--sync int8: a model 30 wide cannot be divided into blocks of 16; use bf16." in result.err


def test_sigterm_on_one_rank_makes_all_save_and_exit_0(tmp_path: Path, uninterrupted: str) -> None:
    job = Job(tmp_path, 2)
    processes = job.start("--num-iterations", str(STEPS), slow=True)
    job.wait_for_step(3)
    processes[1].send_signal(signal.SIGTERM)
    ranks.passed(ranks.finish(processes))
    stopped = job.events("end")[-1]
    assert stopped["reason"] == "stopped"
    assert stopped["steps"] < STEPS
    job.run("--resume")
    assert job.events("start")[-1]["resumed_from"] == stopped["steps"]
    assert job.final_digest() == uninterrupted


@pytest.mark.parametrize("count", KILLS)
def test_field_18_killed_at_random_moments_and_resumed(count: int, tmp_path: Path) -> None:
    kill_and_resume.endure(tmp_path, count)


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
    job = Job(tmp_path, 1)
    job.run("--num-iterations", "6")
    (result,) = job.fails("--resume", "--num-iterations", "5")
    assert "has step 6, but this run ends at step 5" in result.err
    # Upstream begins with infinity, and compares every evaluation with it.
    meta = json.loads((job.checkpoints(0) / "meta_000006.json").read_text())
    assert meta["loop_state"]["min_val_bpb"] == math.inf
    # Upstream keeps no list.
    (job.checkpoints(0) / "ckpt_000006_rank0.json").unlink()
    torch.save({"state": {}, "param_groups": []}, job.checkpoints(0) / "optim_000006_rank0.pt")
    (out,) = job.run("--resume")
    assert "the optimizer starts without momentum, because its parameter groups have sizes []" in out
    assert [event["step"] for event in job.events("step")] == list(range(STEPS))


def test_a_run_resumes_from_another_trainers_checkpoint_with_momentum(tmp_path: Path) -> None:
    job = Job(tmp_path / "ours", 2)
    job.run("--num-iterations", "6")
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs", symlinks=True)
    other = Job(tmp_path / "theirs", 2)
    for one, keys in ((job, ("state", "param_groups", "nanochat_ddp_state")), (other, ("state", "param_groups"))):
        for rank in range(2):
            # Upstream keeps no lists and not the loader's state, so remove ours, too: both resume at the same position.
            (one.checkpoints(rank) / f"ckpt_000006_rank{rank}.json").unlink()
            path = one.checkpoints(rank) / f"optim_000006_rank{rank}.pt"
            file = torch.load(path)
            torch.save({key: file[key] for key in keys}, path)
        assert not any("without momentum" in out for out in one.run("--resume"))
    assert other.final_digest() == job.final_digest()


def test_a_checkpoint_records_its_progress(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    # The rate is so high that the first result is the best.
    job.run("--eval-every", "6", "--eval-tokens", "500", "--unembedding-lr", "5")
    meta: dict[str, Any] = json.loads((job.checkpoints(0) / f"meta_{STEPS:06d}.json").read_text())
    assert meta["step"] == STEPS
    first, last = (event["val_bpb"] for event in job.events("eval"))
    assert first < last
    assert (meta["loop_state"]["min_val_bpb"], meta["val_bpb"]) == (first, last)
    assert [event["share"] for event in job.events("eval")] == [0.5, 1.0]
    assert meta["dataloader_state_dict"].keys() == {"pq_idx", "rg_idx", "epoch"}
    assert meta["total_batch_size"] == 768


def test_error_feedback_of_matrices_with_new_owners_starts_at_zero(tmp_path: Path) -> None:
    """Rounding errors of gradients and of updates are kept apart."""
    job, flags = Job(tmp_path, 2), ("--sync", "int4", "--head", "shared", "--rank-rows", "6,6")
    job.run(*flags, "--head-shares", "1,1", "--num-iterations", "4")
    shutil.copytree(tmp_path, tmp_path / "again", symlinks=True)
    assert "Error feedback" not in job.run(*flags, "--head-shares", "1,1", "--num-iterations", "6", "--resume")[0]
    other = Job(tmp_path / "again", 2).run(*flags, "--head-shares", "9,1", "--num-iterations", "6", "--resume")[0]
    assert "Error feedback starts at zero on rank 0, 1" in other


def test_upstreams_parts_on_separate_disks_start_without_momentum(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.run("--num-iterations", "6")
    for rank, part in as_theirs(torch.load(job.checkpoints(0) / "optim_000006_rank0.pt"), 2).items():
        (job.checkpoints(rank) / f"ckpt_000006_rank{rank}.json").unlink()
        torch.save(part, job.checkpoints(rank) / f"optim_000006_rank{rank}.pt")
    for name in ("model_000006.pt", "meta_000006.json"):
        (job.checkpoints(1) / name).unlink()
    assert "without momentum, because the files of ranks 1 (of 2) are missing" in job.run("--resume")[0]
