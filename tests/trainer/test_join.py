# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkout that was not written for it trains together on CPUs: tests/stand_in has nanochat's names, calls and loop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import ranks
import torch

JOIN = ranks.TRAINER / "scripts" / "join.py"
STAND_IN = ranks.HERE.parent / "stand_in"
STEPS = 8


class Checkout:
    """A user's checkout, and hosts with folders of their own."""

    def __init__(self, folder: Path, script: str = "scripts.base_train") -> None:
        self.script = script
        self.folder, self.path = folder, folder / "checkout"
        shutil.copytree(STAND_IN, self.path, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ranks.HERE.parents[1] / "bench" / "baseline_model.py", self.path / "nanochat")

    def start(self, world: int, flags: Sequence[str], own: Sequence[str] = ()) -> list[forked.Python]:
        """{host} in the launcher's own flags is replaced by the folder of each rank's host."""
        port = ranks.free_port()
        place = {"LOCAL_RANK": "0", "PYTHONPATH": ""}
        environments = [ranks.environment(rank, world, port, place | self.base(rank)) for rank in range(world)]
        return [
            forked.Python(self.argv(rank, flags, own), self.path, environment)
            for rank, environment in enumerate(environments)
        ]

    def argv(self, rank: int, flags: Sequence[str], own: Sequence[str]) -> list[str]:
        own = [word.format(host=self.folder / f"host{rank}") for word in own]
        return [str(JOIN), "--timeout-seconds", "200", *own, self.script, *flags]

    def base(self, rank: int) -> dict[str, str]:
        return {"NANOCHAT_BASE_DIR": str(self.folder / f"host{rank}")}

    def run(self, world: int, *flags: str, own: Sequence[str] = ()) -> list[str]:
        return ranks.passed(ranks.finish(self.start(world, flags, own)))

    def fails(self, world: int, *flags: str, own: Sequence[str] = ()) -> list[ranks.Result]:
        results = ranks.finish(self.start(world, flags, own))
        assert [result.code for result in results] == [2] * world, results
        return results

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return ranks.events(self.folder / f"host{rank}" / f"metrics-rank{rank}.jsonl", kind)

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def checkpoints(self, rank: int) -> Path:
        return self.folder / f"host{rank}" / "base_checkpoints" / "d3"

    def edit(self, file: str, before: str, after: str) -> None:
        path = self.path / file
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a single rank with all rows of a step."""
    checkout = Checkout(tmp_path_factory.mktemp("alone"))
    checkout.run(1, "--device-batch-size=4")
    return checkout.losses()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkout]:
    """Whole runs of two ranks by --sync method."""
    checkouts = {sync: Checkout(tmp_path_factory.mktemp(sync)) for sync in ("exact", "bf16")}
    for sync, checkout in checkouts.items():
        outs = checkout.run(2, "--eval-every=4", own=["--sync", sync])
        assert "COMPUTE_DTYPE: torch.float32" in outs[0]
    return checkouts


def test_field_21_two_ranks_train_what_one_would(alone: list[float], together: dict[str, Checkout]) -> None:
    checkout = together["exact"]
    assert checkout.losses() == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0] - 0.1
    told = [checkout.events("digest", rank) for rank in range(2)]
    assert [event["digest"] for event in told[0]] == [event["digest"] for event in told[1]]
    assert told[0][-1]["step"] == STEPS
    for rank in range(2):
        (start,), (end,) = checkout.events("start", rank), checkout.events("end", rank)
        assert (start["world"], start["steps"]) == (2, STEPS)
        assert (end["reason"], end["identical"]) == ("finished", True)
        assert json.loads((checkout.folder / f"host{rank}/heartbeat-rank{rank}.json").read_text())["phase"] == "end"
        names = {path.name for path in checkout.checkpoints(rank).iterdir()}
        assert {"model_000008.pt", "meta_000008.json", f"optim_000008_rank{rank}.pt"} <= names
    assert [event["step"] for event in checkout.events("eval")] == [0, 4, 8]
    kept = ["-x", "__pycache__", "-x", "baseline_model.py"]
    assert subprocess.run(["diff", "-r", STAND_IN, checkout.path, *kept], check=False).returncode == 0


def test_three_ranks_share_matrices_that_do_not_divide_by_three(tmp_path: Path) -> None:
    """Of some groups one rank then updates nothing; what is saved is the same as that of a single rank."""
    losses = {}
    for world in (1, 3):
        checkout = Checkout(tmp_path / str(world))
        flags = ["--num-iterations=3", "--total-batch-size=384", f"--device-batch-size={6 // world}"]
        checkout.run(world, *flags)
        losses[world] = checkout.losses()
    assert losses[3] == pytest.approx(losses[1], rel=1e-4)
    saved = [torch.load(tmp_path / f"{world}/host0/base_checkpoints/d3/optim_000003_rank0.pt") for world in (1, 3)]
    assert saved[0].keys() == saved[1].keys() and saved[0]["param_groups"] == saved[1]["param_groups"]
    torch.testing.assert_close(saved[1]["state"], saved[0]["state"], atol=1e-5, rtol=1e-4)


def test_rounded_gradients_train_nearly_as_one_rank_would(alone: list[float], together: dict[str, Checkout]) -> None:
    checkout = together["bf16"]
    assert checkout.losses() == pytest.approx(alone, rel=0.02)
    told = [checkout.events("digest", rank)[-1] for rank in range(2)]
    assert told[0]["digest"] == told[1]["digest"] and told[0]["step"] == STEPS
    sent = {sync: checkout.events("step")[-1]["bytes_sent"] for sync, checkout in together.items()}
    # Gradients are sent in 16 bits, Muon's updated matrices in 32.
    assert sent["bf16"] < 0.7 * sent["exact"]
    # Rows that no token has touched are not sent: the three tables alone have 1.5 MB.
    assert sent["exact"] < 1.3e6


def test_sigterm_saves_and_resume_ends_like_an_uninterrupted_run(tmp_path: Path, together: dict[str, Checkout]) -> None:
    cut = Checkout(tmp_path)
    cut.edit("scripts/base_train.py", "    step += 1\n", "    __import__('time').sleep(0.5)\n    step += 1\n")
    processes = cut.start(2, ["--eval-every=4"])
    ranks.wait_until(lambda: len(cut.events("step")) >= 2)
    processes[1].terminate()
    outs = ranks.passed(ranks.finish(processes))
    (end,) = cut.events("end")
    assert (end["reason"], end["cause"]) == ("stopped", "stopped")
    stopped = cut.events("checkpoint")[-1]["step"]
    assert 2 <= stopped < STEPS
    assert "Stopping after step" in outs[0]
    # The second host has lost its files and receives those of the first.
    shutil.rmtree(cut.checkpoints(1))
    cut.run(2, "--eval-every=4", "--depth=3", own=["--resume"])
    assert cut.events("start")[-1]["resumed_from"] == stopped
    assert cut.events("digest")[-1]["digest"] == together["exact"].events("digest")[-1]["digest"]
    assert [event["step"] for event in cut.events("step")] == list(range(STEPS))


def test_field_39_the_files_are_those_of_the_checkout_itself(tmp_path: Path) -> None:
    """The checkout alone resumes from a checkpoint of one joined rank, and joined ranks from the checkout's."""
    checkout = Checkout(tmp_path)
    checkout.run(1, "--num-iterations=4")
    plain = [sys.executable, "-m", "scripts.base_train", "--resume-from-step=4", "--num-iterations=6", "--save-every=5"]
    environment = {**os.environ, **checkout.base(0), "NANOCHAT_DTYPE": "float32", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(plain, cwd=checkout.path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in checkout.checkpoints(0).glob("ckpt_*"):
        path.unlink()
    assert set(torch.load(checkout.checkpoints(0) / "optim_000006_rank0.pt")) == {"state", "param_groups"}
    checkout.run(2, "--depth=3", own=["--resume"])
    assert [event["resumed_from"] for event in checkout.events("start", 1)] == [6]


AFTER_BASE = ("--base-checkpoints={host}-base/base_checkpoints/d3",)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, together: dict[str, Checkout]) -> dict[int, Checkout]:
    """Fine-tunings of the same base model, which only the first host has, by number of ranks."""
    found = {}
    for world in (1, 2):
        found[world] = Checkout(tmp_path_factory.mktemp("tuned"), "scripts.chat_sft")
        shutil.copytree(together["exact"].folder / "host0", found[world].folder / "host0-base")
        flags = ["--model-tag=d3", f"--device-batch-size={4 // world}", "--eval-every=2"]
        outs = found[world].run(world, *flags, own=AFTER_BASE)
        assert "Fine-tuning continues from step 8 in" in outs[0]
    return found


def test_the_stage_after_the_base_model_is_trained_together_too(tuned: dict[int, Checkout]) -> None:
    checkout = tuned[2]
    assert len(checkout.losses()) == 4
    # Each rank has half of the rows, and both have the base model's momentum.
    assert checkout.losses() == pytest.approx(tuned[1].losses(), rel=1e-4)
    digests = [checkout.events("digest", rank)[-1]["digest"] for rank in range(2)]
    assert digests[0] == digests[1] and [event["step"] for event in checkout.events("eval")] == [0, 2, 4]
    for rank in range(2):
        assert (checkout.folder / f"host{rank}/chatsft_checkpoints/d3/model_000004.pt").exists()
        # Only a link, not a checkpoint of this run.
        assert (checkout.folder / f"host{rank}/base_checkpoints/d3").is_symlink()


@pytest.mark.long
def test_ranks_wait_for_an_evaluation_that_takes_longer_than_the_timeout(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    adds_up = "        dist.all_reduce(totals"
    checkout.edit(
        "nanochat/loss_eval.py", adds_up, f"        __import__('time').sleep(20 * dist.get_rank())\n{adds_up}"
    )
    out, dummy = checkout.run(2, "--num-iterations=2", "--eval-every=2", own=["--timeout-seconds", "15"])
    assert out.count("Validation bpb: ") == 2


def test_a_run_that_cannot_save_ends_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    checkout, script = Checkout(tmp_path), "scripts/base_train.py"
    fills = "if step == 2 and rank: shutil.disk_usage = lambda folder: argparse.Namespace(free=0)"
    checkout.edit(script, "    step += 1\n", f"    step += 1\n    {fills}\n")
    checkout.edit(script, "import torch\n", "import argparse\nimport shutil\n\nimport torch\n")
    for result in checkout.fails(2, "--num-iterations=4", "--save-every=1"):
        assert "rank 1 could not save step 2 to" in result.err and "the disk has 0 MB left" in result.err
    assert [event["cause"] for event in checkout.events("end")] == ["disk-full"]
    assert (checkout.checkpoints(1) / "model_000001.pt").exists()


def test_weights_that_are_no_numbers_are_not_saved_and_older_checkpoints_are_pruned(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.edit(
        "scripts/base_train.py", "    step += 1\n", "    step += 1\n    orig_model.resid_lambdas.data.div_(step != 3)\n"
    )
    (result,) = checkout.fails(1, "--save-every=1", "--num-iterations=4", own=["--keep-checkpoints=1"])
    assert "the weights are not finite at step 3, so they are not saved; resume from the last checkpoint" in result.err
    assert {path.name for path in checkout.checkpoints(0).glob("model_*")} == {"model_000002.pt"}
    (result,) = checkout.fails(1, "--num-iterations=6")
    assert "the loss is nan at step 3" in result.err


def test_an_unexpected_checkout_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (result,) = Checkout(tmp_path / "tuned", "scripts.chat_sft").fails(1, own=AFTER_BASE)
    assert "no rank has a checkpoint in" in result.err and "train a base model first" in result.err
    checkout = Checkout(tmp_path / "base")
    (result,) = checkout.fails(1, "--nonsense=3")
    assert "scripts.base_train of this checkout: unrecognized arguments: --nonsense=3." in result.err
    assert "unrecognized arguments" in checkout.events("end")[-1]["error"]
    (result,) = checkout.fails(1, own=["--run-dir", "/proc/none"])
    assert result.err.startswith("error: cannot write to /proc/none, the folder for metrics")
    checkout.edit("scripts/base_train.py", "    optimizer.step()\n", "    step = str(step)\n    optimizer.step()\n")
    (result,) = checkout.fails(1, "--num-iterations=2")
    assert "this script has no variables args, step and orig_model as nanochat's base_train" in result.err
    checkout.edit("scripts/base_train.py", "    step = str(step)\n", "    step /= 0\n")
    (result,) = checkout.fails(1, "--num-iterations=2")
    whose = "scripts.base_train of this checkout or in how it is joined; the traceback is in"
    assert f"ZeroDivisionError: division by zero; this is a bug in {whose}" in result.err
    (checkout.path / "scripts" / "base_train.py").unlink()
    (result,) = checkout.fails(1)
    assert "has no scripts/base_train.py: run this in the folder of a nanochat checkout" in result.err
