# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank's heartbeat: heartbeat-rankN.json every second, and answers to requests that others put into the run folder.

A thread writes and answers, so this works while the main thread waits in a collective, and needs no signal and no debugger.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from nanochat.kit.connections import connections

BEAT_SECONDS = 1.0
# Interval of checking whether to close the connections.
LOOK_SECONDS = 0.1
HANG_UP = "hang-up-rank"


class OutputFile:
    """A file that training can do without: the first write error is reported, and all are ignored."""

    def __init__(self, path: Path) -> None:
        self.path, self.warned = path, False

    def warn(self, error: OSError) -> None:
        if not self.warned:
            print(f"warning: cannot write {self.path}: {error.strerror or error}; training continues", file=sys.stderr)
        self.warned = True


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


def oom_kills() -> int | None:
    """This kernel's number of OOM kills; None if unknown.

    A killed process cannot say why. If this number has grown since its last heartbeat, that was why.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    return None


def hang_up(run_dir: Path, rank: int) -> str | None:
    """Close all connections if hang-up-rankN exists, and return the reason in it, so that a wait for a frozen or unreachable
    rank fails with an error."""
    request = run_dir / f"{HANG_UP}{rank}"
    if not request.exists():
        return None
    why = request.read_text(encoding="utf-8", errors="replace")
    request.unlink(missing_ok=True)
    for one in connections():
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
    return why


def answer_request(run_dir: Path, rank: int) -> None:
    """If dump-request-rankN exists, write the stack of every thread to dump-rankN.json."""
    request = run_dir / f"dump-request-rank{rank}"
    if not request.exists():
        return
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        # The innermost frame last.
        names.get(ident, str(ident)): [
            f"{one.filename}:{one.lineno} in {one.name}: {one.line}" for one in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
    answer = {"time": time.time(), "pid": os.getpid(), "stacks": stacks}
    part = run_dir / f"dump-rank{rank}.json.part"
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(run_dir / f"dump-rank{rank}.json")
    request.unlink(missing_ok=True)
