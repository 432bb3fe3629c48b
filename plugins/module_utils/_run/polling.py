# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run, at once or when there is news, for run_info; also a bare program on the host."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Mapping, Optional

from .._contract.document import undamaged
from .._contract.run_folder import PLAN
from .._kit import bare
from .._kit.files import read_object
from .effort import Effort, busy_share, read_effort
from .find import WHICH_RUN, find_run_dir
from .metrics import PEEK_BYTES
from .state import EMPTY, ENDED, RUNNING, RunState, read_run

PEEK_SECONDS = 0.5
IDLE_PEEK_SECONDS = 1.0  # when only the end would be news
BUSY_SECONDS = 1.0  # CPU use is measured over this time if there was no progress for IDLE_SECONDS
IDLE_SECONDS = 10.0


def _measure_busy(run: RunState, first: Optional[Effort], sleep: Callable[[float], None] = time.sleep) -> None:
    """The fraction of a core that a running rank uses since the first reading; waits a moment if that was just now and matters."""
    if run["state"] != RUNNING or first is None or run["run_dir"] is None:
        return
    left = BUSY_SECONDS - (time.monotonic() - first.at)
    idle = run["idle_seconds"]
    if left > 0 and (idle is None or idle > IDLE_SECONDS):
        sleep(left)
        left = 0.0
    if left <= 0:
        run["busy"] = busy_share(first, read_effort(run["run_dir"], run["rank"]))


def wait_for_news(
    peek: Callable[[], RunState],
    wait: Mapping[str, Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once the state differs from the caller's, or (after at_least seconds) the step, or after the timeout.

    A check costs about half a millisecond; more than two a second would help nobody.
    """
    begun = clock()
    run = peek()
    while run["state"] == wait["state"] and run["state"] not in ENDED and clock() - begun < wait["timeout"]:
        waited = clock() - begun
        if run["step"] != wait["step"] and waited >= wait["at_least"]:
            return
        sleep(PEEK_SECONDS if waited + IDLE_PEEK_SECONDS > wait["at_least"] else IDLE_PEEK_SECONDS)
        run = peek()


# Parameters of run_info.
OPTIONS: Dict[str, Dict[str, object]] = dict(
    rank=dict(type="int"),
    lines=dict(type="int", default=10),
    plan=dict(type="bool", default=False),
    wait=dict(
        type="dict",
        options=dict(
            state=dict(type="str"),
            step=dict(type="int"),
            at_least=dict(type="float", default=0.0),
            timeout=dict(type="float", default=0.0),
        ),
    ),
    with_model=dict(type="bool", default=False),
    **WHICH_RUN,
)
BOUNDS = {"lines": (0, 100000), "rank": (0, 1000000), "wait.timeout": (0, 3600), "wait.at_least": (0, 3600)}


def read_run_info(params: Mapping[str, Any]) -> Dict[str, object]:
    """The result of run_info: the run's state, and on request its plan (empty if missing, torn or edited)."""
    run_dir, rank, wait = find_run_dir(params), params.get("rank"), params.get("wait")
    if run_dir is None:
        return {"run": EMPTY, "plan": {}} if params["plan"] else {"run": EMPTY}
    first = read_effort(run_dir, rank)
    if wait:
        wait_for_news(lambda: read_run(run_dir, rank, lines=0, limit=PEEK_BYTES), wait)
    run = read_run(run_dir, rank, lines=params["lines"])
    _measure_busy(run, first)
    plan = {"plan": undamaged(read_object(os.path.join(run_dir, PLAN)))} if params["plan"] else {}
    return {"run": run, **plan}


def say(mark: str, params: Dict[str, object]) -> None:
    """The program: returns the result of run_info."""
    bare.answer(mark, read_run_info(bare.expanded(params, ["run_dir", "base_dir"])))
