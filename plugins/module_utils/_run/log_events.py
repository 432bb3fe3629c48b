# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the log of a trainer without metrics: each of nanochat's step lines becomes an event.

Lines have no time, so times are counted back from the log's last change.
"""

from __future__ import annotations

import os
import re
from typing import Any, List, Optional

from .metrics import Event, finite

# The first step and the newest ones; those in between do not affect the result.
HEAD_BYTES = 32 * 1024
TAIL_BYTES = 256 * 1024

STEP = re.compile(
    rb"^step (\d+)/(\d+) \([\d.]+%\) \| loss: (\S+) \| lrm: (\S+) \| dt: ([\d.]+)ms \| tok/sec: ([\d,]+)", re.M
)
EVALUATION = re.compile(rb"^Step (\d+) \| Validation bpb: ([\d.]+)", re.M)


def events_of_log(path: str, begin: int = 0) -> List[Event]:
    """The events of the run that began at a position of the log."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            begin = begin if begin <= found.st_size else 0
            file.seek(begin)
            data = file.read(HEAD_BYTES)
            rest = found.st_size - begin - len(data)
            if rest > TAIL_BYTES:
                file.seek(-TAIL_BYTES, os.SEEK_END)
                data += b"\n"
            data += file.read(TAIL_BYTES)
    except OSError:
        return []
    return _events(data, found.st_mtime)


def _events(data: bytes, written: float) -> List[Event]:
    found: List[Event] = []
    time = written
    for match in reversed(list(STEP.finditer(data))):
        event = _step(match, time)
        if event:
            found.append(event)
            time -= finite(event["seconds"]) or 0.0
    found.reverse()
    for match in EVALUATION.finditer(data):
        bits = _number(match.group(2))
        found.append({"kind": "eval", "time": written, "step": int(match.group(1)), "val_bpb": bits, "seconds": 0.0})
    steps = [int(match.group(2)) for match in STEP.finditer(data)]
    return [{"kind": "start", "time": time, "step": 0, "steps": steps[-1]}, *found] if steps else []


def _step(match: Any, time: float) -> Optional[Event]:
    loss, milliseconds = _number(match.group(3)), _number(match.group(5))
    speed = _number(match.group(6).replace(b",", b""))
    if milliseconds is None or speed is None:
        return None
    return {
        "kind": "step",
        "time": time,
        "step": int(match.group(1)),
        # A NaN loss is reported as such.
        "loss": float("nan") if loss is None else loss,
        "lr_multiplier": _number(match.group(4)),
        "seconds": milliseconds / 1000,
        "tokens_per_second": speed,
    }


def _number(text: bytes) -> Optional[float]:
    try:
        return float(text)
    except ValueError:
        return None
