# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evaluations of finished trainings below a base folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.finished import finished_trainings

PLAN = {
    "model": {"depth": 4},
    "data": {"id": "text-1"},
    "training": {"total_batch": 100, "eval_tokens": 64},
}


def ran(base: Path, run: str, *evals: tuple[int, float, float], at: float = 1.0, **plan: Any) -> None:
    folder = base / "runs" / run
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({**PLAN, **plan}))
    (folder / "training.json").write_text(json.dumps({"id": "a" * 16, "number": 1, "begun": 1}))
    events = [{"kind": "eval", "step": step, "share": share, "val_bpb": bits} for step, share, bits in evals]
    lines = ['{"kind": "step", "step": 1}', '{"kind": "eval", torn', '["eval"]', *map(json.dumps, events)]
    (folder / "metrics-rank0.jsonl").write_text("\n".join(lines))
    os.utime(folder / "metrics-rank0.jsonl", (at, at))


def test_finished_training_is_found_also_where_a_fresh_start_set_it_aside(tmp_path: Path):
    ran(tmp_path, "one", (10, 0.5, 2.0), (20, 1.0, 1.0))
    ran(tmp_path, "two/previous/1", (8, 1.0, 3.0), at=2.0)
    newest, older = finished_trainings(str(tmp_path))
    assert (newest["run"], newest["tokens"], newest["evals"]) == ("two", 800, [[1.0, 3.0]])
    assert (older["run"], older["tokens"], older["evals"]) == ("one", 2000, [[0.5, 2.0], [1.0, 1.0]])
    assert (older["training"], older["eval_tokens"], older["total_batch"]) == ("a" * 16, 64, 100)
    assert older["lineage"]["model"] == {"depth": 4}


@pytest.mark.parametrize("plan", [{"stage": {"stage": "sft"}}, {}])
def test_fine_tuned_and_unfinished_ones_are_left_out(tmp_path: Path, plan: dict[str, Any]):
    ran(tmp_path, "one", (10, 0.5, 2.0), (20, 1.0 if plan else 0.9, 1.0), **plan)
    assert finished_trainings(str(tmp_path)) == []


def test_evaluation_that_a_restart_repeated_counts_once(tmp_path: Path):
    ran(tmp_path, "one", (10, 0.5, 2.0), (15, 0.8, 1.5), (12, 0.6, 1.8), (20, 1.0, 1.0))
    assert finished_trainings(str(tmp_path))[0]["evals"] == [[0.5, 2.0], [0.6, 1.8], [1.0, 1.0]]


def test_many_evaluations_are_thinned_but_the_last_stays(tmp_path: Path):
    ran(tmp_path, "one", *((step, step / 999, 2.0 - step / 999) for step in range(1, 1000)))
    evals = finished_trainings(str(tmp_path))[0]["evals"]
    assert 90 < len(evals) <= 101
    assert evals[-1] == [1.0, 1.0]
