# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole trainings of two local nodes: a base model, its fine-tuning and a talk; a budget of time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, one_line, until
from ansible_collections.nanochat.ddp.tests.integration.two_nodes import events, two_nodes

pytestmark = pytest.mark.long
BUDGET = 120
SMALL = {
    "ddp_depth": 2,
    "ddp_aspect_ratio": 32,
    "ddp_head_dim": 32,
    "ddp_sequence": 64,
    "ddp_eval_tokens": 1024,
    "ddp_sample_every": -1,
}
IN_STAGES = {**SMALL, "ddp_total_batch": 512, "ddp_device_batch": 4, "ddp_eval_every": 100}
IN_TIME = {
    **SMALL, "ddp_total_batch": 256, "ddp_iterations": None, "ddp_eval_every": 200, "preflight_measure_seconds": 2, "ddp_run": "night",
}  # fmt: skip
QUESTION, ANSWER = "Which way?", "north"


@pytest.fixture
def nodes(request, tmp_path):
    """Two nodes with the test's settings."""
    with two_nodes(tmp_path, **request.param) as made:
        yield made


def talk(question: str, answer: str) -> str:
    return json.dumps([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]) + "\n"


def last_digests(tmp_path: Path, run: str) -> set[str]:
    return {events(tmp_path / host / "runs" / run, "digest")[-1]["digest"] for host in ("one", "two")}


@pytest.mark.parametrize("nodes", [IN_STAGES], indirect=True)
def test_a_base_model_is_fine_tuned_measured_and_answers(nodes, tmp_path):
    talks, held_out = tmp_path / "talks.jsonl", tmp_path / "held-out.jsonl"
    talks.write_text(talk(QUESTION, ANSWER) * 4)
    held_out.write_text(talk("Where to?", ANSWER))
    told = nodes.play("nanochat.ddp.train", "--tags", "launch")
    assert len(last_digests(tmp_path, "d2")) == 1, told

    tuning = [f"ddp_sft_data={talks}", f"ddp_sft_val_data={held_out}", "ddp_sft_iterations=120"]
    words = ["-e", "ddp_stage=sft", *(word for setting in tuning for word in ("-e", setting))]
    assert "weights identical on both ranks" in nodes.play("nanochat.ddp.train", "--tags", "launch", *words)
    assert len(last_digests(tmp_path, "d2-sft")) == 1
    losses = [event["loss"] for event in events(tmp_path / "one/runs/d2-sft", "step")]
    assert len(losses) == 120 and losses[-1] < losses[0]
    assert [event["step"] for event in events(tmp_path / "one/runs/d2-sft", "eval")] == [100, 120]

    told = nodes.play("nanochat.ddp.chat", "-e", json.dumps({"prompt": QUESTION, "temperature": 0}))
    assert re.search(rf"^\W*{ANSWER}\W*$", told, re.M), told


@pytest.mark.parametrize("nodes", [IN_TIME], indirect=True)
def test_training_fits_its_budget(nodes, tmp_path):
    first = nodes.play("nanochat.ddp.plan", "-e", "ddp_budget=2m")
    assert "not measured" in first and "takes depth 2: some hosts or links are not measured yet" in one_line(first)
    begun, run_dir = time.time(), tmp_path / "one/runs/night"
    argv, environment = nodes.argv("nanochat.ddp.train", "-e", "ddp_budget=2m"), {**os.environ, **nodes.environment}
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as training:
        until(lambda: training.poll() is not None or '"eval"' in text_of(run_dir / "metrics-rank0.jsonl"), 100)
        during = nodes.play("nanochat.ddp.status")
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
