# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole story with a nanochat checkout (tests/stand_in), whose ranks are joined."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.two_nodes import ROOT, events, two_nodes


@pytest.fixture
def play(tmp_path, stand_in):
    with two_nodes(tmp_path, ddp_trainer_source=str(stand_in)) as run:
        yield run


@pytest.fixture
def stand_in(tmp_path):
    folder = Path(shutil.copytree(ROOT / "tests/stand_in", tmp_path / "stand_in"))
    shutil.copy(ROOT / "bench/baseline_model.py", folder / "nanochat")
    return folder


@pytest.mark.long
def test_field_21_a_checkout_that_is_not_changed_trains_one_model(play, tmp_path):
    code, told = play("--tags", "launch")
    assert code == 0, told
    assert "weights identical on both ranks" in told
    rows = [line.split() for line in told.splitlines() if line.split()[2:3] == ["finished"]]
    assert [row[:4] for row in rows] == [["one", "0", "finished", "3/3"], ["two", "1", "finished", "3/3"]]
    runs = [tmp_path / host / "runs/d4" for host in ("one", "two")]
    digests = [[event["digest"] for event in events(run, "digest")] for run in runs]
    assert digests[0] == digests[1] and len(digests[0]) >= 2
    assert all((run / "base_checkpoints/d4/model_000003.pt").exists() for run in runs)

    code, told = play("--tags", "launch")
    assert code == 0 and "changed: nothing" in told, told

    # More steps, and a host that has lost what it had: it is given the newest checkpoint of the other.
    shutil.rmtree(runs[1] / "base_checkpoints")
    code, told = play("--tags", "launch", "-e", "ddp_iterations=5")
    assert code == 0 and "5/5" in told, told
    assert [event["resumed_from"] for run in runs for event in events(run, "start")] == [None, 3, None, 3]

    # Its own chat_sft goes on from there.
    code, told = play("--tags", "launch", "-e", "ddp_stage=sft", "-e", "ddp_sft_iterations=2")
    assert code == 0 and "weights identical on both ranks" in told, told
    tuned = [tmp_path / host / "runs/d4-sft" for host in ("one", "two")]
    assert all((run / "chatsft_checkpoints/d4/model_000002.pt").exists() for run in tuned)
    log = (tuned[0] / "log/rank0.log").read_text()
    assert "Fine-tuning continues from step 5 in" in log
