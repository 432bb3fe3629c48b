# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run's reports: whole lines, a heartbeat every second, seconds by phase."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import wait_until

from nanochat.kit.common import memory_bytes
from nanochat.record.heartbeat import Heartbeat, answer_request
from nanochat.record.journal import Metrics


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_json_with_kind_time_and_step(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics-rank0.jsonl")
    metrics.write("step", 3, loss=2.5, epoch=1)
    metrics.write("step", 4, loss=float("nan"), nested={"a": [float("inf"), 1]})
    metrics.close()
    metrics.write("step", 5)
    first, second = lines(metrics.path)
    assert abs(first.pop("time") - time.time()) < 10
    assert first == {"kind": "step", "step": 3, "loss": 2.5, "epoch": 1}
    assert (second["loss"], second["nested"]) == (None, {"a": [None, 1]})


def test_a_full_disk_is_reported_once_and_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    real = os.write

    rooms = [5]

    def nearly_full(handle: int, data: bytes) -> int:
        if not rooms:
            raise OSError(28, "No space left on device")
        return real(handle, data[: rooms.pop()])

    monkeypatch.setattr(os, "write", nearly_full)
    for step in range(3):
        metrics.write("step", step)
    monkeypatch.undo()
    metrics.write("step", 3)
    told = capsys.readouterr().err
    assert told.count("No space left on device; training continues") == 1
    assert json.loads(metrics.path.read_text().splitlines()[-1])["step"] == 3


def test_field_19_the_heartbeat_shows_the_phase_and_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat-rank1.json"
    # A request to an earlier process of this rank.
    (tmp_path / "hang-up-rank1").touch()
    heart = Heartbeat(path, rank=1, world=2, every=0.02)
    assert json.loads(path.read_text())["phase"] == "start"
    heart.steps = 500
    heart.enter("sync", 7, 41)
    wait_until(lambda: json.loads(path.read_text())["phase"] == "sync")
    first = json.loads(path.read_text())
    wait_until(lambda: json.loads(path.read_text())["time"] > first["time"])
    second = json.loads(path.read_text())
    assert second["phase_since"] == first["phase_since"] <= first["time"]
    heart.enter("eval", 500)
    heart.evaluating(3, 40)
    wait_until(lambda: json.loads(path.read_text())["batch"] == 3)
    batch = json.loads(path.read_text())
    assert (batch["phase"], batch["batches"]) == ("eval", 40) and batch["phase_since"] > first["phase_since"]
    heart.enter("end", 500)
    heart.close()
    last = json.loads(path.read_text())
    assert {name: last[name] for name in ("rank", "world", "step", "steps", "phase", "collective")} == {
        "rank": 1, "world": 2, "step": 500, "steps": 500, "phase": "end", "collective": 0,
    }  # fmt: skip
    assert last["batch"] is None and last["pid"] == os.getpid()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_memory_is_what_this_process_holds() -> None:
    before = memory_bytes()
    block = bytearray(os.urandom(1024)) * (64 * 1024)
    assert memory_bytes() - before > len(block) // 2


def test_field_19_a_request_is_answered_with_the_stack_of_a_waiting_thread(tmp_path: Path) -> None:
    release, waiting = threading.Event(), threading.Event()

    def stands_still() -> None:
        waiting.set()
        release.wait()

    thread = threading.Thread(target=stands_still, name="stuck")
    thread.start()
    try:
        waiting.wait()
        (tmp_path / "dump-request-rank3").touch()
        answer_request(tmp_path, 3)
        answer = json.loads((tmp_path / "dump-rank3.json").read_text())
    finally:
        release.set()
        thread.join()
    assert any("in stands_still: release.wait()" in frame for frame in answer["stacks"]["stuck"])
    assert [path.name for path in tmp_path.iterdir()] == ["dump-rank3.json"]
