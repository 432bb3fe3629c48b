# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank's output: log lines for people, events for tools (metrics-rankN.jsonl), a heartbeat for watchers.

Nothing here may stop or slow the training: a failing disk is reported once and then ignored.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanochat.kit.common import Ranks, base_dir, memory_bytes, writable_folder
from nanochat.kit.settings import Settings
from nanochat.record.heartbeat import Heartbeat, OutputFile
from nanochat.record.tracker import Tracker, open_tracker
from nanochat.rules.causes import Cause


def finite(value: Any) -> Any:
    """The value with numbers that JSON lacks replaced by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


class Metrics(OutputFile):
    """One JSON object per line, each in a single write, so that readers and crashes never see part of one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._torn = False
        self._handle: int | None = None
        try:
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


class Journal:
    """Metrics, heartbeat and printed lines of one rank; the first rank of each host prints."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        for stream in (sys.stdout, sys.stderr):
            # Samples may contain characters that the terminal's encoding lacks.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        self.folder = Path(settings.run_dir) if settings.run_dir else base_dir()
        writable_folder(self.folder, "metrics")
        self.settings, self.rank, self.prints = settings, ranks.rank, ranks.local_rank == 0
        place = self.place(ranks.rank)
        self.metrics = Metrics(self.folder / f"metrics-rank{place}.jsonl")
        self.heartbeat = Heartbeat(self.folder / f"heartbeat-rank{place}.json", place, ranks.world)
        self.tracker = Tracker()
        self.notices: list[str] = []  # about the start, for status and report, too
        self._step, self._steps, self._seconds = 0, 0, 0.0

    @staticmethod
    def place(rank: int) -> int:
        """The number in a rank's file names: its host's planned rank, also while some hosts are missing."""
        places = [int(place) for place in os.environ.get("NANOCHAT_PLACES", "").split(",") if place]
        return places[rank] if rank < len(places) else rank

    def open_tracker(self, resumed: bool) -> None:
        """Also send rank 0's figures to the configured tracker."""
        if self.rank == 0:
            settings = self.settings
            self.tracker = open_tracker(
                settings.tracker, settings.tracker_uri, settings.run, asdict(settings), self.folder, resumed
            )

    def say(self, line: str) -> None:
        """Print a log line; an error while printing must not end the training."""
        if self.prints:
            with contextlib.suppress(OSError, ValueError):
                print(line, flush=True)

    def note(self, notice: str) -> None:
        """Say something about the start that the user should know; every rank does."""
        self.notices.append(notice)
        self.say(notice)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Write an event to metrics-rankN.jsonl, and send it to the tracker."""
        self._step = step
        if kind == "step":
            values["memory_bytes"] = memory_bytes()
            self._steps += 1
            self._seconds += values["seconds"]
        self.tracker.take(self.metrics.write(kind, step, **values))

    def seconds_per_step(self, last: float) -> float:
        """The mean step time of this process."""
        return (self._seconds + last) / (self._steps + 1)

    def end(
        self, reason: str, error: str | None = None, cause: Cause | None = None, blames: Sequence[int] = ()
    ) -> None:
        """Write the last event and heartbeat."""
        code, places = (cause or Cause(reason)).value, [self.place(rank) for rank in blames]
        self.metrics.write("end", self._step, reason=reason, error=error, cause=code, blames=places)
        self.tracker.close(reason)
        self.heartbeat.enter("end", self._step)
        self.heartbeat.close()
        self.metrics.close()
