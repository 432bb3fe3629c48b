# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Summarises a storm from all hosts' files: surviving steps, whether each row was trained on once, repeated steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Json = dict[str, Any]


def log_of(events: Iterable[Json]) -> Iterator[Json]:
    """A host's starts and steps in order, each with its attempt (equal on all hosts) and that attempt's start."""
    attempt: Json = {}
    for event in events:
        if event["kind"] == "start":
            attempt = {"attempt": event["attempt_id"], "began": event["time"], "world": event["world"]}
        if event["kind"] in ("start", "step"):
            yield {**event, **attempt}


def surviving(events: Iterable[Json]) -> dict[int, Json]:
    """The steps of a host on which its later starts built."""
    made: dict[int, Json] = {}
    for event in log_of(events):
        if event["kind"] == "start":
            made = {step: old for step, old in made.items() if step < (event["resumed_from"] or 0)}
        else:
            made[event["step"]] = event
    return made


def rows_of_steps(lines: Mapping[str, Mapping[int, Json]]) -> dict[int, int]:
    """Rows that all hosts together trained on in each surviving step, that is, its last repetition."""
    rows = {}
    for step in set().union(*lines.values()):
        newest = max((line[step] for line in lines.values() if step in line), key=lambda event: event["began"])
        rows[step] = sum(rows_of_host(line, step, newest["attempt"]) for line in lines.values())
    return rows


def rows_of_host(line: Mapping[int, Json], step: int, attempt: str) -> int:
    """Rows of one host in a step; those of its last logged step if it was killed before it logged this one, or its disk was full."""
    # It took part, because no rank finishes a step without everyone's gradients.
    logged = next((line[one] for one in range(step, -1, -1) if one in line), None)
    return int(logged["rows"]) if logged is not None and logged["attempt"] == attempt else 0


def back_by(events: Iterable[Json]) -> int:
    """Number of steps that a host repeated."""
    again, last = 0, -1
    for event in log_of(events):
        if event["kind"] == "start" and event["resumed_from"] is not None:
            again += max(0, last + 1 - event["resumed_from"])
        elif event["kind"] == "step":
            last = event["step"]
    return again


def from_scratch(events: Iterable[Json]) -> list[Json]:
    """Starts after the first that began at step 0."""
    starts = [event for event in log_of(events) if event["kind"] == "start"]
    return [start for start in starts[1:] if not start["resumed_from"]]
