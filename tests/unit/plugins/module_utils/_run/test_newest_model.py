# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which run a command is about, and who has its newest model: by training and step, not by rank or by the time of a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._run.collected import newest_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import newest_checkpoint
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import read_run
from ansible_collections.nanochat.ddp.plugins.plugin_utils._runs import newest_model


def seen(number: int, saved: int | None, rank: int = 0, run: str = "d4", started: float | None = 1.0) -> dict[str, Any]:
    training = {"id": f"{number:016x}", "number": number, "begun": 1}
    told = {"run": run, "run_dir": f"/base/runs/{run}", "training": training, "saved": saved}
    return {"run": {**told, "rank": rank, "started": started}}


def test_the_furthest_of_the_newest_training_has_it():
    assert newest_model({"desktop": seen(1, 300, 0), "laptop": seen(1, 1000, 1)})["host"] == "laptop"
    assert newest_model({"desktop": seen(2, 6, 0), "laptop": seen(1, 12, 1)})["host"] == "desktop"
    assert newest_model({"laptop": seen(1, 12, 1), "desktop": seen(1, 12, 0)})["host"] == "desktop"
    assert newest_model({"desktop": seen(3, None), "laptop": seen(1, 12)})["host"] == "laptop"
    assert newest_model({"desktop": {"unreachable": True}, "laptop": {"run": {"run": None, "saved": None}}}) == {}


def test_a_fine_tuned_model_comes_before_its_base():
    looks = {"desktop": {"models": [seen(1, 50, run="d4-sft"), seen(2, 900)]}, "laptop": {"models": [seen(2, 1000)]}}
    assert newest_model(looks) == {"host": "desktop", "run": "d4-sft", "run_dir": "/base/runs/d4-sft"}


def collect(folder: Path, number: int, step: int, started: float, plan: str = "", stage: str = "base") -> Path:
    checkpoints = folder / f"{stage}_checkpoints" / folder.parent.name
    checkpoints.mkdir(parents=True)
    for name in (f"model_{step:06d}.pt", f"meta_{step:06d}.json"):
        (checkpoints / name).write_text("{}")
    (folder / "training.json").write_text(json.dumps({"id": f"{number:016x}", "number": number, "begun": 1}))
    (folder / "session.json").write_text(json.dumps({"started": started, "ended": started + 1}))
    (folder / "plan.json").write_text(json.dumps({"run": plan}))
    return folder


def test_of_what_was_collected_file_times_decide_nothing(tmp_path):
    newer = collect(tmp_path / "d4" / "desktop", 2, 6, 50.0, "newer")
    older = collect(tmp_path / "d4" / "laptop", 1, 12, 60.0, "older")
    for path in older.rglob("*"):
        os.utime(path, (4e9, 4e9))
    assert newest_plan([str(older), str(newer)], []) == {"run": "newer"}


def test_what_was_set_aside_within_the_folder_does_not_count(tmp_path):
    run = collect(tmp_path / "d4" / "desktop", 2, 6, 1.0)
    aside = run / "base_checkpoints" / "d4" / "earlier-1"
    aside.mkdir()
    for name in ("model_000012.pt", "meta_000012.json"):
        (aside / name).write_text("{}")
    assert newest_checkpoint(str(run)) == [
        f"base_checkpoints/d4/{name}" for name in ("model_000006.pt", "meta_000006.json")
    ]
    told = read_run(str(run))
    assert (told["saved"], told["training"]) == (6, {"id": f"{2:016x}", "number": 2, "begun": 1})


def test_the_model_that_a_fine_tuning_began_with_is_not_its_own(tmp_path):
    base, tuned = collect(tmp_path / "d4" / "desktop", 1, 5000, 1.0), tmp_path / "d4-sft" / "desktop"
    collect(tuned, 1, 120, 2.0, stage="chatsft")
    (tuned / "base_checkpoints").mkdir()
    (tuned / "base_checkpoints/d4").symlink_to(base / "base_checkpoints/d4")
    assert [Path(path).name for path in newest_checkpoint(str(tuned))] == ["model_000120.pt", "meta_000120.json"]
