# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import files as run_files


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run folder on a host."""
    run = tmp_path / "there"
    (run / "log").mkdir(parents=True)
    (run / "metrics-rank0.jsonl").write_text('{"kind": "step"}\n' * 100)
    (run / "log" / "rank0.log").write_text("one\ntwo\n")
    (run / "session.json").write_text("{}")
    (run / "env").write_text("SECRET=1")
    (run / "run.sh").write_text("#!/bin/sh")
    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def copy(there: Path, here: Path, room: int = 10**6, checkpoints: bool = False) -> list[dict[str, Any]]:
    """Copy as the action plugin does, without a connection."""
    rounds = []
    for dummy in range(100):
        have = {path: run_files.KnownCopy(**known) for path, known in run_files.known_copies(str(here)).items()}
        found = run_files.missing_files(str(there), have, checkpoints, room)
        rounds.append(found)
        for part in found["pieces"]:
            run_files.apply_piece(str(here), part)
        if not found["more"]:
            return rounds
    raise AssertionError("it never ends")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_that_tells_of_the_run_is_brought_and_nothing_else(there: Path, here: Path) -> None:
    copy(there, here)
    assert set(files(here)) == {"metrics-rank0.jsonl", "log/rank0.log", "session.json"}
    assert all(data == files(there)[name] for name, data in files(here).items())
    assert copy(there, here) == [{"pieces": [], "more": False, "whole": []}]


def test_of_a_file_that_grew_only_the_new_part_travels(there: Path, here: Path) -> None:
    copy(there, here)
    with (there / "metrics-rank0.jsonl").open("a") as metrics:
        metrics.write('{"kind": "end"}\n')
    (part,) = copy(there, here)[0]["pieces"]
    assert part["offset"] == 1700
    assert (here / "metrics-rank0.jsonl").read_bytes() == (there / "metrics-rank0.jsonl").read_bytes()


def test_half_a_line_stays_where_it_is(there: Path, here: Path) -> None:
    with (there / "metrics-rank0.jsonl").open("a") as metrics:
        metrics.write('{"kind": "st')
    copy(there, here)
    assert (here / "metrics-rank0.jsonl").read_text().endswith("}\n")
    assert (here / "metrics-rank0.jsonl").stat().st_size == 1700


def test_a_file_that_began_anew_is_brought_anew(there: Path, here: Path) -> None:
    copy(there, here)
    (there / "metrics-rank0.jsonl").write_text('{"kind": "start"}\n')
    (part,) = copy(there, here)[0]["pieces"]
    assert part["offset"] == 0
    assert (here / "metrics-rank0.jsonl").read_text() == '{"kind": "start"}\n'


def test_little_room_means_more_rounds_and_the_same_files(there: Path, here: Path) -> None:
    (there / "log" / "rank0.log").write_bytes(b"".join(os.urandom(20).hex().encode() + b"\n" for dummy in range(200)))
    assert len(copy(there, here, room=2000)) > 3
    assert (here / "log" / "rank0.log").read_bytes() == (there / "log" / "rank0.log").read_bytes()


def test_a_piece_that_does_not_fit_changes_nothing(there: Path, here: Path) -> None:
    copy(there, here)
    part = {**run_files.piece("session.json", b"other", None, 99), "sha256": "0" * 64}
    with pytest.raises(run_files.CopyError, match=r"remove .*session\.json and collect again"):
        run_files.apply_piece(str(here), part)
    assert (here / "session.json").read_text() == "{}"
    assert set(files(here)) == {"metrics-rank0.jsonl", "log/rank0.log", "session.json"}


def test_secrets_of_the_plan_stay_on_the_host(there: Path, here: Path) -> None:
    node = {"env": {"WANDB_API_KEY": "hunter2", "OMP_NUM_THREADS": "8"}, "env_secret": ["WANDB_API_KEY"]}
    (there / "plan.json").write_text(json.dumps({"nodes": [node, {"env": None}]}))
    copy(there, here)
    text = (here / "plan.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["nodes"][0]["env"] == {"WANDB_API_KEY": run_files.MASK, "OMP_NUM_THREADS": "8"}
    assert copy(there, here)[0]["pieces"] == []


def test_a_checkpoint_below_those_of_a_training_before_is_brought_once(there: Path, here: Path) -> None:
    for folder, step in ((there, 50), (here, 200)):
        place = folder / "base_checkpoints" / "d4"
        place.mkdir(parents=True)
        (place / f"model_{step:06d}.pt").write_bytes(b"x" * step)
    (wanted,) = copy(there, here, checkpoints=True)[0]["whole"]
    assert wanted["path"] == "base_checkpoints/d4/model_000050.pt"
    (here / wanted["path"]).write_bytes(b"x" * 50)
    os.utime(here / wanted["path"], (wanted["mtime"], wanted["mtime"]))
    assert copy(there, here, checkpoints=True)[0]["whole"] == []
