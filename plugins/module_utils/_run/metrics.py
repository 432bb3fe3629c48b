# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a trainer's metrics, long files only in part.

Readers never lock and never wait for the writer: an incomplete line is left for the next poll, and of a big file only the
beginning and the newest part are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from typing import Any, Dict, Iterator, List, Optional, Tuple, TypedDict, cast

from .._contract.document import Document, number, section, text, whole, words

HEAD_BYTES = 64 * 1024
PEEK_BYTES = 16 * 1024  # enough to detect news
METRICS_BYTES = 4 * 1024 * 1024  # about 10000 steps; longer files are read in part
RECENT_STEPS = 10  # for the current speed
ETA_STEPS = 50  # for the time left, including evaluations and saves

Event = Document  # its kind is always text


class RunFigures(TypedDict):
    """A run by its metrics; unknown values are None."""

    rank: Optional[int]  # rank of this host
    world: Optional[int]  # number of ranks
    step: Optional[int]  # the last step that was made, counted from 0
    done: int  # how many steps are made
    steps: Optional[int]  # how many steps the run has
    share: Optional[float]  # of its time that a run with ddp_budget or ddp_finish_by has used, 0 to 1
    ends: Optional[float]  # when such a run ends, by the host's clock
    loss: Optional[float]  # of the last step that was made, the mean over all ranks; null when not finite
    diverged: bool  # whether that is no finite number
    first_loss: Optional[float]  # the same of the first step
    val_bpb: Optional[float]  # bits per byte of the last evaluation. Only rank 0 has it
    identical: Optional[bool]  # whether all ranks held identical weights when that was compared last
    digest: Optional[str]  # the digest of the weights that was compared last
    end_reason: Optional[str]  # what the trainer wrote as the reason of its end
    end_error: Optional[str]  # what the trainer wrote as its error
    end_cause: Optional[str]  # why it ended, as a code of the trainer's (`docs/architecture.md` lists them)
    end_blames: Optional[List[int]]  # the ranks at fault for the end, as far as is known
    notices: List[str]  # what the user should know of the newest attempt's start
    epoch: Optional[int]  # the last step's, counted from 1: how many times it had begun to read the data
    pace_seconds: Optional[float]  # seconds by the clock from one step to the next, evaluations and saves included
    updated: Optional[float]  # when the last event was written
    stepped: Optional[float]  # when the last step of the newest attempt was made
    started: Optional[float]  # when the session started, in seconds since the epoch
    # Of the newest attempt that made a step, without its first step, a warm-up, unless it is the only one:
    steps_counted: int  # how many steps are counted in the means
    tokens_per_second: Optional[float]  # speed of all ranks together over the last ten steps
    tokens_per_second_mean: Optional[float]  # the same over all steps
    step_seconds: Optional[float]  # median time of a step
    wait_seconds: Optional[float]  # seconds that this rank has waited for other ranks
    wait_share: Optional[float]  # the same as a share of the time of these steps
    bytes_sent: Optional[int]  # what this rank has sent in a step, on average
    memory_bytes: Optional[int]  # memory of the rank
    rows: Optional[int]  # rows of a step that this host takes now
    rows_before: Optional[int]  # its rows before they were changed last, where they were
    rows_changed: Optional[int]  # the first step with the rows of now, where they were others before


