# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run that only evaluates a model shows batches instead of steps, and its result at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import report
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stalls import StallLimits
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY, read_run
from ansible_collections.nanochat.ddp.plugins.module_utils._run.table import closing_table, status_table
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import Observation, judge
from ansible_collections.nanochat.ddp.tests.integration import fake_run

STAGE = {"stage": "eval", "base": "d4", "step": 10}
PLAN = {"run": "d4-eval", "world": 2, "training": {"iterations": 1}, "stage": STAGE}
BEGAN = 1000.0


def start(at: float = BEGAN, rank: int = 0) -> dict[str, Any]:
    more = {"rank": rank, "world": 2, "steps": None, "settings": {"num_iterations": 1}, "resumed_from": None}
    return {"kind": "start", "time": at, "step": 10, **more}


def measured(bpb: float, at: float = BEGAN + 9) -> list[dict[str, Any]]:
    digest = {"kind": "digest", "time": at - 8, "step": 10, "digest": "ab" * 8, "identical": True}
    return [digest, {"kind": "eval", "time": at, "step": 10, "val_bpb": bpb, "seconds": 8.0}]


def end(at: float = BEGAN + 10, bpb: float | None = None) -> dict[str, Any]:
    return {"kind": "end", "time": at, "step": 10, "reason": "finished", "steps": 0, "identical": True, "val_bpb": bpb}


def write(folder: Path, rank: int, events: list[dict[str, Any]], beat: dict[str, Any] | None = None) -> Path:
    """The run folder of a rank; with a heartbeat the run goes on in this very process."""
    fake_run.write_history(folder, events, rank)
    fake_run.write_json(folder / "plan.json", {**PLAN, "nodes": [{"host": "one"}, {"host": "two"}]})
    going = {"pid": os.getpid(), "pid_start": fake_run.start_ticks(os.getpid()), "ended": None, "exit_code": None}
    over = {"pid": 1, "ended": BEGAN + 11, "exit_code": 0}
    session = fake_run.session_of(rank, BEGAN - 1, "d4-eval", **(going if beat else over))
    fake_run.write_json(folder / "session.json", session)
    if beat:
        usual = {"time": time.time(), "pid": os.getpid(), "rank": rank, "world": 2, "step": 10, "steps": 0}
        phase = {"phase": "eval", "phase_since": time.time() - 1}
        fake_run.write_json(folder / f"heartbeat-rank{rank}.json", {**usual, **phase, **beat})
    return folder


def rows(*folders: Path) -> list[dict[str, Any]]:
    return [{"host": folder.parent.name, "run": read_run(str(folder))} for folder in folders]


@pytest.fixture
def finished(tmp_path: Path) -> list[Path]:
    one = write(tmp_path / "one/d4-eval", 0, [start(), *measured(3.6249), end(bpb=3.6249)])
    return [one, write(tmp_path / "two/d4-eval", 1, [start(rank=1), measured(0.0)[0], end()])]


@pytest.fixture
def going(tmp_path: Path) -> list[Path]:
    """Begun after an earlier evaluation in the same folder."""
    before = [start(BEGAN - 100), *measured(9.9, BEGAN - 90), end(BEGAN - 89, 9.9)]
    one = write(tmp_path / "one/d4-eval", 0, [*before, start()], {"batch": 12, "batches": 40})
    return [one, write(tmp_path / "two/d4-eval", 1, [start(rank=1)], {"batch": 11, "batches": 40})]


def test_the_result_is_below_the_hosts(finished: list[Path]) -> None:
    lines = closing_table(rows(*finished)).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["host", "rank", "state"], ["one", "0", "finished"], ["two", "1", "finished"],
    ]  # fmt: skip
    assert lines[4:] == [
        "  step 10 of the run d4: 3.6249 bits per byte of the validation shard",
        "  weights identical on both ranks (digest abababababababab)",
    ]


def test_while_it_goes_on_it_counts_batches(going: list[Path]) -> None:
    seen = rows(*going)
    assert (seen[0]["run"]["steps"], seen[0]["run"]["val_bpb"]) == (None, None)
    assert live_line(seen) == "evaluating, batch 11/40"
    assert live_line(seen, 60, unicode=False).startswith("[#######.")
    told = [line.split() for line in status_table(seen).splitlines()[1:]]
    # The figure of the evaluation before is not that of this one.
    assert told == [
        ["host", "rank", "state", "batches"], ["one", "0", "evaluating", "12/40"], ["two", "1", "evaluating", "11/40"],
    ]  # fmt: skip


def test_a_host_on_which_nothing_was_started_leaves_an_evaluation_one(going: list[Path]) -> None:
    others = [{"host": "three", "run": {**EMPTY, "state": state}} for state in ("absent", None)]
    told = [line.split() for line in status_table([*rows(*going), *others]).splitlines()[1:]]
    assert told[0] == ["host", "rank", "state", "batches"]
    assert told[1] == ["one", "0", "evaluating", "12/40"]


def test_before_the_first_batch_it_starts_as_others_do(tmp_path: Path) -> None:
    folder = write(tmp_path / "one/d4-eval", 0, [start()], {"phase": "agree"})
    assert live_line(rows(folder)) == "starting: one comparing settings"


def test_the_verdict_has_the_result(finished: list[Path]) -> None:
    seen = {row["host"]: Observation(row["run"]) for row in rows(*finished)}
    said = [judge(host, seen, StallLimits()) for host in ("one", "two")]
    assert said == [("finished", "finished: 3.6249 bits per byte"), ("finished", "finished its part")]


def test_watching_for_the_first_step_ends_with_the_first_batch(going: list[Path]) -> None:
    seen = {row["host"]: Observation(row["run"]) for row in rows(*going)}
    started = ("started", "has started (in batch 12/40 of the evaluation)")
    assert judge("one", seen, StallLimits(), first_step=True) == started
    assert judge("one", seen, StallLimits()) is None


def test_a_training_that_evaluates_counts_batches_too() -> None:
    run = {**EMPTY, "state": "running", "run": "d4", "step": 4, "done": 5, "steps": 10, "step_age": 30.0}
    evaluating = {**run, "phase": "eval", "phase_seconds": 0.1, "batch": 3, "batches": None}
    assert live_line([{"host": "a", "run": evaluating}]).startswith("step 5/10, evaluating, batch 3")


def test_the_report_tells_what_was_measured(finished: list[Path], tmp_path: Path) -> None:
    collected = tmp_path / "d4-eval"
    collected.mkdir()
    for folder in finished:
        folder.rename(collected / folder.parent.name)
    data = report.page_data(report.load_run(str(collected)))
    assert data["stage"] == STAGE
    assert "measured 3.6249 bits per byte" in [one["text"] for one in data["happenings"]]  # type: ignore[attr-defined]
    assert (data["ranks"][0]["summary"]["val_bpb"], data["ranks"][0]["summary"]["steps"]) == (3.6249, None)
