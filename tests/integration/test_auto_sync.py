# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ddp_sync auto from a rehearsal to a run: measurements are kept and decide the next plan, and a run keeps its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from two_nodes import two_nodes

MODEL = {
    "ddp_depth": 2, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 64, "ddp_vocab_size": 300,
    "ddp_device_batch": 2, "ddp_total_batch": 256, "ddp_iterations": 4, "ddp_eval_every": -1, "ddp_save_every": 2,
}  # fmt: skip

STEP = {"tokens_per_second": 1000.0, "pass_seconds": 0.05, "adamw_seconds": 0.01, "muon_seconds": 0.01}


@pytest.fixture
def play(tmp_path):
    with two_nodes(tmp_path, **MODEL) as run:

        def well(*words: str) -> str:
            code, told = run(*words)
            assert code == 0, told
            return told

        yield well


def way_of(folder: Path) -> str:
    return str(json.loads((folder / "plan.json").read_text())["training"]["sync"])


@pytest.mark.long
def test_a_rehearsal_decides_and_a_run_keeps_its_way(play, tmp_path):
    told = play()
    assert "ddp_sync auto is " in told
    way = way_of(tmp_path / "one/runs/d2")
    plan = json.loads((tmp_path / "one/runs/d2/plan.json").read_text())
    known = {"model": plan["model"], "device_batch": plan["training"]["device_batch"]}
    for host in ("one", "two"):
        file = tmp_path / host / "measured.json"
        # A busy machine keeps no measurements.
        kept = json.loads(file.read_text()) if file.exists() else {**STEP, "link": {"mbit": 1.0}, **known}
        assert kept["link"]["mbit"] > 0 and kept["model"] == plan["model"]
        # As over a link that carries next to nothing.
        file.write_text(json.dumps({**kept, "link": {"mbit": 0.5, "latency_ms": 1.0}}))
    play("--tags", "launch", "-e", "ddp_run=slow")
    rounded = way_of(tmp_path / "one/runs/slow")
    assert rounded != "exact"
    start = json.loads((tmp_path / "one/runs/slow/metrics-rank0.jsonl").read_text().splitlines()[0])
    assert start["settings"]["sync"] == rounded
    play("--tags", "launch", "-e", "ddp_iterations=6")
    assert way_of(tmp_path / "one/runs/d2") == way
