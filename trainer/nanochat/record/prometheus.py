# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The run's figures as a text file for node_exporter's textfile collector, one file for each rank.

    NANOCHAT_PROM_DIR=/var/lib/node_exporter/textfile torchrun ... -m scripts.base_train ...

The file is replaced atomically, at most once a second. No port is opened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.record.metrics import OutputFile

FOLDER = "NANOCHAT_PROM_DIR"
SECONDS = 1.0


class Series(NamedTuple):
    """One metric: the event kind and key of its value, and Prometheus' help. A name ending in _total is a sum."""

    event: str
    key: str
    help: str


SERIES = {
    "running": Series("", "", "1 while the trainer runs, 0 after it finished, was stopped or failed."),
    "step": Series("step", "step", "Last finished step, counted from 0."),
    "steps": Series("start", "steps", "Steps of the whole run."),
    "ranks": Series("start", "world", "Ranks now training together."),
    "generation": Series(
        "start", "generation", "The keepers' generation number: changes and restarts of the training ranks."
    ),
    "loss": Series("step", "loss", "Loss of the last step, mean over all ranks."),
    "val_bpb": Series("eval", "val_bpb", "Bits per byte of the last evaluation."),
    "tokens_per_second": Series("step", "tokens_per_second", "Speed of the last step, all ranks together."),
    "step_seconds": Series("step", "seconds", "Time of the last step."),
    "wait_seconds_total": Series("step", "wait_seconds", "Time that this rank waited for others since it started."),
    "sent_bytes_total": Series("step", "bytes_sent", "Bytes that this rank sent since it started."),
    "memory_bytes": Series("step", "memory_bytes", "Memory of this rank."),
    "checkpoint_step": Series("checkpoint", "step", "Step of the last checkpoint."),
    "last_event_timestamp_seconds": Series("", "", "Time of this rank's last update."),
}


class Textfile:
    """Receives the same events as the metrics file, and updates the text file."""

    def __init__(self, folder: Path, run: str, rank: int, now: Callable[[], float] = time.monotonic) -> None:
        self.path = folder / f"nanochat_{re.sub(r'[^A-Za-z0-9_-]', '_', run)}_rank{rank}.prom"
        self.labels = f'run="{escaped(run)}",rank="{rank}"'
        self.values: dict[str, float] = {"running": 1.0}
        self._now = now
        self._written = -SECONDS
        self._output = OutputFile(self.path)

    def take(self, event: Mapping[str, Any]) -> None:
        """Record an event; rare ones update the file at once, steps within a second."""
        kind, values = event.get("kind"), self.values
        values.update(running=float(kind != "end"), last_event_timestamp_seconds=float(event["time"]))
        for name, series in SERIES.items():
            value = event.get(series.key)
            if series.event == kind and isinstance(value, (int, float)):
                values[name] = float(value) + (values.get(name, 0.0) if name.endswith("_total") else 0.0)
        if kind != "step" or self._now() - self._written >= SECONDS:
            self.write()

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        lines = []
        for name, series in SERIES.items():
            if name in self.values:
                lines.append(f"# HELP nanochat_{name} {series.help}")
                lines.append(f"# TYPE nanochat_{name} {'counter' if name.endswith('_total') else 'gauge'}")
                lines.append(f"nanochat_{name}{{{self.labels}}} {self.values[name]!r}")
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write the file; an unwritable folder is reported once, and training continues."""
        self._written = self._now()
        # The collector reads every *.prom file, so the temporary name must differ.
        self._output.replace(self.text(), self.path.with_name(f".{self.path.name}.{os.getpid()}"), mode=0o644)


def escaped(value: str) -> str:
    """Escape a label's value."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def listener(environment: Mapping[str, str], run: str, rank: int) -> Callable[[Mapping[str, Any]], None] | None:
    """A listener to all events if a folder is set, else None."""
    folder = environment.get(FOLDER)
    return Textfile(Path(folder), run, rank).take if folder else None
