# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run, at once or when there is news."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Mapping, Optional

from .._contract.document import undamaged
from .._contract.run_folder import PLAN
from .._kit.files import read_object
from .effort import Effort, busy_share, read_effort
from .find import find_run_dir
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


def run_info(
    run_dir: Optional[str] = None,
    base_dir: str = "",
    run: Optional[str] = None,
    with_model: bool = False,
    rank: Optional[int] = None,
    lines: int = 10,
    plan: bool = False,
    wait: Optional[Mapping[str, Any]] = None,
) -> Dict[str, object]:
    """The state of a host's share of a run, and on request its plan (empty if missing, torn or edited).

    run_dir, or run (or the newest) below base_dir, selects it; with_model: the newest that has a checkpoint. wait: the state and step that
    the caller knows, at_least and timeout in seconds; the answer comes as soon as there is news.
    """
    run_dir = find_run_dir(run_dir, base_dir, run, with_model)
    if run_dir is None:
        return {"run": EMPTY, "plan": {}} if plan else {"run": EMPTY}
    folder, first = run_dir, read_effort(run_dir, rank)
    if wait:
        wait_for_news(lambda: read_run(folder, rank, lines=0, limit=PEEK_BYTES), wait)
    seen = read_run(folder, rank, lines=lines)
    _measure_busy(seen, first)
    deployed = {"plan": undamaged(read_object(os.path.join(folder, PLAN)))} if plan else {}
    return {"run": seen, **deployed}
