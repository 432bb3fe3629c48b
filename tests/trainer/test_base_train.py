# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""scripts.base_train as people and tools meet it: its lines, its events, its refusals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from trainings import DATA, STEPS, Job

LINE = re.compile(
    r"step (\d{5})/(\d{5}) \((\d+\.\d\d)%\) \| loss: (\d+\.\d{6}) \| lrm: (\d\.\d\d) \| dt: (\d+\.\d\d)ms \| "
    r"tok/sec: (\d+) \| bf16_mfu: \d\.\d\d \| epoch: (\d+) pq: (\d+) rg: (\d+) \| "
    r"total time: \d+\.\d\dm \| eta: \d+\.\dm"
)
STEP_KEYS = {
    "loss", "loss_smooth", "seconds", "tokens_per_second", "forward_backward_seconds", "wait_seconds",
    "optimizer_seconds", "data_seconds", "bytes_sent", "memory_bytes", "lr_multiplier", "epoch", "rows",
}  # fmt: skip


# The rate is so high that the first result is the best.
EVALUATED = ("--eval-every", "5", "--eval-tokens", "600", "--unembedding-lr", "5")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two ranks that evaluated, sampled and saved."""
    job = Job(tmp_path_factory.mktemp("job"), 2)
    (job.folder / "out").write_text("\0".join(job.run(*EVALUATED, "--sample-every", "6", "--run", "tiny")))
    return job


def test_every_step_has_its_line_in_the_log_of_each_host(job: Job) -> None:
    first, second = (job.folder / "out").read_text().split("\0")
    lines = LINE.findall(first)
    assert [int(line[0]) for line in lines] == list(range(STEPS))
    assert {int(line[1]) for line in lines} == {STEPS}
    assert lines[3][2] == "25.00"
    # These ranks share a host, so only the first one prints.
    assert not LINE.findall(second)
    for expected in ("Scaling LRs by 0.0383", "Scaling weight decay from 0.280000", "Ranks: 2, rows per step: 6, 6"):
        assert expected in first


def test_every_rank_records_what_it_did(job: Job) -> None:
    """tests/pins has the figures of these events."""
    for rank in (0, 1):
        assert all(event.keys() >= STEP_KEYS for event in job.events("step", rank))
        beat = json.loads((job.base(rank) / f"heartbeat-rank{rank}.json").read_text())
        assert (beat["phase"], beat["step"], beat["steps"], beat["world"]) == ("end", STEPS, STEPS, 2)
    assert [e["step"] for e in job.events("eval")] == [5, 10, STEPS]
    assert len({e["attempt_id"] for rank in (0, 1) for e in job.events("start", rank)}) == 1
    assert {e["step"] for e in job.events("sample")} == {6, STEPS}


def test_a_checkpoint_records_its_progress(job: Job) -> None:
    meta = json.loads((job.checkpoints(0) / f"meta_{STEPS:06d}.json").read_text())
    assert (meta["step"], meta["total_batch_size"]) == (STEPS, 768)
    first, dummy, last = (event["val_bpb"] for event in job.events("eval"))
    assert first < last
    assert (meta["loop_state"]["min_val_bpb"], meta["val_bpb"]) == (first, last)
    assert [event["share"] for event in job.events("eval")] == pytest.approx([5 / 12, 10 / 12, 1.0])
    assert meta["dataloader_state_dict"].keys() == {"pq_idx", "rg_idx", "epoch"}


def test_ranks_with_and_without_kernels_end_with_the_same_weights(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    ranks.passed(ranks.finish(job.start("--num-iterations", "3", extra={0: ["--kernels", "auto"]})))
    kernels = [job.events("start", rank)[0]["kernels"] for rank in (0, 1)]
    assert {"adamw", "muon_apply"} <= set(kernels[0]) and kernels[1] == []
    assert [job.events("digest", rank)[-1]["identical"] for rank in (0, 1)] == [True, True]


def test_field_07_field_09_settings_and_data_that_differ_are_refused(tmp_path: Path) -> None:
    """Of the tokenizer only the numbers of bytes differ, which would change bits per byte alone."""
    job = Job(tmp_path, 2)
    shutil.copytree(DATA, tmp_path / "data1")
    folder = tmp_path / "data1" / "base_data_climbmix"
    job.more[1] = {"NANOCHAT_DATA_DIR": str(folder)}
    missing = min(folder.iterdir())
    missing.unlink()
    shutil.copytree(DATA / "tokenizer", job.base(1) / "tokenizer")
    path = job.base(1) / "tokenizer" / "token_bytes.pt"
    torch.save(torch.load(path) + 1, path)
    for result in job.fails(extra={1: ["--matrix-lr", "0.03"]}):
        assert re.search(r"differ in setting matrix_lr: rank 0 \(.*\) has 0.02, rank 1 \(.*\) has 0.03", result.err)
        assert f"(and 2 more: tokenizer sizes, shard {missing.name})" in result.err
    assert job.events("end", 1)[-1]["reason"] == "error"


# Vectors of torch, and of its library of products; the first rank has all that this machine has.
PROCESSORS = {
    "none": ("default", "SSE41"),
    "AVX": ("default", "AVX"),
    "AVX2": ("avx2", "AVX2"),
    "AVX-512": ("avx512", "AVX512_CORE"),
}
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("sync", "head", "kind"),
    [
        ("exact", "whole", "none"),
        ("int8", "shared", "none"),
        *(
            pytest.param(sync, head, kind, marks=LONG)
            for sync in ("exact", "bf16", "int8", "int4")
            for head in ("whole", "shared")
            for kind in PROCESSORS
            if (sync, head, kind) not in (("exact", "whole", "none"), ("int8", "shared", "none"))
        ),
    ],
)
def test_field_21_unlike_processors_hold_the_same_weights(sync: str, head: str, kind: str, tmp_path: Path) -> None:
    job, (vectors, products) = Job(tmp_path, 2), PROCESSORS[kind]
    job.more[1] = {"ATEN_CPU_CAPABILITY": vectors, "ONEDNN_MAX_CPU_ISA": products, "TEST_ROUTE": "onednn"}
    job.run("--rank-rows", "8,4", "--sync", sync, "--head", head)
    capabilities = [job.events("start", rank)[0]["capability"] for rank in (0, 1)]
    assert capabilities[1] == {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}[vectors]
    assert job.final_digest() and list(job.checkpoints(1).glob("model_*"))


def torchrun(job: Job, rank: int, port: int, *flags: str, **more: Any) -> subprocess.Popen[str]:
    """Start a rank by the command that the plan prints."""
    module, script, *words = job.argv(flags)
    argv = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={job.world}", f"--node-rank={rank}", "--nproc-per-node=1",
        "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0", module, script, "--", *words,
    ]  # fmt: skip
    environment = ranks.torchrun_environment(job.environment(rank))
    return subprocess.Popen(argv, cwd=ranks.TRAINER, env=environment, text=True, **more)


def test_torchrun_by_hand_trains_two_ranks_to_the_same_weights(tmp_path: Path) -> None:
    job, port = Job(tmp_path / "torchrun", 2), ranks.free_port()
    agents = [torchrun(job, rank, port, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in (0, 1)]
    done = ranks.passed(ranks.finish(agents))
    assert len(LINE.findall(done[0])) == STEPS
    same = Job(tmp_path / "without", 2)
    # Below torchrun each rank has chosen its library of matrix products by its speed; the same ones give the same bits.
    same.more = {rank: {"TEST_ROUTE": route} for rank, route in enumerate(job.routes())}
    same.run()
    assert job.final_digest() == same.final_digest()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_below_torchrun_saves_when_its_agent_is_ended(tmp_path: Path, sent: signal.Signals) -> None:
    job = Job(tmp_path, 1)
    agent = torchrun(job, 0, ranks.free_port(), "--num-iterations", "100000")
    job.wait_for_step(1)
    agent.send_signal(sent)
    ranks.wait_until(lambda: bool(job.events("end")))
    assert job.events("end")[-1]["reason"] == "stopped"
    assert list(job.checkpoints(0).glob("ckpt_*"))
    agent.wait(ranks.PATIENCE_SECONDS)
