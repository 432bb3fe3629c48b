# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run whose trainer writes no metrics is read from nanochat's line of every step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_events import HEAD_BYTES, TAIL_BYTES, events_of_log
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import read_run
from ansible_collections.nanochat.ddp.plugins.module_utils._run.table import closing_table
from ansible_collections.nanochat.ddp.tests.integration import fake_run


def line(step: int, loss: str = "", steps: int = 5000) -> str:
    return (
        f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | loss: {loss or f'{10 - step / 1000:.6f}'} | lrm: 0.12 | "
        "dt: 2000.00ms | tok/sec: 2,048 | bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 3 | total time: 0.00m | eta: 5900.1m\n"
    )


def test_every_step_is_an_event_with_its_time(tmp_path):
    log = tmp_path / "rank0.log"
    log.write_text("COMPUTE_DTYPE: torch.float32\n" + line(0) + "Step 00001 | Validation bpb: 1.250000\n" + line(1))
    os.utime(log, (1000, 1000))
    events = events_of_log(str(log))
    assert [event["kind"] for event in events] == ["start", "step", "step", "eval"]
    assert events[0]["steps"] == 5000
    assert [(event["step"], event["time"]) for event in events[1:3]] == [(0, 998), (1, 1000)]
    assert (events[1]["loss"], events[1]["seconds"], events[1]["tokens_per_second"]) == (10.0, 2.0, 2048.0)
    assert (events[3]["step"], events[3]["val_bpb"]) == (1, 1.25)


def test_only_the_newest_session_counts(tmp_path):
    log = tmp_path / "rank0.log"
    log.write_text(line(0) + line(1))
    begin = log.stat().st_size
    assert events_of_log(str(log), begin) == []
    with log.open("a") as file:
        file.write(line(0, "7.5"))
    assert [event["loss"] for event in events_of_log(str(log), begin) if event["kind"] == "step"] == [7.5]
    # A log that somebody emptied since begins at its beginning.
    log.write_text(line(3))
    assert [event["step"] for event in events_of_log(str(log), begin) if event["kind"] == "step"] == [3]


def test_of_a_long_log_the_first_and_the_newest_steps_are_read(tmp_path):
    log = tmp_path / "rank0.log"
    count = 3 * (HEAD_BYTES + TAIL_BYTES) // len(line(0))
    log.write_text("".join(line(step) for step in range(count)))
    steps = [event["step"] for event in events_of_log(str(log)) if event["kind"] == "step"]
    assert (steps[0], steps[-1]) == (0, count - 1)
    assert steps == sorted(set(steps)) and len(steps) < count  # type: ignore[type-var]


@pytest.mark.parametrize("size", [HEAD_BYTES, TAIL_BYTES, HEAD_BYTES + TAIL_BYTES])
def test_of_a_shorter_log_every_step_is_read_once_and_none_of_the_run_before(tmp_path: Path, size: int) -> None:
    log = tmp_path / "rank0.log"
    before, count = line(4999) * (TAIL_BYTES // len(line(0))), size // len(line(0))
    log.write_text(before + "".join(line(step) for step in range(count)))
    events = events_of_log(str(log), len(before))
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(count))


@pytest.mark.parametrize("text", ["", "nothing of the kind\n", "step 1/2 | loss: x\n"])
def test_other_logs_tell_nothing(tmp_path, text):
    (tmp_path / "log").write_text(text)
    assert events_of_log(str(tmp_path / "log")) == []
    assert events_of_log(str(tmp_path / "none")) == []


def finished(folder: Path, rank: int, text: str) -> Path:
    run = folder / f"host{rank}" / "runs" / "d4"
    (run / "log").mkdir(parents=True)
    fake_run.write_json(run / "plan.json", {"training": {"iterations": 3}, "world": 2})
    session = fake_run.session_of(rank, 1.0, ended=9.0, exit_code=0, log_begin=0)
    fake_run.write_json(run / "session.json", session)
    (run / "log" / f"rank{rank}.log").write_text(text)
    return run


def test_a_run_of_another_trainer_is_shown_as_far_as_it_tells(tmp_path):
    told = "".join(line(step, steps=3) for step in range(3))
    runs = [read_run(str(finished(tmp_path, rank, text))) for rank, text in enumerate((told, ""))]
    rows = [{"host": f"host{rank}", "run": run} for rank, run in enumerate(runs)]
    assert [run["state"] for run in runs] == ["finished", "finished"]
    table = closing_table(rows).splitlines()
    assert "3/3" in table[2] and "2048" in table[2] and "9.9980" in table[2]
    # Only its first rank says anything.
    assert "-/3" in table[3]
    assert "weights not compared on both ranks" in table[4]
    assert live_line(rows).startswith("step 3/3")


def test_a_loss_that_is_no_number_is_told(tmp_path):
    run = read_run(str(finished(tmp_path, 0, line(0, steps=3) + line(1, "nan", 3) + line(2, "nan", 3))))
    assert run["diverged"] is True
