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
from ansible_collections.nanochat.ddp.plugins.module_utils._run import effort, find, log_tail, metrics, polling
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


def test_no_folder_is_absent_and_has_every_key(tmp_path: Path, folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), step(0))
    absent = run_state.read_run(str(tmp_path / "nothing"))
    assert absent["state"] == "absent"
    assert set(absent) == set(folder.read())


def test_a_folder_without_session_is_prepared(folder: Folder) -> None:
    folder.put("plan.json", {"digest": "abc", "world": 2, "training": {"iterations": 10}})
    run = folder.read()
    assert (run["state"], run["steps"], run["plan_digest"], run["done"]) == ("prepared", 10, "abc", 0)


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
    assert (run["sampled"], run["done"], run["steps"]) == (True, 1000, 1000)


def test_a_living_runner_is_running_with_its_figures(folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), *(step(n) for n in range(4)), {"kind": "eval", "time": 1005.0, "step": 3, "val_bpb": 1.5})
    folder.put("heartbeat-rank0.json", {"time": 1006.0, "pid": os.getpid(), "phase": "sync", "phase_since": 1004.0})
    run = folder.read(now=1010.0)
    assert run["state"] == "running"
    assert (run["step"], run["done"], run["steps"], run["rank"], run["world"]) == (3, 4, 10, 0, 2)
    assert (run["loss"], run["first_loss"], run["val_bpb"]) == (pytest.approx(9.7), 10.0, 1.5)
    assert (run["tokens_per_second"], run["step_seconds"], run["wait_share"]) == (2048.0, 1.0, 0.25)
    assert run["wait_seconds"] == 1.0
    assert run["eta_seconds"] == 6.0
    assert (run["heartbeat_age"], run["phase"], run["phase_seconds"], run["idle_seconds"]) == (4.0, "sync", 6.0, 5.0)


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
        ({"exit_code": 0}, {"reason": "finished"}, "finished"),
        ({"exit_code": 0}, {"reason": "stopped"}, "stopped"),
        ({"exit_code": 0}, None, "stopped"),
        ({"exit_code": None, "signal": 15, "stopped": True}, None, "stopped"),
        ({"exit_code": 0, "stopped": True}, {"reason": "finished"}, "finished"),
        ({"exit_code": 1}, {"reason": "error", "error": "no memory"}, "crashed"),
        ({"exit_code": None, "signal": 9}, None, "crashed"),
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


def test_another_trainer_without_metrics_finishes_by_its_exit_code(folder: Folder) -> None:
    folder.put("session.json", session(ended=1020.0, exit_code=0))
    assert folder.read()["state"] == "finished"


