# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Trackers: what is sent arrives, and a server that is slow or down never holds up training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import wait_until

from nanochat.kit.common import UserError
from nanochat.record import tracker as tracker_utils
from nanochat.record.journal import Metrics
from nanochat.record.tracker import Point, Tracker, open_tracker


class Recorder:
    """A backend that records calls, and fails or waits on request."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.previous: str | None = None
        self.points: list[Point] = []
        self.status: str | None = None
        self.failures = 0
        self.gate = threading.Event()
        self.gate.set()

    def open(self, config: Mapping[str, Any], previous: str | None) -> str:
        self.gate.wait(10)
        self._fail()
        self.config, self.previous = dict(config), previous
        return "id-1"

    def send(self, points: Sequence[Point]) -> None:
        self._fail()
        self.points.extend(points)

    def close(self, status: str) -> None:
        self.status = status

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the server is down\nwith details")


def made(step: int) -> dict[str, Any]:
    return {"kind": "step", "time": time.time(), "step": step, "loss": 5.0 - step}


def track(recorder: Recorder, folder: Path) -> Tracker:
    return Tracker(recorder, "test", {"depth": 4}, folder, pause=0.001)  # type: ignore[arg-type]


def test_events_of_the_run_are_sent_under_upstreams_names(tmp_path: Path) -> None:
    recorder, metrics = Recorder(), Metrics(tmp_path / "metrics-rank0.jsonl")
    tracker = track(recorder, tmp_path)
    tracker.take(metrics.write("start", 0, world=2))
    tracker.take(metrics.write("step", 1, loss=2.0, tokens_per_second=100.0, lr_multiplier=0.5))
    tracker.take(metrics.write("eval", 1, val_bpb=1.25))
    tracker.take(metrics.write("step", 2, loss=float("nan")))
    tracker.close("finished")
    assert [(point.step, point.values) for point in recorder.points] == [
        (0, {"membership/ranks": 2.0}),
        (1, {"train/loss": 2.0, "train/tok_per_sec": 100.0, "train/lrm": 0.5}),
        (1, {"val/bpb": 1.25}),
    ]


def test_a_server_that_fails_for_a_while_costs_one_warning_and_no_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    recorder.failures = 3
    tracker = track(recorder, tmp_path)
    for step in range(10):
        tracker.take(made(step))
    wait_until(lambda: len(recorder.points) >= 10)
    tracker.close("finished")
    assert [point.step for point in recorder.points] == list(range(10))
    told = capsys.readouterr().err
    assert told == "warning: --tracker test: the server is down; training continues\n"


def test_a_server_that_hangs_does_not_hold_up_a_step_and_gets_everything_later(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.gate.clear()
    tracker = track(recorder, tmp_path)
    begun = time.monotonic()
    for step in range(1000):
        tracker.take(made(step))
    assert time.monotonic() - begun < 1.0
    recorder.gate.set()
    tracker.close("stopped")
    assert [point.step for point in recorder.points] == list(range(1000))
    assert (recorder.config, recorder.status) == ({"depth": 4}, "stopped")
    # A resumed run continues under its id.
    again = Recorder()
    track(again, tmp_path).close("finished")
    assert again.previous == "id-1"


def test_a_server_that_never_answers_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_utils, "MOST_WAITING", 3)
    recorder = Recorder()
    recorder.gate.clear()
    tracker = track(recorder, tmp_path)
    for step in range(10):
        tracker.take(made(step))
    recorder.gate.set()
    tracker.close("stopped")
    assert [point.step for point in recorder.points] == [7, 8, 9]


def test_none_tracks_nothing_and_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = open_tracker("none", "", "run", {}, tmp_path)
    tracker.take(made(1))
    tracker.close("finished")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--tracker mlflow: this Python has no package mlflow"):
        open_tracker("mlflow", "", "run", {}, tmp_path)


def test_mlflow_gets_parameters_and_metrics_of_both_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the experiment that the plan names."""
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "nanochat-d4")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for first in (0, 5):
        tracker = open_tracker("mlflow", uri, "smoke", {"depth": 4, "sync": "exact"}, tmp_path, resumed=first > 0)
        for step in range(first, first + 5):
            tracker.take(made(step))
        tracker.close("finished")
    client = tracking.MlflowClient(uri)
    experiment = client.get_experiment_by_name("nanochat-d4")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == (
        "smoke",
        "FINISHED",
        {"depth": "4", "sync": "exact"},
    )
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, 5.0 - step) for step in range(10)]


def test_wandb_keeps_a_run_for_later_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = open_tracker("wandb", "", "smoke", {"depth": 4}, tmp_path)
    for step in range(3):
        tracker.take(made(step))
    tracker.close("finished")
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # wandb's own process may still be writing when its finish() has returned.
    wait_until(lambda: b"train/loss" in kept.read_bytes())
    assert b"depth" in kept.read_bytes()
