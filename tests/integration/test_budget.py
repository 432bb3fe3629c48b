# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A training with a budget on two local nodes: the plan before it, and the status during and after it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local import ROOT, one_line, until
from two_nodes import command, environment, two_nodes

BUDGET = 120
MODEL = {
    "ddp_depth": 2, "ddp_total_batch": 256, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 64,
    "ddp_iterations": None, "ddp_eval_every": 200, "ddp_eval_tokens": 1024, "ddp_sample_every": -1,
    "preflight_measure_seconds": 2, "ddp_run": "night",
}  # fmt: skip
PLAN = "playbooks/plan.yml"
Play = Callable[..., tuple[int, str]]


@pytest.fixture
def play(tmp_path):
    with two_nodes(tmp_path, **MODEL) as run:
        yield lambda playbook, **settings: run("-e", json.dumps(settings), playbook=playbook)


@pytest.mark.long
def test_training_fits_its_budget(play: Play, tmp_path: Path) -> None:
    first = play(PLAN, ddp_budget="2m")[1]
    assert "not measured" in first and "takes depth 2: some hosts or links are not measured yet" in one_line(first)
    begun, run_dir = time.time(), tmp_path / "one/runs/night"
    argv = command(tmp_path / "hosts.yml", "train.yml", "-e", "ddp_budget=2m")
    with subprocess.Popen(argv, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as training:
        until(lambda: training.poll() is not None or '"eval"' in text_of(run_dir / "metrics-rank0.jsonl"), 100)
        during = play("playbooks/status.yml", ddp_run="night")[1]
        closing = training.communicate()[0]
    took = time.time() - begun
    assert training.returncode == 0, closing
    assert re.search(r"ends at .*\d\d:\d\d, \d+ % done\n", during), during
    assert 0.75 * BUDGET < took < 1.25 * BUDGET
    said = r"ended at .*\d\d:\d\d, \S+ s (early|late), of a budget of 2m"
    assert re.search(said, closing), closing
    assert re.search(said, next((tmp_path / "results/night").glob("*.html")).read_text())
    # The second table, by what the rehearsal measured.
    table = one_line(closing.rpartition("What fits the time")[2])
    assert re.search(r"s for steps: about \d+ steps of 256 tokens", table), closing
    assert "not measured" not in table.partition("takes depth 2")[0]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
