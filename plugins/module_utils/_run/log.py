# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a rank's log: the last lines first, then new ones."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import WHICH_RUN, find_run_dir
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_tail import log_lines, plain_line
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import (
    EMPTY,
    PREPARED,
    RUNNING,
    RunState,
    read_run,
)

CHUNK = 256 * 1024
# Parameters of run_log.
OPTIONS: Dict[str, Dict[str, object]] = dict(
    rank=dict(type="int"),
    lines=dict(type="int", default=20),
    offset=dict(type="int"),
    wait=dict(type="float", default=0.0),
    follow=dict(type="bool", default=False),
    **WHICH_RUN,
)
BOUNDS = {"lines": (0, 100000), "rank": (0, 1000000), "offset": (0, 2**62), "wait": (0, 3600)}


class Piece(NamedTuple):
    """Some lines of a log, and the offset of the next ones."""

    lines: List[str]
    offset: int


class LogPiece(TypedDict):
    """The result of run_log."""

    state: str
    log: Optional[str]
    lines: List[str]
    offset: int
    over: bool


def size_of(path: str) -> int:
    """The size of a file; 0 if missing."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def whole_lines(path: str, offset: int, everything: bool) -> Piece:
    """The lines from an offset on; the last one only if complete or final."""
    if offset > size_of(path):
        offset = 0  # a new log replaced the old one
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            data = stream.read(CHUNK)
    except OSError:
        return Piece([], offset)
    end = len(data) if everything and len(data) < CHUNK else data.rfind(b"\n") + 1
    if not end and len(data) == CHUNK:
        end = CHUNK  # longer than any line should be
    text = data[:end].decode("utf-8", "replace")
    return Piece([plain_line(line) for line in text.split("\n") if plain_line(line)], offset + end)


def last_lines(path: str, count: int) -> Piece:
    """The last complete lines."""
    end = size_of(path)
    return Piece(log_lines(path, count), end)


def read_log(
    params: Mapping[str, Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> LogPiece:
    """Read the log; wait for new lines while the run is alive and the caller allows."""
    run_dir = find_run_dir(params)
    run: RunState = {**EMPTY} if run_dir is None else read_run(run_dir, params["rank"], lines=0, limit=16 * 1024)
    path = run["log"]
    if path is None:
        return {"state": run["state"], "log": None, "lines": [], "offset": 0, "over": True}
    begun = clock()
    going = run["state"] in (RUNNING, PREPARED)
    if params["offset"] is None:
        piece = last_lines(path, params["lines"])
        return _answer(run, piece, over=not going)
    while going and size_of(path) == params["offset"] and clock() - begun < params["wait"]:
        sleep(0.2)
    piece = whole_lines(path, params["offset"], everything=not going)
    return _answer(run, piece, over=not going and piece.offset >= size_of(path))


def _answer(run: RunState, piece: Piece, over: bool) -> LogPiece:
    return {"state": run["state"], "log": run["log"], "lines": piece.lines, "offset": piece.offset, "over": over}


def say(mark: str, params: Dict[str, object]) -> None:
    """The program: returns the result of run_log."""
    bare.answer(mark, read_log(bare.expanded(params, ["run_dir", "base_dir"])))
