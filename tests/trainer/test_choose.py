# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which checkpoint ranks go on from and who gets its files, with folders in every state; the ranks are threads."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from nanochat.kit.common import BadCheckpoint, Ranks, UserError
from nanochat.parallel.comm import Comm
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run import resume
from nanochat.run.resume import BASE, named_training

T = TypeVar("T")
META = {"step": 1, "model_config": {"n_layer": 3}}


class ThreadComm(Comm):
    """A rank in a thread: all put their values into a table and meet at a barrier."""

    def __init__(self, rank: int, table: list[Any], meeting: threading.Barrier) -> None:
        super().__init__(Ranks(rank, rank, len(table)), 5.0)
        self.table, self.meeting = table, meeting

    def exchange(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        self.table[self.rank] = json.dumps(value)
        self.meeting.wait()
        told = [json.loads(message) for message in self.table]
        self.meeting.wait()
        return told

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        self.table[self.rank] = tensor
        self.meeting.wait()
        if self.rank != source:
            tensor.copy_(self.table[source])
        self.meeting.wait()

    def barrier(self, what: str) -> None:
        self.exchange(what, None)


def together(world: int, work: Callable[[ThreadComm], T]) -> list[T]:
    """Every rank's result, or the error of the first one that fails."""
    table: list[Any] = [None] * world
    meeting = threading.Barrier(world, timeout=60)

    def one(rank: int) -> T:
        try:
            return work(ThreadComm(rank, table, meeting))
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        ended = [pool.submit(one, rank) for rank in range(world)]
    for error in [one.exception() for one in ended]:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [one.result() for one in ended]


class Hosts:
    """A checkpoint folder for each rank."""

    def __init__(self, base: Path, world: int) -> None:
        self.folders = [base / f"host{rank}" for rank in range(world)]
        for folder in self.folders:
            folder.mkdir()
        self.notes: list[str] = []
        self.journal: Any = SimpleNamespace(folder=base, note=self.notes.append, say=print)

    def save(self, step: int, *ranks: int, weight: float = 1.0, training: str = "") -> None:
        """Whole checkpoints in the folders of these ranks."""
        meta = {**META, "training": training} if training else META
        for rank in ranks:
            model, optimizer = {"w": torch.full((50,), weight)}, {"state": torch.full((9,), 2.0)}
            checkpoints.save(self.folders[rank], step, rank, optimizer, {"cursor": [rank]}, model, meta)

    def spoil(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            path = self.folders[rank] / checkpoints.model_name(step)
            path.write_bytes(path.read_bytes()[:-10])

    def choose(self, wanted: int = -1, training: str = "") -> list[tuple[int, int | None] | None]:
        def one(comm: ThreadComm) -> tuple[int, int | None] | None:
            folder = self.folders[comm.rank]
            held = resume.find_training(comm, folder, training)[1]
            return resume.choose_step(comm, self.journal, folder, wanted, held)

        return together(len(self.folders), one)

    def obtain(self, training: str = "") -> list[int]:
        """Whose files each rank is to read."""
        (self.journal.folder / "training.json").write_text(json.dumps({"id": training}))
        got = together(
            len(self.folders), lambda comm: resume.obtain(comm, self.journal, self.folders[comm.rank], comm.rank)
        )
        return [one.files for one in got]

    def names(self, rank: int) -> list[str]:
        return sorted(path.name for path in self.folders[rank].iterdir())


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, 2)


def test_the_newest_step_complete_on_any_rank_is_chosen(hosts: Hosts) -> None:
    hosts.save(10, 0, 1)
    hosts.save(20, 0, 1)
    assert hosts.choose() == [(20, 0), (20, 1)]
    hosts.spoil(20, 0)
    assert hosts.choose() == [(20, None), (20, 1)]
    hosts.spoil(20, 1)
    assert hosts.choose() == [(10, 0), (10, 1)]
    assert hosts.notes == 2 * [
        "The checkpoint of step 20 is damaged on every rank, so the older one of step 10 is used"
    ]
    hosts.save(30, 1)
    assert hosts.choose() == [(30, None), (30, 1)]
    assert hosts.choose(10) == [(10, 0), (10, 1)]
    with pytest.raises(
        BadCheckpoint, match=r"--resume-from-step 7: no rank has a complete checkpoint .* of steps 10, 20"
    ):
        hosts.choose(7)


def test_damaged_checkpoints_do_not_lead_to_a_start_from_scratch(hosts: Hosts) -> None:
    assert hosts.choose() == [None, None]
    hosts.save(10, 0, 1)
    hosts.save(20, 0)
    hosts.spoil(10, 0, 1)
    hosts.spoil(20, 0)
    with pytest.raises(BadCheckpoint, match=r"complete checkpoint in .* \(damaged: 20, 10\); move them away"):
        hosts.choose()
    for folder in hosts.folders:
        for path in folder.glob("ckpt_*"):
            path.unlink()
    # Files without a list are remains of a save that was killed, and not a checkpoint.
    assert hosts.choose() == [None, None]


OLD, NEW = "0" * 15 + "1", "0" * 15 + "2"


def test_an_older_training_with_a_higher_step_does_not_win(hosts: Hosts) -> None:
    hosts.save(12, 1, training=OLD)
    hosts.save(6, 0, training=NEW)
    assert hosts.choose(training=NEW) == [(6, 0), (6, None)]
    assert hosts.choose(training=OLD) == [(12, None), (12, 1)]
    with pytest.raises(
        BadCheckpoint, match=rf"{OLD} \(to step 12, on rank 1\) and {NEW} \(to step 6, on rank 0\); move them away"
    ):
        hosts.choose()
    with pytest.raises(
        BadCheckpoint, match=rf"names {'3' * 16}, but the checkpoints belong to {OLD} \(to step 12, on rank 1\) and"
    ):
        hosts.choose(training="3" * 16)


def test_a_step_of_another_training_with_the_same_number_does_not_count(hosts: Hosts) -> None:
    hosts.save(6, 0, training=NEW)
    hosts.save(6, 1, training=OLD)
    assert hosts.choose(training=NEW) == [(6, 0), (6, None)]
    hosts.spoil(6, 0)
    with pytest.raises(BadCheckpoint, match="damaged: 6"):
        hosts.choose(training=NEW)


def test_checkpoints_without_an_id_belong_to_the_training_in_their_folder(hosts: Hosts) -> None:
    hosts.save(12, 1)
    hosts.save(10, 0)
    # No checkpoint has an id.
    assert hosts.choose() == [(12, None), (12, 1)]
    assert hosts.choose(training=NEW) == [(12, None), (12, 1)]
    hosts.save(6, 0, training=NEW)
    assert hosts.choose() == [(10, 0), (10, None)]


def test_all_ranks_must_name_the_same_training(hosts: Hosts) -> None:
    def choose(comm: ThreadComm) -> Any:
        return resume.find_training(comm, hosts.folders[comm.rank], (OLD, NEW)[comm.rank])

    with pytest.raises(UserError, match=f"training.json differs: it names {OLD} on rank 0, {NEW} on rank 1"):
        together(2, choose)


def test_a_folder_that_ranks_share_has_one_writer(tmp_path: Path) -> None:
    folders = [tmp_path / "shared", tmp_path / "own", tmp_path / "shared"]
    assert together(3, lambda comm: resume.folder_leader(comm, folders[comm.rank])) == [0, 1, 0]
    assert [list(folder.iterdir()) for folder in folders] == [[], [], []]


def test_a_step_of_another_training_is_set_aside_before_its_number_is_received(hosts: Hosts) -> None:
    hosts.save(6, 0, training=NEW)
    hosts.save(6, 1, weight=5.0, training=OLD)
    hosts.save(8, 1, training=OLD)
    assert hosts.obtain(NEW) == [0, 0]
    assert checkpoints.whole_steps(hosts.folders[1]) == [6]
    assert resume.training_of(hosts.folders[1], 6) == NEW
    assert checkpoints.whole_steps(hosts.folders[1] / "earlier-1") == [6, 8]


def test_nothing_is_sent_if_all_ranks_have_the_same_files(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.save(10, 0, 1)
    monkeypatch.setattr(ThreadComm, "broadcast", None)
    assert hosts.obtain() == [0, 1]


def test_ranks_that_trained_apart_take_the_weights_of_one(hosts: Hosts) -> None:
    hosts.save(10, 0)
    hosts.save(10, 1, weight=5.0)
    assert hosts.obtain() == [0, 0]
    assert [float(checkpoints.load_model(folder, 10)["w"][0]) for folder in hosts.folders] == [1.0, 1.0]
    # The list of what it made itself is no longer true.
    assert hosts.choose() == [(10, 0), (10, 0)]


@pytest.mark.parametrize(
    "name", ["../.bashrc", "/etc/passwd", "", ".", "model_000011.pt", "model_000010.pt/../x", "model_000010.pt\n"]
)
def test_only_files_of_the_step_are_received(name: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.save(10, 0)
    monkeypatch.setattr(resume, "_held", lambda folder, step, writer: [(name, 3, "0" * 64)] if writer == 0 else [])
    with pytest.raises(UserError, match=r"rank 0 would send .* as a file of step 10"):
        hosts.obtain()
    assert hosts.names(1) == []


def test_upstreams_checkpoint_is_sent_with_all_its_ranks_files(hosts: Hosts) -> None:
    """Rank 0 wrote the weights and every rank its optimizer file, without lists, into one folder."""
    hosts.save(10, 0, 1)
    for folder in hosts.folders:
        for path in folder.glob("ckpt_*"):
            path.unlink()
    shutil.move(hosts.folders[1] / "optim_000010_rank1.pt", hosts.folders[0])
    assert hosts.choose() == [(10, 0), (10, None)]
    assert hosts.obtain() == [0, 0]
    every = ["meta_000010.json", "model_000010.pt", "optim_000010_rank0.pt", "optim_000010_rank1.pt"]
    assert [hosts.names(0), hosts.names(1)] == [every, every]
    assert checkpoints.load_optimizer(hosts.folders[1], 10, 1)[1] == {"cursor": [1]}
    # A damaged optimizer file is not shared.
    for name in every:
        (hosts.folders[1] / name).unlink()
    (hosts.folders[0] / every[-1]).write_bytes(b"half")
    assert hosts.obtain() == [0, 0] and hosts.names(1) == every[:-1]


def test_the_training_comes_from_the_run_folder(tmp_path: Path) -> None:
    assert named_training(tmp_path) == ""
    (tmp_path / "training.json").write_text(json.dumps({"id": OLD, "base": NEW}))
    assert (named_training(tmp_path), named_training(tmp_path, BASE)) == (OLD, NEW)
    for torn in ("{", "[]", '{"id": 5}', '{"id": "../x"}'):
        (tmp_path / "training.json").write_text(torn)
        assert named_training(tmp_path) == ""
