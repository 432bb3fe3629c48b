# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that is slowed in the middle of a run is given less, and nothing else changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from test_faults import ready
from trainings import Job

from nanochat.parallel import balance
from nanochat.parallel.balance import Shares
from nanochat.parallel.comm import Comm
from nanochat.parallel.sync import Notice
from nanochat.rules.schedule import StepSchedule
from nanochat.run.loop import change_shares, train, train_step
from nanochat.run.setup import start_event
from nanochat.run.state import Feed

HERE = "test_reshare"
ROW_SECONDS = 0.03
PATIENT = ("--timeout-seconds", "120")
FLAGS = ("--num-iterations", "16", *PATIENT, "--save-every", "14", "--rebalance")


def train_slowed(comm: Comm, folder: str, *flags: str) -> None:
    """A run in which rank 1 says that each row takes it ten times as long as rank 0, until the shares have changed once."""
    balance.LOOK_SECONDS = 0.0
    usual = Feed.offer

    def offer(self: Feed, notice: Notice) -> None:
        busy = ROW_SECONDS * (0.1 + sum(self.passes)) * (10 if comm.rank else 1)
        usual(self, notice._replace(busy=busy if notice.busy else 0.0))

    Feed.offer = offer  # type: ignore[method-assign,assignment]
    run = ready(comm, folder, *flags)
    start_event(run)
    decided = run.balancer.hear

    def hear(busy: Any) -> Any:
        found = decided(busy)
        balance.LOOK_SECONDS = math.inf if found else balance.LOOK_SECONDS
        return found

    run.balancer.hear = hear  # type: ignore[method-assign]
    run.journal.end(train(run))


def change_by_hand(comm: Comm, folder: str) -> None:
    """A change of shares must keep this rank's own state, besides weights and positions."""
    run = ready(comm, folder, "--sync", "int8")
    for dummy in range(3):
        train_step(run)
    old, schedule = run.sync, run.optimizer.schedule
    old.save_asked = True
    left = {name: values.clone() for name, values in old.feedback.items()}
    change_shares(run, Shares([11, 1], []))
    assert run.sync is not old and run.sync.save_asked
    assert run.optimizer.schedule == schedule != StepSchedule.at(run.plan, 0)
    kept = {name: (old.owners.get(name) == comm.rank) == (run.sync.owners.get(name) == comm.rank) for name in left}
    assert set(kept.values()) == {True, False}
    for name, values in run.sync.feedback.items():
        assert left[name].any(), name
        assert torch.equal(values, left[name] if kept[name] else torch.zeros_like(values)), name


def test_a_change_of_shares_keeps_each_ranks_own_state(tmp_path: Path) -> None:
    ranks.passed(ranks.call(HERE, "change_by_hand", 2, str(tmp_path)))


def losses(job: Job) -> list[float]:
    return [event["loss"] for event in job.events("step")]


@pytest.mark.parametrize(
    "way", [("--head", "shared"), pytest.param(("--head", "whole", "--sync", "int8"), marks=pytest.mark.long)]
)
def test_a_slowed_rank_gets_fewer_rows_and_the_losses_stay_the_same(tmp_path: Path, way: tuple[str, ...]) -> None:
    even = Job(tmp_path / "even", 2)
    even.run(*FLAGS[:4], *way)
    job = Job(tmp_path / "slowed", 2)
    ranks.passed(ranks.call(HERE, "train_slowed", 2, str(job.folder), *FLAGS, *way))
    (change,) = job.events("shares")
    (same,) = job.events("shares", 1)
    assert (change["step"], change["rows"], change["head"]) == (same["step"], same["rows"], same["head"])
    assert (change["before"], change["rows"]) == ([6, 6], [11, 1])
    assert change["speeds"] == pytest.approx([10 / 11, 1 / 11], abs=0.001)
    rounding = 0.05 if "int8" in way else 1e-4
    assert losses(job) == pytest.approx(losses(even), abs=rounding)
    assert all(event["identical"] for event in job.events("digest"))
    assert [event["step"] for event in job.events("step")] == list(range(16))
    if "whole" in way:
        return
    # A resumed run uses the checkpoint's shares, and reaches the same weights bit for bit.
    digest = job.events("digest")[-1]["digest"]
    job.damage(16)
    out = job.run(*FLAGS, *way, "--resume")[0]
    assert "as rebalanced before: " + ", ".join(map(str, change["rows"])) in out
    assert job.events("start")[-1]["resumed_from"] == 14
    assert job.events("digest")[-1]["digest"] == digest
