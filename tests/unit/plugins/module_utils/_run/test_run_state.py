# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._run import find, metrics, polling
from ansible_collections.nanochat.ddp.plugins.module_utils._run import state as run_state
from ansible_collections.nanochat.ddp.tests.integration import fake_run


def session(**more: Any) -> dict[str, Any]:
    """session.json as a runner writes it; by default this process is the runner."""
    runner = {"pid": os.getpid(), "pid_start": processes.start_ticks(os.getpid()), "stopped": False}
    return {**fake_run.session_of(0, 1000.0), **runner, **more}


def step(number: int, at: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "time": 1001.0 + number if at is None else at,
        "step": number,
        "loss": 10.0 - number / 10,
        "seconds": 1.0,
        "tokens_per_second": 2048.0,
        "wait_seconds": 0.25,
        "memory_bytes": 1000 + number,
        **more,
    }


def start(at: float = 1000.5, **more: Any) -> dict[str, Any]:
    return {**fake_run.start_event(0, 2, 10, at), **more}


def end(reason: str, at: float = 1019.0, **more: Any) -> dict[str, Any]:
    return {"kind": "end", "time": at, "step": 2, "reason": reason, **more}


class Folder:
    """A run folder that a test fills."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "log").mkdir(parents=True)

    def put(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content), encoding="utf-8")

    def metrics(self, *events: dict[str, Any], rank: int = 0, tail: str = "") -> None:
        text = "".join(json.dumps(event) + "\n" for event in events) + tail
        (self.path / f"metrics-rank{rank}.jsonl").write_text(text, encoding="utf-8")

    def read(self, **more: Any) -> dict[str, Any]:
        return run_state.read_run(str(self.path), **more)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "runs" / "d4")


def test_a_heartbeat_of_an_earlier_start_says_nothing_of_the_steps_now(folder: Folder) -> None:
    folder.put("plan.json", {"training": {"iterations": 120}})
    folder.put("session.json", session(started=2000.0))
    folder.metrics(start(), step(59))
    folder.put("heartbeat-rank0.json", {"time": 1070.0, "steps": 60})
    assert folder.read()["steps"] == 120


def test_of_long_metrics_the_first_start_does_not_say_the_steps_of_the_newest(folder: Folder) -> None:
    folder.put("session.json", session(started=900.0))
    steps = [step(n, note="x" * (10_000 if n < 10 else 200)) for n in range(1000)]
    folder.metrics(start(), *steps[:10], start(steps=1000), *steps[10:])
    folder.put("heartbeat-rank0.json", {"time": 2500.0, "steps": 1000})
    run = folder.read(limit=150_000)
    assert (run["done"], run["steps"]) == (1000, 1000) and run["steps_counted"] < 999


def test_the_mean_leaves_the_first_step_out_and_weighs_by_time(folder: Folder) -> None:
    folder.put("session.json", session())
    speeds = ((30.0, 1.0), (1.0, 100.0), (3.0, 20.0))
    folder.metrics(start(), *(step(n, seconds=took, tokens_per_second=made) for n, (took, made) in enumerate(speeds)))
    run = folder.read()
    assert run["tokens_per_second_mean"] == pytest.approx((100 + 60) / 4)
    assert run["steps_counted"] == 2


def test_a_runner_of_another_boot_or_another_process_is_gone(folder: Folder) -> None:
    for gone in ({"boot_id": "another"}, {"pid_start": 1}, {"pid": 2**22 + 1}):
        folder.put("session.json", session(**gone))
        run = folder.read()
        assert run["state"] == "crashed"
        assert "disappeared without an exit status" in run["error"]


def test_a_trainer_started_by_hand_runs_while_its_heart_beats(folder: Folder) -> None:
    beat = {"time": time.time(), "pid": os.getpid(), "phase": "data", "phase_since": time.time()}
    folder.put("heartbeat-rank0.json", beat)
    assert folder.read()["state"] == "running"
    folder.put("heartbeat-rank0.json", {**beat, "time": time.time() - 60})
    assert folder.read()["state"] == "prepared"


@pytest.mark.parametrize(
    ("ended", "last", "state"),
    [
        ({"exit_code": 0}, None, "stopped"),
        ({"exit_code": None, "signal": 15, "stopped": True}, None, "stopped"),
        ({"exit_code": 0, "stopped": True}, {"reason": "finished"}, "finished"),
        ({"exit_code": None, "signal": 9}, {"reason": "stopped"}, "crashed"),
        ({"exit_code": 0, "terminated_by": "SIGHUP"}, {"reason": "stopped"}, "stopped"),
    ],
)
def test_how_it_ended(folder: Folder, ended: dict[str, Any], last: dict[str, Any] | None, state: str) -> None:
    folder.put("session.json", session(ended=1020.0, **ended))
    events = [start(), *(step(n) for n in range(3))]
    folder.metrics(*events, *([end(**last)] if last else []))
    run = folder.read()
    assert run["state"] == state
    assert run["eta_seconds"] is None
    assert (run["error"] is not None) == (state == "crashed")


def keeper_said(folder: Folder, state: str, why: str = "", **more: Any) -> None:
    told = {"state": state, "why": why, "since": 1010.0, "generation": 2, "members": ["a", "b"], "hears": ["b"], **more}
    folder.put("members.json", told)


@pytest.mark.parametrize(
    ("word", "ended", "reason", "state"),
    [
        # It heard that the others have finished.
        ("finished", {"exit_code": 0}, "error", "away"),
        ("finished", {"exit_code": 0}, None, "away"),
        ("away", {"exit_code": 75}, "stopped", "away"),
        ("stopped", {"exit_code": 0}, "finished", "finished"),
        # The keeper was killed, and its rank could still save.
        ("training", {"exit_code": None, "signal": 9}, "stopped", "crashed"),
        ("training", {"exit_code": 137}, "stopped", "crashed"),
        ("training", {"exit_code": 137, "stopped": True}, None, "stopped"),
        ("training", {"signal": 1, "terminated_by": "SIGHUP"}, None, "away"),
    ],
)
def test_how_it_ended_on_a_host_with_a_keeper(
    folder: Folder, word: str, ended: dict[str, Any], reason: str | None, state: str
) -> None:
    folder.put("session.json", session(ended=1020.0, **ended))
    folder.metrics(start(), *(step(n) for n in range(3)), *([end(reason, 1009.0)] if reason else []))
    keeper_said(folder, word, "because")
    run = folder.read()
    assert run["state"] == state
    assert (run["error"] is not None) == (state == "crashed")
    # Who was stopped here by a user needs no other cause.
    assert (run["cause"] == "because") == (state in ("stopped", "away") and not ended.get("stopped"))


def test_what_a_keeper_of_an_earlier_session_said_is_over(folder: Folder) -> None:
    folder.put("session.json", session(started=2000.0))
    keeper_said(folder, "idle", "b comes in")
    assert folder.read()["membership"] is None


def test_the_error_is_the_trainers_sentence_or_the_logs_line(folder: Folder) -> None:
    folder.put("session.json", session(ended=1020.0, exit_code=1))
    log = folder.path / "log" / "rank0.log"
    log.write_text(
        "step 00000\nTraceback (most recent call last):\n  File x\n[rank0]: RuntimeError: Connection closed by peer [192.168.1.2]:4242\n"
        "====\n",
        encoding="utf-8",
    )
    assert folder.read()["error"] == "RuntimeError: Connection closed by peer [192.168.1.2]:4242"
    assert folder.read(lines=2)["last_lines"][-1] == "===="
    folder.metrics(start(), end("error", error="rank 1 did not come"))
    assert folder.read()["error"] == "rank 1 did not come"


def test_metrics_of_an_earlier_session_do_not_speak_for_the_new_one(folder: Folder) -> None:
    folder.put("session.json", session(started=2000.0))
    folder.metrics(start(), step(0), end("finished"))
    run = folder.read()
    assert (run["state"], run["step"], run["end_reason"], run["val_bpb"]) == ("running", None, None, None)


def test_long_metrics_are_read_in_part(folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), *(step(n) for n in range(20000)))
    size = (folder.path / "metrics-rank0.jsonl").stat().st_size
    run = folder.read(limit=size // 4)
    assert (run["step"], run["first_loss"]) == (19999, 10.0)
    assert run["steps_counted"] < 20000
    assert folder.read(limit=size)["steps_counted"] == 19999


def test_the_rank_is_found_in_the_session_the_files_or_the_plan(folder: Folder) -> None:
    assert find.find_rank(str(folder.path), {}, {"session": "nanochat-d4-rank3"}) == 3
    plan = {"nodes": [{"rank": 7, "run_dir": str(folder.path)}]}
    assert find.find_rank(str(folder.path), plan, {}) == 7
    folder.metrics(start(), rank=2)
    assert find.find_rank(str(folder.path), plan, {}) == 2


def test_the_newest_run_is_the_one_written_to_last(tmp_path: Path) -> None:
    assert find.newest_run(str(tmp_path)) is None
    for name, when in (("old", 100), ("new", 300), ("older", 200)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        metrics = tmp_path / "runs" / name / "metrics-rank0.jsonl"
        metrics.touch()
        os.utime(metrics, (when, when))
    assert find.newest_run(str(tmp_path)) == str(tmp_path / "runs" / "new")
    assert find.find_run_dir(None, str(tmp_path), "old") == str(tmp_path / "runs" / "old")
    assert find.find_run_dir(None, str(tmp_path)) == str(tmp_path / "runs" / "new")


def test_a_run_that_is_only_prepared_is_not_the_newest(tmp_path: Path) -> None:
    finished, started, prepared = (tmp_path / "runs" / name for name in ("finished", "started", "prepared"))
    for path in (finished / "plan.json", finished / "base_checkpoints/finished/meta_000010.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (prepared / "data").mkdir(parents=True)
    assert find.find_run_dir(None, str(tmp_path)) == str(finished)
    started.mkdir()
    (started / "plan.json").write_text("{}")
    os.utime(finished / "plan.json", (1, 1))
    assert find.find_run_dir(None, str(tmp_path)) == str(started)
    # Whoever wants a model takes one that there is.
    assert find.find_run_dir(None, str(tmp_path), with_model=True) == str(finished)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


HERE, LATER = {"state": "running", "step": 3}, {"state": "running", "step": 4}
OVER = {"state": "finished", "step": 9}


@pytest.mark.parametrize(
    ("known", "looks", "at_least", "timeout", "waits"),
    [
        (HERE, [HERE], 0, 5, 5),
        (HERE, [HERE, HERE, LATER], 0, 60, 1),
        (HERE, [HERE, LATER], 10, 60, 10),
        (HERE, [HERE, {"state": "crashed", "step": 3}], 10, 60, 1),
        ({"state": "prepared", "step": None}, [LATER], 10, 60, 0),
        (OVER, [OVER], 10, 60, 0),
    ],
)
def test_waiting_ends_with_the_news_the_state_or_the_time(
    known: dict[str, Any],
    looks: list[Any],
    at_least: float,
    timeout: float,
    waits: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, seen = Time(), iter([*looks, *looks[-1:] * 1000])
    monkeypatch.setattr(polling, "time", at)
    wait = {**known, "at_least": at_least, "timeout": timeout}
    polling.wait_for_news(lambda: next(seen), wait)
    # A wait of some seconds ends at a look.
    assert at.now == pytest.approx(waits, abs=0.3 if waits > 1 else 1e-6)


@pytest.mark.parametrize(
    ("change", "since", "slept", "busy"),
    [
        ({"idle_seconds": 20.0}, 0.0, 1.0, 0.5),  # no progress: a moment is waited to see whether it works
        ({"idle_seconds": None}, 0.0, 1.0, 0.5),
        ({"idle_seconds": 2.0}, 0.0, 0.0, None),  # it makes steps: nothing is to be found out
        ({"idle_seconds": 2.0}, 60.0, 0.0, 0.5),  # what was waited for anyway tells it for nothing
        ({"idle_seconds": 20.0, "state": "crashed"}, 60.0, 0.0, None),
    ],
)
def test_whether_a_rank_works_is_looked_for_where_it_makes_no_progress(
    change: dict[str, Any], since: float, slept: float, busy: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Time()
    monkeypatch.setattr(polling, "time", at)
    monkeypatch.setattr(polling, "read_effort", lambda run_dir, rank: polling.Effort(at.now, 5.5))
    monkeypatch.setattr(polling, "busy_share", lambda first, then: then.seconds - first.seconds)
    run: Any = {"state": "running", "run_dir": "/x", "rank": 0, "busy": None, **change}
    polling._measure_busy(run, polling.Effort(-since, 5.0))
    assert (at.now, run["busy"]) == (pytest.approx(slept, abs=0.5), busy)


def test_weights_that_differed_once_are_never_called_identical() -> None:
    same, differ = ({"kind": "digest", "time": 1.0, "step": 1, "identical": found} for found in (True, False))

    def identical(*events: dict[str, Any]) -> bool | None:
        return metrics.describe_events([start(), *events])["identical"]

    assert identical(differ, same, end("finished", identical=True)) is False
    assert identical(same, end("finished", identical=None)) is True
    assert identical(differ, start(), same) is True
    assert identical() is None
