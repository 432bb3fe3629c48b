# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run's records: metrics-rankN.jsonl, heartbeat-rankN.json and the duration of each phase.

Nothing here may stop or slow the training: a failing disk is reported once and then ignored.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nanochat.record.dump import HANG_UP, answer_request, hang_up, oom_kills

BEAT_SECONDS = 1.0
# Interval of checking whether to close the connections.
LOOK_SECONDS = 0.1


def finite(value: Any) -> Any:
    """The value with numbers that JSON lacks replaced by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


class OutputFile:
    """A file that training can do without: the first write error is reported, and all are ignored."""

    def __init__(self, path: Path) -> None:
        self.path, self.warned = path, False

    def warn(self, error: OSError) -> None:
        if not self.warned:
            print(f"warning: cannot write {self.path}: {error.strerror or error}; training continues", file=sys.stderr)
        self.warned = True


class Metrics(OutputFile):
    """One JSON object per line, each in a single write, so that readers and crashes never see part of one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._torn = False
        self._handle: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            # A power cut may have left a partial line, which must not swallow our first one.
            size = os.fstat(self._handle).st_size
            self._torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        except OSError as error:
            self.warn(error)
            self.close()

    def write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Append one event, and return it."""
        event: dict[str, Any] = finite({"kind": kind, "time": time.time(), "step": step, **values})
        if self._handle is not None:
            line = ("\n" if self._torn else "") + json.dumps(event, default=str) + "\n"
            try:
                self._torn = os.write(self._handle, line.encode()) < len(line)
            except OSError as error:
                self.warn(error)
        return event

    def close(self) -> None:
        """No more events."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Heartbeat(OutputFile):
    """Writes heartbeat-rankN.json every second in a separate thread; the training thread only sets fields."""

    def __init__(self, path: Path, rank: int, world: int, every: float = BEAT_SECONDS) -> None:
        super().__init__(path)
        self.rank, self.world, self.every = rank, world, every
        self.steps = 0
        # A launcher uses these to compute a stop's timeout.
        self.step_seconds: float | None = None
        self.save_seconds: float | None = None
        self.hung_up = ""  # why all connections were closed
        self._stop = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            # A request to an earlier process of this rank does not concern the new connections.
            (path.parent / f"{HANG_UP}{rank}").unlink(missing_ok=True)
        self.enter("start", 0)
        self._write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def enter(self, phase: str, step: int, collective: int = 0) -> None:
        """Set the phase; same signature as Comm.on_phase."""
        # One object, so that the thread never sees a partial change.
        self._phase: dict[str, Any] = {
            "step": step, "phase": phase, "phase_since": time.time(), "collective": collective, "batch": None, "batches": None,
        }  # fmt: skip

    def evaluating(self, batch: int, batches: int | None) -> None:
        """Record an evaluation's batch, which is progress within the phase."""
        self._phase = {**self._phase, "batch": batch, "batches": batches}

    def _run(self) -> None:
        beaten = time.monotonic()
        while not self._stop.wait(min(LOOK_SECONDS, self.every)):
            # Nothing may end this thread.
            with contextlib.suppress(OSError):
                self.hung_up = hang_up(self.path.parent, self.rank) or self.hung_up
            if time.monotonic() - beaten < self.every:
                continue
            beaten = time.monotonic()
            self._write()
            # The next heartbeat shows that we are alive.
            with contextlib.suppress(OSError):
                answer_request(self.path.parent, self.rank)

    def _write(self) -> None:
        beat = {
            "time": time.time(), "pid": os.getpid(), "rank": self.rank, "world": self.world, "steps": self.steps,
            "step_seconds": self.step_seconds, "save_seconds": self.save_seconds, "oom_kills": oom_kills(), **self._phase,
        }  # fmt: skip
        fresh = self.path.with_name(f".{self.path.name}.tmp")
        try:
            fresh.write_text(json.dumps(beat), encoding="utf-8")
            fresh.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            self.warn(error)

    def close(self) -> None:
        """Write a last heartbeat with the current phase."""
        self._stop.set()
        self._thread.join(self.every + 1)
        self._write()