@pytest.mark.parametrize(
    ("word", "ended", "reason", "state"),
    [
        ("finished", {"exit_code": 0}, "finished", "finished"),
        # It heard that the others have finished.
        ("finished", {"exit_code": 0}, "error", "away"),
        ("finished", {"exit_code": 0}, None, "away"),
        ("left", {"exit_code": 0}, "stopped", "away"),
        ("away", {"exit_code": 75}, "stopped", "away"),
        ("stopped", {"exit_code": 0}, "stopped", "stopped"),
        ("stopped", {"exit_code": 0}, "finished", "finished"),
        ("failed", {"exit_code": 1}, "error", "crashed"),
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


def test_the_error_of_a_host_with_a_keeper_is_its_keepers_word(folder: Folder) -> None:
    folder.metrics(start(), step(0), end("error", 1009.0, error="rank 1 is gone", cause="peer-lost"))
    folder.put("session.json", session(ended=1020.0, exit_code=1))
    keeper_said(folder, "failed", "the run died 4 times within an hour, and ddp_restarts is 3")
    assert folder.read()["error"].startswith("the run died 4 times")
    folder.put("session.json", session(ended=1020.0, signal=9))
    keeper_said(folder, "training")
    assert folder.read()["error"].startswith("its keeper ended by signal 9")


def test_after_a_reboot_no_keeper_says_anything_any_more(folder: Folder) -> None:
    folder.put("session.json", session(boot_id="another"))
    keeper_said(folder, "idle", "b comes in")
    run = folder.read()
    assert run["state"] == "crashed" and "the machine rebooted" in run["error"]
    assert not run_state.keeper_lives(run)
    # What a keeper of an earlier session said is over.
    folder.put("session.json", session(started=2000.0))
    assert folder.read()["membership"] is None


def test_where_a_keeper_waits_there_is_no_time_left(folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), *(step(n) for n in range(4)))
    keeper_said(folder, "training")
    assert folder.read(now=1010.0)["eta_seconds"] == 6.0
    keeper_said(folder, "idle")
    assert folder.read(now=1010.0)["eta_seconds"] is None


def test_who_ended_a_session_that_no_user_stopped_is_told(folder: Folder) -> None:
    folder.put("session.json", session(ended=1020.0, exit_code=0, terminated_by="SIGHUP"))
    folder.metrics(start(), step(0), end("stopped", 1009.0))
    assert "SIGHUP ended it" in folder.read()["cause"]
    folder.put("session.json", session(ended=1020.0, exit_code=0, stopped=True))
    assert folder.read()["cause"] is None


BOX = """\
E1121 22:01:02.123 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 4712)
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
scripts.base_train FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 0)
  exitcode  : 1 (pid: 4712)
============================================================
"""


def test_torchruns_box_is_not_taken_for_the_error() -> None:
    said = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
    assert log_tail.error_line([*f"step 00003\n[rank1]: {said}\n{BOX}".splitlines()]) == said
    assert log_tail.error_line(f"no documents in /data\n{BOX}".splitlines()) == "no documents in /data"
    assert log_tail.error_line(BOX.splitlines()) is None
    assert log_tail.error_line(["==== results ====", "========", "all is lost"]) == "all is lost"


def test_the_error_is_the_trainers_sentence_or_the_logs_line(folder: Folder) -> None:
    folder.put("session.json", session(ended=1020.0, exit_code=1))
    log = folder.path / "log" / "rank0.log"
    log.write_text(
        "step 00000\nTraceback (most recent call last):\n  File x\n[rank0]: RuntimeError: Connection closed by peer [192.168.1.2]:4242\n"
        "E1121 torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n",
        encoding="utf-8",
    )
    assert folder.read()["error"] == "RuntimeError: Connection closed by peer [192.168.1.2]:4242"
    assert folder.read(lines=2)["last_lines"][-1] == "===="
    folder.metrics(start(), end("error", error="rank 1 did not come"))
    assert folder.read()["error"] == "rank 1 did not come"


def test_half_written_and_foreign_lines_are_passed_over(folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), step(0), step(1), tail='{"kind": "step", "time": 1003.0, "st')
    assert folder.read()["step"] == 1
    folder.metrics(start(), step(0), tail='null\n[1]\n"x"\n\x00\x00\n{"no": "kind"}\n')
    assert folder.read()["step"] == 0
    (folder.path / "session.json").write_text('{"id": ', encoding="utf-8")
    assert folder.read()["state"] in ("crashed", "prepared")


def test_a_loss_that_is_no_number_is_told_and_breaks_no_json(folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), step(0), step(1, loss=float("nan")))
    run = folder.read()
    assert run["diverged"] is True
    assert run["loss"] is None
    json.dumps(run, allow_nan=False)


def test_a_restart_counts_from_its_checkpoint_and_keeps_the_first_loss(folder: Folder) -> None:
    folder.put("session.json", session(started=1050.0))
    checkpoint = {"kind": "checkpoint", "time": 1006.0, "step": 4, "path": "x/model_000004.pt", "bytes": 5}
    first, again = (
        [start(notices=["of before"]), *(step(n) for n in range(6))],
        [start(1050.5, resumed_from=4, notices=["step 5 is damaged"]), step(4, 1060.0, seconds=2.0, epoch=3)],
    )
    folder.metrics(*first, checkpoint, *again)
    run = folder.read()
    assert (run["done"], run["attempts"], run["resumed_from"], run["first_loss"]) == (5, 2, 4, 10.0)
    assert run["checkpoint"]["step"] == 4
    assert (run["step_seconds"], run["epoch"], run["notices"]) == (2.0, 3, ["step 5 is damaged"])


