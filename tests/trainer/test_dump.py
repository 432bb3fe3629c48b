"""The answer of a process that seems to be stuck."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from nanochat.record.dump import answer_request


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
        assert answer_request(tmp_path, 3)
        answer = json.loads((tmp_path / "dump-rank3.json").read_text())
    finally:
        release.set()
        thread.join()
    assert any("in stands_still: release.wait()" in frame for frame in answer["stacks"]["stuck"])
    assert [path.name for path in tmp_path.iterdir()] == ["dump-rank3.json"]


def test_the_flight_record_has_the_last_collective(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dummy in range(3):
            dist.all_reduce(torch.ones(1))
        (tmp_path / "dump-request-rank0").touch()
        answer_request(tmp_path, 0)
    finally:
        dist.destroy_process_group()
    flight = json.loads((tmp_path / "dump-rank0.json").read_text())["flight"]
    assert flight["last_seq"] == 3
    assert flight["entries"][-1]["profiling_name"] == "gloo:all_reduce"
