# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From text to answers on two nodes: a base model, its fine-tuning on conversations, its evaluation, and a talk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.two_nodes import events, two_nodes

MODEL = {
    "ddp_depth": 2, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 64, "ddp_total_batch": 512, "ddp_device_batch": 4,
    "ddp_eval_tokens": 1024, "ddp_eval_every": 100, "ddp_sample_every": -1,
}  # fmt: skip
QUESTION, ANSWER = "Which way?", "north"


def talk(question: str, answer: str) -> str:
    return json.dumps([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]) + "\n"


@pytest.fixture
def play(tmp_path):
    with two_nodes(tmp_path, **MODEL) as run:
        yield run


def last_digests(tmp_path: Path, run: str) -> set[str]:
    return {events(tmp_path / host / "runs" / run, "digest")[-1]["digest"] for host in ("one", "two")}


@pytest.mark.long
def test_a_base_model_is_fine_tuned_measured_and_answers(play, tmp_path):
    talks, held_out = tmp_path / "talks.jsonl", tmp_path / "held-out.jsonl"
    talks.write_text(talk(QUESTION, ANSWER) * 4)
    held_out.write_text(talk("Where to?", ANSWER))
    code, told = play("--tags", "launch")
    assert code == 0 and len(last_digests(tmp_path, "d2")) == 1, told

    tuning = [f"ddp_sft_data={talks}", f"ddp_sft_val_data={held_out}", "ddp_sft_iterations=120"]
    words = ["-e", "ddp_stage=sft", *(word for setting in tuning for word in ("-e", setting))]
    code, told = play("--tags", "launch", *words)
    assert code == 0 and "weights identical on both ranks" in told, told
    assert len(last_digests(tmp_path, "d2-sft")) == 1
    losses = [event["loss"] for event in events(tmp_path / "one/runs/d2-sft", "step")]
    assert len(losses) == 120 and losses[-1] < losses[0]
    assert [event["step"] for event in events(tmp_path / "one/runs/d2-sft", "eval")] == [100, 120]

    code, told = play("-e", json.dumps({"prompt": QUESTION, "temperature": 0}), playbook="playbooks/chat.yml")
    assert code == 0 and re.search(rf"^\W*{ANSWER}\W*$", told, re.M), told
