# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints: upstream's files, whole or not at all, and the last good one outlives a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch
from trainings import flip

from nanochat.kit.common import UserError
from nanochat.rules.causes import Cause
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run.checkpoint_manager import NotSaved

MODEL = {"lm_head.weight": torch.arange(6.0).view(2, 3), "resid_lambdas": torch.ones(3)}
META = {"step": 1, "model_config": {"n_layer": 3}, "loop_state": {"min_val_bpb": 1.5}}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(4), "step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
LOADER = {"cursor": [0, 1, 2, 3], "tokens": torch.arange(5, dtype=torch.int32)}


def save(folder: Path, step: int, rank: int = 0) -> None:
    whole: dict[str, Any] = {"model": MODEL, "meta": META} if rank == 0 else {}
    checkpoints.save(folder, step, rank, OPTIMIZER, LOADER, **whole)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_upstreams_checkpoints_count_without_our_list(tmp_path: Path) -> None:
    torch.save({f"_orig_mod.{name}": value for name, value in MODEL.items()}, tmp_path / "model_000007.pt")
    torch.save(OPTIMIZER, tmp_path / "optim_000007_rank0.pt")
    assert checkpoints.whole_steps(tmp_path) == []
    (tmp_path / "meta_000007.json").write_text(json.dumps(META))
    assert checkpoints.whole_steps(tmp_path) == [7]
    assert checkpoints.load_model(tmp_path, 7).keys() == MODEL.keys()
    assert checkpoints.load_optimizer(tmp_path, 7, 0)[1] is None


def test_checkpoints_are_whole_on_python_3_10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Added to Python in 3.11.
    monkeypatch.delattr(hashlib, "file_digest", raising=False)
    save(tmp_path, 3)
    assert checkpoints.whole_steps(tmp_path) == [3]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_upstreams(path: Path) -> None:
    """Of files without a list."""
    cut(path)
    (path.parent / "ckpt_000020_rank0.json").unlink()


@pytest.mark.parametrize("spoil", [cut, flip, Path.unlink, cut_upstreams])
@pytest.mark.parametrize(
    "name", ["model_000020.pt", "meta_000020.json", "optim_000020_rank0.pt", "ckpt_000020_rank0.json"]
)
def test_field_18_a_torn_checkpoint_does_not_count(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    spoil(tmp_path / name)
    # Without a list, the files' own formats decide, and these files are undamaged.
    whole_by_itself = name.startswith("ckpt") and spoil in (Path.unlink, cut_upstreams)
    assert checkpoints.whole_steps(tmp_path) == ([10, 20] if whole_by_itself else [10])


class Full:
    """A file on a disk with this many bytes left."""

    def __init__(self, file: BinaryIO, room: list[int]) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        self.room[0] -= memoryview(data).nbytes
        if self.room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)


@pytest.mark.parametrize("room", [0, 500, 2500, 3500, 4300])
def test_field_18_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    save(tmp_path, 10)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    left = [room]

    class OnFullDisk(checkpoints.NewFile):
        def __init__(self, folder: Path, name: str, rank: int) -> None:
            super().__init__(folder, name, rank)
            self.file = cast(BinaryIO, Full(self.file, left))

    monkeypatch.setattr(checkpoints, "NewFile", OnFullDisk)
    with pytest.raises(NotSaved, match=r"rank 0 could not save step 20 to .*: No space left on device\.") as caught:
        save(tmp_path, 20)
    assert caught.value.cause is Cause.DISK_FULL
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_older_checkpoints_are_pruned_once_all_ranks_have_newer_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
        save(tmp_path, step, rank=1)
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoints.prune(tmp_path, 2, [10]) == []
    assert checkpoints.prune(tmp_path, 2, [10, 20, 30]) == [10]
    assert checkpoints.whole_steps(tmp_path) == [20, 30, 40]
    assert all(checkpoints.is_whole(tmp_path, step, 1) for step in (20, 30, 40))
    assert checkpoints.prune(tmp_path, -1, [10, 20, 30, 40]) == []
    # Of upstream's and other people's files none is removed.
    (tmp_path / "ckpt_000020_rank0.json").unlink()
    (tmp_path / "ckpt_000020_rank1.json").unlink()
    assert checkpoints.prune(tmp_path, 1, [20, 30, 40]) == [30]
    assert "notes.txt" in names(tmp_path)
    assert checkpoints.steps_in(tmp_path) == [20, 40]


def interrupted(*dummy: object, **more: object) -> None:
    raise KeyboardInterrupt


def test_leftovers_of_interrupted_saves_and_removals_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    kept = {name for name in names(tmp_path) if "10" not in name}
    for rank in (0, 12):
        (tmp_path / f".model_000020.pt.rank{rank}.tmp").write_bytes(b"half")
        (tmp_path / f".rank{rank}-0123456789abcdef").touch()
    (tmp_path / ".writable-0123456789abcdef").touch()
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.remove(tmp_path, 10)
    checkpoints.sweep(tmp_path)
    assert set(names(tmp_path)) == kept


def test_a_received_file_appears_only_if_it_is_intact(tmp_path: Path) -> None:
    broken = checkpoints.NewFile(tmp_path, checkpoints.meta_name(10), rank=1)
    broken.write(b"{}")
    with pytest.raises(UserError, match="was corrupted in transit"):
        broken.finish("0" * 64)
    broken.discard()
    assert names(tmp_path) == []


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("owned",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_bad_files_are_named_and_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"there is no checkpoint file .*model_000001\.pt"):
        checkpoints.load_model(tmp_path, 1)
    (tmp_path / "model_000001.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"model_000001\.pt cannot be read"):
        checkpoints.load_model(tmp_path, 1)
    torch.save([1], tmp_path / "model_000001.pt")
    with pytest.raises(UserError, match="does not contain a model's weights"):
        checkpoints.load_model(tmp_path, 1)
    (tmp_path / "meta_000001.json").write_text('{"step": 1}')
    with pytest.raises(UserError, match="does not name its model"):
        checkpoints.load_meta(tmp_path, 1)
    assert capsys.readouterr().out == ""