def test_metrics_of_an_earlier_session_do_not_speak_for_the_new_one(folder: Folder) -> None:
    folder.put("session.json", session(started=2000.0))
    folder.metrics(start(), step(0), end("finished"))
    run = folder.read()
    assert (run["state"], run["step"], run["end_reason"], run["val_bpb"]) == ("running", None, None, None)


def test_long_metrics_are_read_in_part_and_it_is_said(folder: Folder) -> None:
    folder.put("session.json", session())
    folder.metrics(start(), *(step(n) for n in range(20000)))
    size = (folder.path / "metrics-rank0.jsonl").stat().st_size
    run = folder.read(limit=size // 4)
    assert (run["step"], run["first_loss"], run["sampled"]) == (19999, 10.0, True)
    assert run["steps_counted"] < 20000
    whole = folder.read(limit=size)
    assert (whole["sampled"], whole["steps_counted"]) == (False, 19999)


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

    def clock(self) -> float:
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
    known: dict[str, Any], looks: list[dict[str, Any]], at_least: float, timeout: float, waits: float
) -> None:
    at, seen = Time(), iter([*looks, *looks[-1:] * 1000])
    wait = {**known, "at_least": at_least, "timeout": timeout}
    polling.wait_for_news(lambda: next(seen), wait, at.clock, at.sleep)
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
    monkeypatch.setattr(polling, "read_effort", lambda run_dir, rank: effort.Effort(time.monotonic() + 1, 5.5))
    monkeypatch.setattr(polling, "busy_share", lambda first, then: then.seconds - first.seconds)
    run: Any = {"state": "running", "run_dir": "/x", "rank": 0, "busy": None, **change}
    polling._measure_busy(run, effort.Effort(time.monotonic() - since, 5.0), at.sleep)
    assert (at.now, run["busy"]) == (pytest.approx(slept, abs=0.5), busy)


def test_weights_that_differed_once_are_never_called_identical() -> None:
    same, differ = ({"kind": "digest", "time": 1.0, "step": 1, "identical": found} for found in (True, False))

    def identical(*events: dict[str, Any]) -> bool | None:
        return metrics.describe_events([start(), *events])["identical"]

    assert identical(differ, same, end("finished", identical=True)) is False
    assert identical(same, end("finished", identical=None)) is True
    assert identical(differ, start(), same) is True
    assert identical() is None


def test_shares_are_those_of_the_newest_step_and_of_the_plan_before_the_first(folder: Folder) -> None:
    folders = {"base_dir": str(folder.path), "run_dir": str(folder.path)}
    node = {"host": "a", "rank": 0, "rows": 4, "env": {"TOKEN": "x"}, **folders}
    folder.put("plan.json", {"world": 1, "nodes": [node], "model": {"depth": 4}, "training": {"timed": "8h"}})
    run = folder.read()
    assert (run["rows"], run["rows_changed"], run["timed"]) == (4, None, "8h")
    folder.put("session.json", session())
    folder.metrics(start(), *(step(n, rows=4 if n < 3 else 6, forward_backward_seconds=float(n)) for n in range(6)))
    run = folder.read()
    assert (run["rows"], run["rows_before"], run["rows_changed"]) == (6, 4, 3)


def test_time_left_of_a_run_that_ends_at_a_time_is_that_of_the_clock():
    timed = [start(ends=1600.0, steps=100), step(0, share=0.0, steps=100), step(1, share=0.01, steps=90)]
    told = metrics.describe_events(timed)
    assert (told["steps"], told["share"], told["ends"]) == (90, 0.01, 1600.0)
    assert [run_state._eta(told, None, now) for now in (1010.0, 1700.0)] == [590.0, 0.0]
