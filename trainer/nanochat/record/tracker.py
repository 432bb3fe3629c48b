# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics to a tracking server: none, mlflow or wandb, for rank 0.

    tracker = open_tracker("mlflow", "http://10.0.0.1:5000", "my run", asdict(settings), run_dir)
    tracker.take(event)      # every step and evaluation
    tracker.close("finished")

take() only queues the numbers. A thread imports the package, connects and sends; a slow or unreachable server
costs one warning and never a training step. A resumed run continues under the same id, kept in tracker.json.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import netrc
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nanochat.kit.common import UserError, first_line

PROJECT = "nanochat"
MOST_WAITING = 100_000
SECONDS_BETWEEN_SENDS = 1.0
SECONDS_AFTER_FAILURE = 15.0
SECONDS_AT_CLOSE = 30.0
# Other ranks should learn of an error soon.
SECONDS_AT_ERROR = 5.0
MLFLOW_METRICS_AT_ONCE, MLFLOW_VALUE_LENGTH = 1000, 500
STEP_NUMBERS = (
    "loss", "loss_smooth", "epoch", "forward_backward_seconds", "wait_seconds", "optimizer_seconds", "data_seconds", "bytes_sent",
    "memory_bytes",
)  # fmt: skip
# Names of a run's events (nanochat/record/journal.py) and, if upstream sends the same number, upstream's name for it.
SENT = {
    "start": {"world": "membership/ranks", "generation": "membership/generation"},
    "step": {
        **{name: f"train/{name}" for name in STEP_NUMBERS},
        "lr_multiplier": "train/lrm",
        "seconds": "train/dt",
        "tokens_per_second": "train/tok_per_sec",
    },
    "eval": {"val_bpb": "val/bpb"},
}


class Point(NamedTuple):
    """The numbers of one step."""

    step: int
    time: float
    values: dict[str, float]


class Tracker:
    """Sends numbers to a tracking package's own client from a separate thread; without one, nothing."""

    def __init__(
        self,
        client: Mlflow | Wandb | None = None,
        name: str = "none",
        config: Mapping[str, object] = MappingProxyType({}),
        folder: Path = Path(),
        pause: float = SECONDS_BETWEEN_SENDS,
    ) -> None:
        self._client, self._name, self._config, self._pause = client, name, config, pause
        self._id_path = folder / "tracker.json"
        # Bounded: if a server never answers, the oldest points are dropped instead of filling memory.
        self._waiting: collections.deque[Point] = collections.deque(maxlen=MOST_WAITING)
        self._closing = threading.Event()
        self._warned = False
        self._status = "finished"
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        if client is not None:
            self._thread.start()

    def take(self, event: Mapping[str, Any]) -> None:
        """Send an event's numbers."""
        values = {name: event.get(key) for key, name in SENT.get(event["kind"], {}).items()}
        known = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        if known and self._client is not None:
            self._waiting.append(Point(int(event["step"]), event["time"], known))

    def close(self, status: str) -> None:
        """Send the rest; status is finished, stopped or error."""
        if self._client is None:
            return
        self._status = status
        self._closing.set()
        self._thread.join(SECONDS_AT_ERROR if status == "error" else SECONDS_AT_CLOSE)
        if self._thread.is_alive() or self._waiting:
            self._warn(f"{len(self._waiting)} steps were not sent")

    def _run(self) -> None:
        client, pause, is_open, over = self._client, self._pause, False, False
        assert client is not None
        while not over:
            over = self._closing.wait(pause)
            try:
                if not is_open:
                    number = client.open(self._config, self._previous())
                    with contextlib.suppress(OSError):
                        self._id_path.write_text(json.dumps({"tracker": self._name, "id": number}), encoding="utf-8")
                    is_open = True
                if points := list(self._waiting):
                    client.send(points)
                    for point in points:
                        # New ones may have arrived meanwhile and pushed out what was just sent.
                        if self._waiting and self._waiting[0] is point:
                            self._waiting.popleft()
                if over:
                    client.close(self._status)
                pause = self._pause
            # Whatever a tracking package raises must not affect training.
            except Exception as error:
                self._warn(first_line(error)[:200])
                pause = SECONDS_AFTER_FAILURE * self._pause

    def _previous(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._id_path.read_text(encoding="utf-8"))
            return str(kept["id"]) if kept["tracker"] == self._name else None
        return None

    def _warn(self, why: str) -> None:
        if not self._warned:
            print(f"warning: --tracker {self._name}: {why}; training continues", file=sys.stderr, flush=True)
        self._warned = True


class Mlflow:
    """Parameters and metrics for an MLflow server or store."""

    def __init__(self, uri: str, run: str) -> None:
        self._uri, self._run, self._id = uri, run, ""
        self._client: Any = None

    def open(self, config: Mapping[str, object], previous: str | None) -> str:
        # MLflow's own timeout of minutes would outlast our exit.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri or None)
        if previous is not None:
            # A server without the run gets a new one; an unreachable one fails again just below.
            with contextlib.suppress(MlflowException):
                self._client.update_run(previous, status="RUNNING")
                self._id = previous
                return previous
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment, run_name=self._run).info.run_id)
        params = [Param(key, str(value)[:MLFLOW_VALUE_LENGTH]) for key, value in config.items()]
        self._client.log_batch(self._id, params=params)
        return self._id

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(k, v, int(1000 * p.time), p.step) for p in points for k, v in p.values.items()]
        for begin in range(0, len(metrics), MLFLOW_METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + MLFLOW_METRICS_AT_ONCE])

    def close(self, status: str) -> None:
        states = {"stopped": "KILLED", "error": "FAILED"}
        self._client.set_terminated(self._id, states.get(status, "FINISHED"))


class Wandb:
    """Configuration and metrics for Weights & Biases, or for a folder and a later "wandb sync"."""

    def __init__(self, uri: str, run: str, folder: Path) -> None:
        self._uri, self._name, self._folder = uri, run, folder
        self._run: Any = None

    def open(self, config: Mapping[str, object], previous: str | None) -> str:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        if mode == "offline":
            # Without a key wandb would prompt for one, and an unattended run in a terminal would wait forever.
            print(f'wandb keeps its data in {self._folder / "wandb"}; run "wandb sync" there to upload it', flush=True)
        settings: dict[str, Any] = {"console": "off", "silent": True} | ({"base_url": self._uri} if self._uri else {})
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=self._name, config=dict(config), dir=str(self._folder),
            id=previous, resume="allow", mode=mode, settings=wandb.Settings(**settings),  # type: ignore[arg-type,unused-ignore]
        )  # fmt: skip
        return str(self._run.id)

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "error" else 0)


def _has_wandb_key() -> bool:
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY")) or netrc.netrc().authenticators("api.wandb.ai") is not None
    return False


def open_tracker(
    kind: str, uri: str, run: str, config: Mapping[str, object], folder: Path, resumed: bool = False
) -> Tracker:
    """The configured tracker; rejects one whose package is missing. Only rank 0 should call it."""
    if kind == "none":
        return Tracker()
    if importlib.util.find_spec(kind) is None:
        raise UserError(f"--tracker {kind}: this Python has no package {kind}; install it, or use --tracker none.")
    if not resumed:
        with contextlib.suppress(OSError):
            (folder / "tracker.json").unlink()
    return Tracker(Mlflow(uri, run) if kind == "mlflow" else Wandb(uri, run, folder), kind, config, folder)
