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
