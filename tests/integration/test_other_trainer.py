# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole story with trainers that are not this collection's: one with nanochat's flags, files and log lines and nothing else, and
one with its modules and calls as well (tests/stand_in), whose ranks are joined."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.two_nodes import ROOT, events, two_nodes

# It knows its folders by nanochat's names alone and prints on the first rank only.
TRAINER = """
import argparse, os, pathlib, pickle, sys
parser = argparse.ArgumentParser()
for name in (
    "run device-type depth aspect-ratio head-dim max-seq-len window-pattern num-iterations device-batch-size "
    "total-batch-size eval-every eval-tokens core-metric-every sample-every save-every model-tag"
).split():
    parser.add_argument("--" + name)
args = parser.parse_args()
base, rank = pathlib.Path(os.environ["NANOCHAT_BASE_DIR"]), int(os.environ["RANK"])
say = print if rank == 0 else lambda *dummy: None
shards = sorted(path.name for path in (base / "base_data_climbmix").glob("*.parquet"))
pickle.loads((base / "tokenizer/tokenizer.pkl").read_bytes())
say("shards:", *shards)
say("compiled with", os.environ["TORCH_COMPILE_OVERRIDE_BACKENDS"])
steps = int(args.num_iterations)
for step in range(steps):
    say(
        f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | loss: {9 - step:.6f} | lrm: 1.00 | dt: 100.00ms | "
        "tok/sec: 2,560 | bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 0 | total time: 0.00m"
    )
folder = base / "base_checkpoints" / args.model_tag
folder.mkdir(parents=True, exist_ok=True)
(folder / f"optim_{steps:06d}_rank{rank}.pt").write_bytes(b"x")
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "nanochat"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/base_train.py").write_text(TRAINER)
    return folder


@pytest.fixture
def play(tmp_path, checkout):
    with two_nodes(tmp_path, ddp_trainer_source=str(checkout), ddp_trainer_join=False) as run:
        yield run


@pytest.mark.long
def test_field_21_it_trains_to_its_end_and_what_it_does_not_do_is_told(play, tmp_path):
    code, told = play("--tags", "launch")
    assert code == 0, told
    assert "trainer-apart" in told and "exchanges nothing on CPUs" in told
    assert "weights not compared on both ranks" in told
    rows = [line.split() for line in told.splitlines() if line.split()[2:3] == ["finished"]]
    assert [row[:4] for row in rows] == [["one", "0", "finished", "3/3"], ["two", "1", "finished", "-/3"]]
    assert rows[0][4:7] == ["2", "9.0000", "7.0000"]
    log = (tmp_path / "one/runs/d4/log/rank0.log").read_text()
    assert "shards: shard_00000.parquet shard_00001.parquet shard_00002.parquet\ncompiled with >=0:eager" in log
    assert (tmp_path / "two/runs/d4/base_checkpoints/d4/optim_000003_rank1.pt").exists()

    code, told = play("--tags", "launch")
    assert code == 0 and "changed: nothing" in told, told


@pytest.fixture
def stand_in(tmp_path):
    folder = Path(shutil.copytree(ROOT / "tests/stand_in", tmp_path / "stand_in"))
    shutil.copy(ROOT / "bench/baseline_model.py", folder / "nanochat")
    return folder


@pytest.mark.long
def test_field_21_a_checkout_that_is_not_changed_trains_one_model(play, tmp_path, stand_in):
    joined = ["-e", f"ddp_trainer_source={stand_in}", "-e", "ddp_trainer_join=true", "--tags", "launch"]
    code, told = play(*joined)
    assert code == 0, told
    assert "trainer-apart" not in told and "weights identical on both ranks" in told
    rows = [line.split() for line in told.splitlines() if line.split()[2:3] == ["finished"]]
    assert [row[:4] for row in rows] == [["one", "0", "finished", "3/3"], ["two", "1", "finished", "3/3"]]
    runs = [tmp_path / host / "runs/d4" for host in ("one", "two")]
    digests = [[event["digest"] for event in events(run, "digest")] for run in runs]
    assert digests[0] == digests[1] and len(digests[0]) >= 2
    assert all((run / "base_checkpoints/d4/model_000003.pt").exists() for run in runs)

    code, told = play(*joined)
    assert code == 0 and "changed: nothing" in told, told

    # More steps, and a host that has lost what it had: it is given the newest checkpoint of the other.
    shutil.rmtree(runs[1] / "base_checkpoints")
    code, told = play(*joined, "-e", "ddp_iterations=5")
    assert code == 0 and "5/5" in told, told
    assert [event["resumed_from"] for run in runs for event in events(run, "start")] == [None, 3, None, 3]

    # Its own chat_sft goes on from there.
    code, told = play(*joined, "-e", "ddp_stage=sft", "-e", "ddp_sft_iterations=2")
    assert code == 0 and "weights identical on both ranks" in told, told
    tuned = [tmp_path / host / "runs/d4-sft" for host in ("one", "two")]
    assert all((run / "chatsft_checkpoints/d4/model_000002.pt").exists() for run in tuned)
    log = (tuned[0] / "log/rank0.log").read_text()
    assert "scripts.chat_sft continues from step 5 in" in log and "Loaded optimizer state" in log
    code, told = play(*joined, "-e", "ddp_stage=mid")
    assert code != 0 and "has no readable scripts/mid_train.py" in " ".join(told.split()), told


def test_a_checkout_of_other_calls_is_refused_before_anything_starts(play, tmp_path, stand_in):
    (stand_in / "nanochat/checkpoint_manager.py").write_text("def save_checkpoint(model, path):\n    pass\n")
    code, told = play("-e", f"ddp_trainer_source={stand_in}", "-e", "ddp_trainer_join=true", "--tags", "launch")
    assert code != 0 and "has a save_checkpoint(model, path)" in " ".join(told.split()), told
    assert not (tmp_path / "one").exists()
