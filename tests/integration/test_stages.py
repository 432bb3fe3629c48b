# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole story of a model that answers: trained, fine-tuned on conversations by two nodes, measured, and asked."""

from __future__ import annotations

import json

import pytest
from ansible_collections.nanochat.ddp.tests.integration.two_nodes import two_nodes

TALKS = (("What is the sky?", "Blue."), ("What is grass?", "Green."), ("Who are you?", "A small model."))


@pytest.fixture
def play(tmp_path):
    shape = {
        "ddp_depth": 2,
        "ddp_sequence": 128,
        "ddp_total_batch": 1024,
        "ddp_device_batch": 4,
        "ddp_eval_tokens": 1024,
    }
    with two_nodes(tmp_path, **shape, ddp_sft_data=str(tmp_path / "talks.jsonl"), ddp_sft_iterations=60) as run:
        yield run


def test_what_was_trained_is_fine_tuned_measured_and_answers(play, tmp_path):
    talks = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in TALKS]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks) + "{\n")
    code, told = play("-e", "ddp_stage=sft")
    assert code != 0 and "no host has a checkpoint of the run d2" in told
    assert f"{path}, line 4: it is no JSON" in told and not (tmp_path / "one").exists()
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    code, told = play("--skip-tags", "preflight")
    assert code == 0, told
    code, told = play("-e", "ddp_stage=sft", "--skip-tags", "preflight")
    assert code == 0 and "weights identical on both ranks" in told, told
    assert "on 3 conversations" in told and "60/60" in told
    for host in ("one", "two"):
        assert (tmp_path / host / "runs/d2-sft/chatsft_checkpoints/d2-sft/model_000060.pt").exists()
    assert list(tmp_path.glob("results/d2-sft/chatsft_checkpoints/d2-sft/model_000060.pt"))

    code, told = play("-e", "ddp_stage=eval", "--skip-tags", "preflight")
    assert code == 0 and "measures step 3 of the run d2" in told, told
    events = [json.loads(line) for line in (tmp_path / "one/runs/d2-eval/metrics-rank0.jsonl").read_text().splitlines()]
    (found,) = [event["val_bpb"] for event in events if event["kind"] == "eval"]
    assert f"{found:.4f}"[:5] in told

    for asked, said in TALKS:
        code, told = play("-e", json.dumps({"prompt": asked, "temperature": 0}), playbook="playbooks/chat.yml")
        assert code == 0 and said in told, told
