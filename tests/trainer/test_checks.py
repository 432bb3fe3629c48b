# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two programs by which hosts are tried before a run: a real all-reduce, and a measured step."""

from __future__ import annotations

import json
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from ranks import PATIENCE_SECONDS, TRAINER, free_port

from nanochat.kit.common import BF16_CPU_FLAGS, cpu_flags
from scripts import gloo_check

TINY = [
    "--depth=2",
    "--head-dim=16",
    "--aspect-ratio=16",
    "--max-seq-len=32",
    "--device-batch-size=2",
    "--device-type=cpu",
]


def start(module: str, *words: str, **environ: str) -> forked.Python:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL", **environ}
    return forked.Python(["-m", module, *words], TRAINER, env)


def answer(process: forked.Python) -> dict[str, Any]:
    out, dummy = process.communicate(timeout=PATIENCE_SECONDS)
    return dict(json.loads(out.splitlines()[-1]), code=process.returncode)


def meeting(world: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def start_check(rank: int, timeout: int, place: dict[str, str]) -> forked.Python:
    words = ["--timeout", str(timeout), "--bytes", "65536"]
    return start("scripts.gloo_check", *words, RANK=str(rank), **place)


def ranks(world: int, present: int, timeout: int) -> list[dict[str, Any]]:
    place = meeting(world)
    return [answer(one) for one in [start_check(rank, timeout, place) for rank in range(present)]]


def test_all_ranks_meet_add_up_and_are_measured():
    results = ranks(3, 3, 20)
    assert [result["code"] for result in results] == [0, 0, 0]
    assert all(result["ok"] for result in results)
    assert all(result[name] > 0 for result in results for name in ("bandwidth_mbit", "latency_ms", "message_ms"))
    assert len({(result["torch"], result["python"], result["trainer"]) for result in results}) == 1


def test_field_20_a_missing_rank_is_reported_soon():
    [result] = ranks(2, 1, 2)
    assert result["code"] == 1
    assert (result["ok"], result["phase"]) == (False, "rendezvous")
    assert "no heartbeat from rank 1 (never seen)" in result["error"]
    assert result["seconds"] < 15


def test_ranks_wait_for_a_late_one():
    place = {**meeting(2), "NANOCHAT_START_SECONDS": "55"}
    first = start_check(0, 1, place)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(8)
    second = start_check(1, 1, place)
    assert [answer(first)["phase"], answer(second)["phase"]] == ["done", "done"]


def test_a_slow_line_is_measured_by_a_part_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(all_reduce=lambda *dummy: None, exchange=lambda what, value: [value])
    for seconds, sent in ((0.75, 8192), (0.25, 65536)):
        monkeypatch.setattr(gloo_check, "timed", lambda dummy, work, seconds=seconds: seconds)
        assert gloo_check.measure_bulk(alone, torch.ones(16384), 3) == (seconds, sent)  # type: ignore[arg-type]


def test_a_step_is_measured_with_each_precision_of_products():
    words = ["--vocab-size", "300", "--seconds", "5", "--steps", "2", "--products", "fp32", "bf16"]
    result = answer(start("scripts.measure_step", *words, "--", *TINY))
    assert (result["code"], result["steps"], result["threads"], result["no_kernels_because"]) == (0, 2, 1, "")
    assert all(result[part] > 0 for part in ("pass_seconds", "adamw_seconds", "muon_seconds", "muon_half_seconds"))
    assert result["tokens_per_second"] == pytest.approx(2 * 32 / result["pass_seconds"], rel=0.02)
    # Left out where it would be slow.
    tried = ["fp32", "bf16"] if cpu_flags() & set(BF16_CPU_FLAGS) else ["fp32"]
    assert {name: found["matmul"] for name, found in result["products"].items()} == {name: name for name in tried}
    assert result["tokens_per_second"] == result["products"]["fp32"]["tokens_per_second"]


def test_missing_variables_and_wrong_flags_are_reported_in_json():
    results = [
        answer(one) for one in (start("scripts.gloo_check", RANK="0"), start("scripts.measure_step", "--", "--depth=x"))
    ]
    assert [result["code"] for result in results] == [1, 1]
    assert "WORLD_SIZE" in results[0]["error"] and "depth" in results[1]["error"]
