# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two programs by which hosts are tried before a run: a real all-reduce, and a measured step."""

from __future__ import annotations

import os
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import ranks
import torch

from nanochat.kit.common import BF16_CPU_FLAGS, cpu_flags
from scripts import gloo_check

TINY = ["--depth=2", "--head-dim=16", "--aspect-ratio=16", "--max-seq-len=32", "--device-batch-size=2"]


def check(rank: int, world: int, port: int, timeout: int, **extra: str) -> forked.Python:
    """Start a rank of the all-reduce."""
    words = ["-m", "scripts.gloo_check", "--timeout", str(timeout)]
    return forked.Python(words, ranks.TRAINER, ranks.environment(rank, world, port, extra))


def answers(*processes: forked.Python) -> list[dict[str, Any]]:
    return [ranks.last_json(result.out) | {"code": result.code} for result in ranks.finish(processes)]


def test_all_ranks_meet_add_up_and_are_measured():
    port = ranks.free_port()
    results = answers(*[check(rank, 3, port, 20) for rank in range(3)])
    assert [result["code"] for result in results] == [0, 0, 0]
    assert all(result["ok"] for result in results)
    assert all(result[name] > 0 for result in results for name in ("bandwidth_mbit", "message_ms"))


def test_field_20_a_missing_rank_is_reported_soon():
    began = time.monotonic()
    [result] = answers(check(0, 2, ranks.free_port(), 2))
    assert result["code"] == 1
    assert (result["ok"], result["phase"]) == (False, "rendezvous")
    assert "no heartbeat from rank 1 (never seen)" in result["error"]
    assert time.monotonic() - began < 60


def test_ranks_wait_for_a_late_one():
    port, patient = ranks.free_port(), {"NANOCHAT_START_SECONDS": "55"}
    first = check(0, 2, port, 1, **patient)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(8)
    assert [one["phase"] for one in answers(first, check(1, 2, port, 1, **patient))] == ["done", "done"]


def test_a_slow_line_is_measured_by_a_part_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(all_reduce=lambda *dummy: None, exchange=lambda what, value: [value])
    for seconds, sent in ((0.75, 8192), (0.25, 65536)):
        monkeypatch.setattr(gloo_check, "timed", lambda dummy, work, seconds=seconds: seconds)
        assert gloo_check.measure_bulk(alone, torch.ones(16384)) == (seconds, sent)  # type: ignore[arg-type]


def test_a_step_is_measured_with_each_precision_of_products():
    words = ["--vocab-size", "300", "--seconds", "5", "--steps", "2", "--products", "fp32", "bf16"]
    [result] = answers(*ranks.start(["-m", "scripts.measure_step", *words, "--", *TINY], 1))
    assert (result["code"], result["steps"], result["threads"], result["no_kernels_because"]) == (0, 2, 1, "")
    assert all(result[part] > 0 for part in ("pass_seconds", "adamw_seconds", "muon_seconds", "muon_half_seconds"))
    assert result["tokens_per_second"] == pytest.approx(2 * 32 / result["pass_seconds"], rel=0.02)
    # Left out where it would be slow.
    tried = ["fp32", "bf16"] if cpu_flags() & set(BF16_CPU_FLAGS) else ["fp32"]
    assert {name: found["matmul"] for name, found in result["products"].items()} == {name: name for name in tried}
    assert result["tokens_per_second"] == result["products"]["fp32"]["tokens_per_second"]


def test_missing_variables_and_wrong_flags_are_reported_in_json():
    environ = {**os.environ, "RANK": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    words = (["scripts.gloo_check"], ["scripts.measure_step", "--", "--depth=x"])
    results = answers(*[forked.Python(["-m", *one], ranks.TRAINER, environ) for one in words])
    assert [result["code"] for result in results] == [1, 1]
    assert "WORLD_SIZE" in results[0]["error"] and "depth" in results[1]["error"]
