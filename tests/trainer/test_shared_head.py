# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a head is shared, and whole runs with one; test_sync.py compares its training with a whole head's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kill_and_resume
import pytest
import torch
from torch import Tensor
from trainings import STEPS, Job

from nanochat.kit.common import UserError
from nanochat.kit.settings import parse
from nanochat.parallel.shared_head import decide_head
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.ways import choose_head, shared_bytes, whole_bytes

KILLS = int(os.environ.get("KILLS", "1"))


def sharing_saves(vocabulary: int, tokens: list[int], width: int, sync: str = "exact") -> bool:
    return choose_head("auto", vocabulary, width, tokens, sync) == "shared"


def test_the_head_is_shared_out_where_that_sends_less() -> None:
    # The trial and the real run of two hosts, and upstream's own batch.
    assert sharing_saves(32768, [1024, 1024], 256)
    assert sharing_saves(32768, [2048, 2048], 512, "bf16")
    assert not sharing_saves(32768, [262144, 262144], 512)
    assert sharing_saves(32768, [4096] * 6, 256)
    assert not sharing_saves(32768, [4096] * 8, 256)
    assert not sharing_saves(32768, [1024], 256)
    # int8 packs gradients, but not hidden states; int4 packs both.
    assert sharing_saves(32768, [4096, 4096], 256, "int8")
    assert not sharing_saves(32768, [8192, 8192], 256, "int8")
    assert sharing_saves(32768, [4096, 4096], 256, "int4")
    assert not sharing_saves(32768, [8192, 8192], 256, "int4")
    assert whole_bytes(32768, 256, 2) == 33554432
    assert shared_bytes([1024, 1024], 256, 0) == 2 * 1048576 + 4096 + 16384


def decided(line: str, rows: list[int], vocabulary: int = 4096) -> str:
    settings = parse(["--max-seq-len", "64", "--device-batch-size", "1", *line.split()])
    return decide_head(settings, ModelConfig.from_depth(4, vocab_size=vocabulary), [n * 64 for n in rows]).head


@pytest.mark.parametrize(
    ("shares", "ranks", "vocabulary", "words"),
    [
        ("3,1", 3, 4096, "names 2 rank(s), but this job has 3"),
        ("1,100", 2, 100, "rank 0 would have no part of a vocabulary of 100"),
        ("100,1", 2, 96, "rank 1 would have no part of a vocabulary of 96"),
        ("1,1,1", 3, 30, "rank 1 would have no part of a vocabulary of 30"),
    ],
)
def test_parts_that_do_not_fit_are_refused(shares: str, ranks: int, vocabulary: int, words: str) -> None:
    with pytest.raises(UserError) as refused:
        decided(f"--head shared --head-shares {shares}", [2] * ranks, vocabulary)
    assert str(refused.value).startswith(f"--head-shares {shares}: {words}")


# -- whole runs


def moments(job: Job, rank: int = 0, step: int = STEPS) -> dict[str, Tensor]:
    found: dict[str, Any] = torch.load(job.checkpoints(rank) / f"optim_{step:06d}_rank{rank}.pt", weights_only=True)
    # The head is the optimizer's first parameter.
    return {key: found["state"][0][key] for key in ("exp_avg", "exp_avg_sq")}


def weights(job: Job, rank: int = 0, step: int = STEPS) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(job.checkpoints(rank) / f"model_{step:06d}.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("whole"), 2)
    job.run("--head", "whole")
    return job


def test_a_run_evaluates_samples_saves_and_resumes_as_one_with_a_whole_head(tmp_path: Path, whole: Job) -> None:
    job = Job(tmp_path, 2)
    often = ("--head", "shared", "--head-shares", "2,1")
    outs = job.run(*often, "--save-every", "4", "--eval-every", "6", "--eval-tokens", "500", "--sample-every", "12")
    assert "Head: shared, vocabulary rows by rank: " in outs[0]
    assert job.losses() == pytest.approx(whole.losses(), abs=1e-5)
    assert {name: t.shape for name, t in moments(job).items()} == {n: t.shape for n, t in moments(whole).items()}
    for name, tensor in weights(whole).items():
        assert float((weights(job)[name] - tensor).norm() / tensor.norm().clamp_min(1e-9)) < 0.02, name
    assert kill_and_resume.same(weights(job, 0), weights(job, 1))
    job.resumes_alike(*often)
    assert job.events("start")[-1]["resumed_from"] == 8


@pytest.mark.long
def test_killed_at_random_moments_with_a_shared_head(tmp_path: Path) -> None:
    kill_and_resume.endure(tmp_path, KILLS, ("--head", "shared", "--head-shares", "1,2", "--sync", "int8"))
