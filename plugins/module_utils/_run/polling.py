# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run, at once or when there is news, and measures the work of a rank's processes.

Their work is CPU time, time spent ready to run without a core, and bytes read from disk. Waiting for a core counts as much as using one:
on a machine with twenty busy processes a rank gets a tenth of a core and still works. So does a rank that loads its libraries from a slow
disk.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

from .._contract.document import Document, undamaged
from .._contract.run_folder import PLAN
from .._kit import processes
from .._kit.files import paths_in, read_object, read_text
from .find import find_rank, find_run_dir
from .metrics import PEEK_BYTES
from .state import EMPTY, ENDED, RUNNING, RunState, read_run

PEEK_SECONDS = 0.5
BUSY_SECONDS = 1.0  # CPU use is measured over this time if there was no progress for IDLE_SECONDS
IDLE_SECONDS = 10.0
READING = 1e5  # bytes per second from disk; a rank that waits for others never reads this much


class Effort(NamedTuple):
    """Work of a rank's processes so far in seconds, the time of the reading, and bytes read from disk."""

    at: float
    seconds: float
    read: int = 0


def effort_of(session: Document, heartbeat: Document, proc: str = "/proc") -> Optional[Effort]:
    """Work of the session's child, its descendants and the process with the heartbeat; None if there are none."""
    roots = [pid for pid in (session.get("child_pid"), heartbeat.get("pid")) if isinstance(pid, int)]
    pids = {*roots, *processes.descendants(processes.parents_of_all(proc), roots)} if roots else set()
    found = [sum(seconds) for pid in pids for seconds in core_seconds(pid, proc)]
    return Effort(time.monotonic(), sum(found), sum(_bytes_read(proc, pid) for pid in pids)) if found else None


def busy_share(first: Optional[Effort], second: Optional[Effort]) -> Optional[float]:
    """Work between two readings as a fraction of one core; a process that reads from disk counts as fully busy."""
    if first is None or second is None or second.at <= first.at:
        return None
    share = max(0.0, second.seconds - first.seconds) / (second.at - first.at)
    reads = second.read - first.read >= READING * (second.at - first.at)
    return round(max(share, 1.0 if reads else 0.0), 3)


def core_seconds(pid: int, proc: str = "/proc") -> Iterator[Tuple[float, float]]:
    """Of each thread, the seconds on a core, and those ready to run without one, which not every kernel counts."""
    for thread in paths_in(os.path.join(proc, str(pid), "task")):
        fields = read_text(os.path.join(thread, "schedstat")).split()
        ticks = [] if len(fields) > 1 else read_text(os.path.join(thread, "stat")).rpartition(")")[2].split()
        if len(fields) > 1:
            yield int(fields[0]) / 1e9, int(fields[1]) / 1e9
        elif len(ticks) > 12:
            yield (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK"), 0.0


def _bytes_read(proc: str, pid: int) -> int:
    """Bytes that a process has read from disk; 0 if the kernel does not report it."""
    found = re.search(r"^read_bytes: (\d+)$", read_text(os.path.join(proc, str(pid), "io")), re.M)
    return int(found.group(1)) if found else 0


def read_effort(run_dir: str, rank: Optional[int]) -> Optional[Effort]:
    """Work of the rank's processes so far; None if there are none."""
    session = read_object(os.path.join(run_dir, "session.json"))
    if session.get("ended") is not None:
        return None
    rank = find_rank(run_dir, {}, session) if rank is None else rank
    return effort_of(session, read_object(os.path.join(run_dir, "heartbeat-rank%d.json" % (rank or 0))))


def _measure_busy(run: RunState, first: Optional[Effort]) -> None:
    """The fraction of a core that a running rank uses since the first reading; waits a moment if that was just now and matters."""
    if run["state"] != RUNNING or first is None or run["run_dir"] is None:
        return
    left = BUSY_SECONDS - (time.monotonic() - first.at)
    idle = run["idle_seconds"]
    if left > 0 and (idle is None or idle > IDLE_SECONDS):
        time.sleep(left)
        left = 0.0
    if left <= 0:
        run["busy"] = busy_share(first, read_effort(run["run_dir"], run["rank"]))


def wait_for_news(peek: Callable[[], RunState], wait: Mapping[str, Any]) -> None:
    """Return once the state differs from the caller's, or (after at_least seconds) the step, or after the timeout.

    A check costs about half a millisecond; more than two a second would help nobody, and than one where only the end would be news.
    """
    begun = time.monotonic()
    run = peek()
    while run["state"] == wait["state"] and run["state"] not in ENDED and time.monotonic() - begun < wait["timeout"]:
        waited = time.monotonic() - begun
        if run["step"] != wait["step"] and waited >= wait["at_least"]:
            return
        time.sleep(PEEK_SECONDS if waited + 2 * PEEK_SECONDS > wait["at_least"] else 2 * PEEK_SECONDS)
        run = peek()


def run_info(
    run_dir: Optional[str] = None,
    base_dir: str = "",
    run: Optional[str] = None,
    with_model: bool = False,
    rank: Optional[int] = None,
    lines: int = 10,
    plan: bool = False,
    wait: Optional[Mapping[str, object]] = None,
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
