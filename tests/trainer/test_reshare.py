# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that is slowed in the middle of a run is given less, and nothing else changes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ranks
from test_faults import ready
from trainings import STEPS, Job

from nanochat import balance
from nanochat.fused import TrainingPass
from nanochat.train import start_event, train

if TYPE_CHECKING:
    from nanochat.comm import Comm

HERE = "test_reshare"
ROW_SECONDS = 0.03
FLAGS = ("--num-iterations", "16", "--save-every", "14", "--rebalance")


def train_slowed(comm: Comm, folder: str, *flags: str) -> None:
    """A run in which rank 1 takes much longer for each row, until the shares have changed once."""
    balance.LOOK_SECONDS = 0.0
    usual = TrainingPass.forward_backward

    def slowed(self: TrainingPass, ids: Any, *rest: Any) -> Any:
        time.sleep(ROW_SECONDS * len(ids) * (10 if comm.rank else 1))
        return usual(self, ids, *rest)

    TrainingPass.forward_backward = slowed  # type: ignore[method-assign]
    run = ready(comm, folder, *flags)
    start_event(run)
    decided = run.balancer.hear

    def hear(busy: Any) -> Any:
        found = decided(busy)
        balance.LOOK_SECONDS = math.inf if found else balance.LOOK_SECONDS
        return found

    run.balancer.hear = hear  # type: ignore[method-assign]
    run.journal.end(train(run))
    run.feed.loader.close()


def losses(job: Job) -> list[float]:
    return [event["loss"] for event in job.events("step")]


@pytest.mark.parametrize("way", [("--head", "shared"), ("--head", "whole", "--sync", "int8")])
def test_a_slowed_rank_is_given_less_and_the_run_stays_the_same(tmp_path: Path, way: tuple[str, ...]) -> None:
    even = Job(tmp_path / "even", 2)
    even.run(*FLAGS[:2], *way)
    job = Job(tmp_path / "slowed", 2)
    ranks.passed(ranks.call(HERE, "train_slowed", 2, str(job.folder), *FLAGS, *way))
    (change,) = job.events("shares")
    (same,) = job.events("shares", 1)
    assert (change["step"], change["rows"], change["head"]) == (same["step"], same["rows"], same["head"])
    assert change["before"] == [6, 6] and change["rows"][1] <= 3 and sum(change["rows"]) == 12
    assert change["speeds"][1] < 0.35
    rounding = 0.05 if "int8" in way else 1e-4
    assert losses(job) == pytest.approx(losses(even), abs=rounding)
    assert all(event["identical"] for event in job.events("digest"))
    assert [event["step"] for event in job.events("step")] == list(range(16))
    if "whole" in way:
        return
    # What is resumed has the shares of the checkpoint, and comes to the same weights to the bit.
    digest = job.events("digest")[-1]["digest"]
    for rank in range(2):
        job.damage(rank, 16)
    out = job.run(*FLAGS, *way, "--resume")[0]
    assert "as the ranks had come to share them out: " + ", ".join(map(str, change["rows"])) in out
    assert job.events("start")[-1]["resumed_from"] == 14
    assert job.events("digest")[-1]["digest"] == digest


def test_losses_do_not_depend_on_the_shares(tmp_path: Path) -> None:
    """Other shares of the same steps, passes of uneven sizes, and a rank without rows."""
    runs = {}
    for number, flags in enumerate([(), ("--rank-rows", "9,3"), ("--rank-rows", "0,12", "--head", "shared")]):
        job = Job(tmp_path / str(number), 2)
        job.run(*flags, "--num-iterations", "6", "--device-batch-size", "4" if flags else "2")
        runs[flags] = losses(job)
    assert len(runs[()]) == 6 < STEPS
    for found in runs.values():
        assert found == pytest.approx(runs[()], abs=1e-4)
