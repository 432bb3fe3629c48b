# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a rank's log: the last lines first, then new ones."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Mapping, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import WHICH_RUN, find_run_dir
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_tail import log_lines, plain_lines
from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import PEEK_BYTES
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY, PREPARED, RUNNING, read_run

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


def size_of(path: str) -> int:
    """The size of a file; 0 if missing."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def whole_lines(path: str, offset: int, everything: bool) -> Tuple[List[str], int]:
    """The lines from an offset on, the last one only if complete or final; and the offset of the next ones."""
    if offset > size_of(path):
        offset = 0  # a new log replaced the old one
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            data = stream.read(CHUNK)
    except OSError:
        return [], offset
    end = len(data) if everything and len(data) < CHUNK else data.rfind(b"\n") + 1
    if not end and len(data) == CHUNK:
        end = CHUNK  # longer than any line should be
    return plain_lines(data[:end]), offset + end


def read_log(
    params: Mapping[str, Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Dict[str, object]:
    """The result of run_log: lines of the log; waits for new ones while the run is alive and the caller allows."""
    run_dir = find_run_dir(params)
    run = EMPTY if run_dir is None else read_run(run_dir, params["rank"], lines=0, limit=PEEK_BYTES)
    path, offset = run["log"], params["offset"]
    if path is None:
        return {"state": run["state"], "log": None, "lines": [], "offset": 0, "over": True}
    begun = clock()
    going = run["state"] in (RUNNING, PREPARED)
    if offset is None:
        end = size_of(path)
        lines, over = log_lines(path, params["lines"]), not going
    else:
        while going and size_of(path) == offset and clock() - begun < params["wait"]:
            sleep(0.2)
        lines, end = whole_lines(path, offset, everything=not going)
        over = not going and end >= size_of(path)
    return {"state": run["state"], "log": path, "lines": lines, "offset": end, "over": over}


def say(mark: str, params: Dict[str, object]) -> None:
    """The program: returns the result of run_log."""
    bare.answer(mark, read_log(bare.expanded(params, ["run_dir", "base_dir"])))
