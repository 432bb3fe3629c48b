# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import log as run_log
from ansible_collections.nanochat.ddp.tests.integration import fake_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A running training: this process is its runner."""
    folder = tmp_path / "runs" / "d4"
    (folder / "log").mkdir(parents=True)
    runner = {"pid": os.getpid(), "pid_start": fake_run.start_ticks(os.getpid())}
    fake_run.write_json(folder / "session.json", fake_run.session_of(1, 1.0, **runner))
    (folder / "log" / "rank1.log").write_text("one\ntwo\nthree\n")
    return folder


def end(run_dir: Path) -> None:
    fake_run.write_json(run_dir / "session.json", fake_run.session_of(1, 1.0, ended=2.0, exit_code=0))


def read(run_dir: Path, **more: Any) -> dict[str, Any]:
    slept = more.pop("slept", lambda seconds: None)
    params = {"run_dir": str(run_dir), "rank": None, "lines": 2, "offset": None, "wait": 0.0, **more}
    clock = iter(range(10000))
    return run_log.read_log(params, clock=lambda: float(next(clock)), sleep=slept)


def test_the_last_lines_come_first_and_then_what_is_new(run_dir: Path) -> None:
    first = read(run_dir)
    assert (first["lines"], first["over"]) == (["two", "three"], False)
    log = run_dir / "log" / "rank1.log"
    with log.open("a") as stream:
        stream.write("four\nhalf a li")
    second = read(run_dir, offset=first["offset"])
    assert second["lines"] == ["four"]
    with log.open("a") as stream:
        stream.write("ne\n")
    assert read(run_dir, offset=second["offset"])["lines"] == ["half a line"]


def test_it_waits_for_new_lines_but_not_for_ever(run_dir: Path) -> None:
    offset = read(run_dir)["offset"]
    assert read(run_dir, offset=offset, wait=5.0)["lines"] == []

    def slept(seconds: float) -> None:
        with (run_dir / "log" / "rank1.log").open("a") as stream:
            stream.write("news\n")

    assert read(run_dir, offset=offset, wait=100.0, slept=slept)["lines"] == ["news"]


def test_after_the_end_the_last_words_come_too_and_it_is_over(run_dir: Path) -> None:
    offset = read(run_dir)["offset"]
    (run_dir / "log" / "rank1.log").open("a").write("no end of line")
    end(run_dir)
    last = read(run_dir, offset=offset, wait=60.0)
    assert (last["lines"], last["over"], last["state"]) == (["no end of line"], True, "finished")


def test_a_log_that_began_anew_is_read_from_its_beginning(run_dir: Path) -> None:
    (run_dir / "log" / "rank1.log").write_text("new\n")
    assert read(run_dir, offset=5000)["lines"] == ["new"]


def test_colours_and_progress_bars_become_plain(run_dir: Path) -> None:
    (run_dir / "log" / "rank1.log").write_bytes(b"\x1b[31mred\x1b[0m\n10%\r50%\r100%\n\xff\xfe\n")
    assert read(run_dir, offset=0)["lines"] == ["red", "100%", "\ufffd\ufffd"]


def test_where_nothing_was_started_there_is_nothing_to_read(tmp_path: Path) -> None:
    nothing = read(tmp_path / "none")
    assert (nothing["lines"], nothing["over"], nothing["state"]) == ([], True, "absent")
