# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank's events: metrics-rankN.jsonl.

Nothing here may stop or slow the training: a failing disk is reported once and then ignored.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any


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