def finite(value: Any) -> Optional[float]:
    """The number as a float, or None if it is not finite (a NaN loss must not break JSON)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def read_tail(path: str, limit: int) -> bytes:
    """The last bytes of a file, starting at a complete line; empty if there is no file."""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit))
            data = stream.read(limit)
    except OSError:
        return b""
    return data if size <= limit else data.partition(b"\n")[2]


def json_lines(data: bytes) -> Iterator[Document]:
    """The JSON objects of a file with one per line; skips all other lines."""
    for line in data.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def parse_events(data: bytes) -> List[Event]:
    """The events of a metrics file: its objects with a kind."""
    return [event for event in json_lines(data) if isinstance(event.get("kind"), str)]


def read_events(path: str, limit: int = METRICS_BYTES) -> List[Event]:
    """The events of a metrics file; beyond `limit` bytes, its beginning and newest part."""
    head = b""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        if 2 * HEAD_BYTES < limit < os.fstat(stream.fileno()).st_size:
            head = stream.read(HEAD_BYTES)
    return parse_events(head) + parse_events(read_tail(path, limit - len(head)))


def _number(event: Event, key: str) -> float:
    return finite(event.get(key)) or 0.0


def _last(events: List[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["kind"] == kind), {})


def _steps(events: List[Event]) -> List[Event]:
    return [event for event in events if event["kind"] == "step" and isinstance(event.get("step"), int)]


def _pace(steps: List[Event]) -> Optional[float]:
    """Wall-clock seconds per step, evaluations and saves included."""
    window = steps[-ETA_STEPS:]
    if len(window) < 2:
        return None
    done = number(window[-1], "step") - number(window[0], "step")
    return (_number(window[-1], "time") - _number(window[0], "time")) / done if done > 0 else None


def newest_attempt(events: List[Event]) -> Tuple[int, List[Event]]:
    """The number of starts, and the events of the newest one."""
    starts = [index for index, event in enumerate(events) if event["kind"] == "start"]
    return len(starts), events[starts[-1] :] if starts else events


def _measured(events: List[Event]) -> List[Event]:
    """The events with speeds and weights: of the newest start, or if that ended before a step, of the one before."""
    count, attempt = newest_attempt(events)
    had_nothing_to_do = bool(_last(attempt, "end")) and not _last(attempt, "step")
    return _measured(events[: len(events) - len(attempt)]) if had_nothing_to_do and count > 1 else attempt


def _speed(steps: List[Event]) -> Optional[float]:
    """Tokens per second of all ranks over some steps."""
    seconds = sum(_number(step, "seconds") for step in steps)
    tokens = sum(_number(step, "tokens_per_second") * _number(step, "seconds") for step in steps)
    return tokens / seconds if seconds > 0 else None


def _means(steps: List[Event]) -> Dict[str, Any]:
    """The figures that are counted over one attempt's steps."""
    steady = steps[1:] if len(steps) > 1 else steps
    seconds = sum(_number(step, "seconds") for step in steady)
    waited = [_number(step, "wait_seconds") for step in steady if "wait_seconds" in step]
    sent = [_number(step, "bytes_sent") for step in steady if "bytes_sent" in step]
    rows = [whole(step, "rows") for step in steps]
    changed = next((at for at in range(len(rows) - 1, 0, -1) if rows[at - 1] != rows[-1]), 0)
    return {
        "steps_counted": len(steady),
        "tokens_per_second": _speed(steady[-RECENT_STEPS:]),
        "tokens_per_second_mean": _speed(steady),
        "step_seconds": statistics.median(_number(step, "seconds") for step in steady) if steady else None,
        "wait_seconds": sum(waited) if waited else None,
        "wait_share": sum(waited) / seconds if seconds > 0 and waited else None,
        "bytes_sent": round(sum(sent) / len(sent)) if sent else None,
        "memory_bytes": whole(steps[-1], "memory_bytes") if steps else None,
        "rows": rows[-1] if rows else None,
        "rows_before": rows[changed - 1] if changed else None,
        "rows_changed": whole(steps[changed], "step") if changed and rows[-1] is not None else None,
    }


def positive(value: Any) -> Optional[int]:
    """A given count; the trainer's -1 means computed later."""
    return value if isinstance(value, int) and value > 0 else None


def describe_events(events: List[Event]) -> RunFigures:
    """A run's description from its metrics; current values come from the newest attempt."""
    attempt = newest_attempt(events)[1]
    all_steps, steps = _steps(events), _steps(attempt)
    start, end = _last(attempt, "start"), _last(attempt, "end")
    resumed = whole(start, "resumed_from")
    evaluation = _last(events, "eval")
    measured = _measured(events)
    found = [event.get("identical") for event in measured if event["kind"] in ("digest", "end")]
    compared = [one for one in found if isinstance(one, bool)]
    last: Event = steps[-1] if steps else {}
    blames = end.get("blames")
    figures = {
        "rank": whole(start, "rank"),
        "world": whole(start, "world"),
        "step": number(last, "step") if steps else None,
        "done": number(last, "step") + 1 if steps else resumed or 0,
        # An evaluation reports that it has none.
        "steps": positive(last.get("steps"))
        or positive(start.get("steps", section(start, "settings").get("num_iterations"))),
        "share": finite(last.get("share")),
        "ends": finite(start.get("ends")),
        "loss": finite(all_steps[-1].get("loss")) if all_steps else None,
        "diverged": bool(all_steps) and all_steps[-1].get("loss") is not None and finite(all_steps[-1]["loss"]) is None,
        "first_loss": finite(all_steps[0].get("loss")) if all_steps else None,
        "val_bpb": finite(evaluation.get("val_bpb")) if evaluation else finite(end.get("val_bpb")),
        # Weights that differed once are no model, whatever later comparisons say.
        "identical": all(compared) if compared else None,
        "digest": text(_last(measured, "digest"), "digest"),
        "end_reason": text(end, "reason"),
        "end_error": text(end, "error"),
        "end_cause": text(end, "cause"),
        "end_blames": [one for one in blames if isinstance(one, int)] if isinstance(blames, list) else None,
        "notices": words(start, "notices"),
        "epoch": whole(last, "epoch"),
        "pace_seconds": _pace(steps),
        "updated": finite(events[-1].get("time")) if events else None,
        "stepped": finite(last.get("time")),
        "started": finite(start.get("time")),
        **_means(_steps(measured)),
    }
    return cast(RunFigures, figures)
