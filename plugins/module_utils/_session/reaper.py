# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds a session's processes and ends them: gently, then by force, and never anybody else's.

A process belongs to a session if it descends from the session's runner, or has the session's id in its environment
(one that left its parents, or outlived a killed runner). Names and command lines are never used. A signal
reaches only the intended process: through a pidfd if Python supports it, and after a last check of
its start tick.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, NamedTuple

from .._kit import processes as processes_utils

# Time for a process to die from SIGTERM after its chance to save, and from SIGKILL.
TERM_SECONDS = 5.0
KILL_SECONDS = 5.0
_POLL_SECONDS = 0.05


class SessionIdentity(NamedTuple):
    """Identifies a session's processes on this host, in this boot."""

    id: str
    uid: int
    runner: tuple[int, int] | None = None  # pid and start; None if the runner is known to be gone


def runner_alive(session: SessionIdentity) -> bool:
    """Whether this session's runner still runs."""
    return session.runner is not None and processes_utils.alive(*session.runner)


def members(session: SessionIdentity) -> dict[int, processes_utils.Process]:
    """The session's live processes by pid, without its runner."""
    table = processes_utils.processes()
    roots = {pid for pid, one in table.items() if (one.marker, one.uid) == (session.id, session.uid)}
    roots |= {pid for pid, one in table.items() if (pid, one.start) == session.runner}
    found = (roots | processes_utils.descendants({pid: one.ppid for pid, one in table.items()}, roots)) - own_line(
        table
    )
    if session.runner is not None:
        found.discard(session.runner[0])
    return {pid: table[pid] for pid in found if table[pid].state not in ("Z", "X")}


def gentle_targets(tree: dict[int, processes_utils.Process]) -> list[processes_utils.Process]:
    """Processes to ask first, so that those waiting for them see them exit by themselves.

    These are the ranks, if any: torchrun's agent above them would kill them before they saved,
    and the helpers below them cannot save. Otherwise they are the leaves of the tree.
    """
    workers = [one for one in tree.values() if one.worker and not (one.ppid in tree and tree[one.ppid].worker)]
    if workers:
        return workers
    parents = {one.ppid for one in tree.values()}
    return [one for one in tree.values() if one.pid not in parents]


def send(target: processes_utils.Process, number: int) -> None:
    """Signal this process, not one that reused its pid; skips processes that are gone or not ours to signal."""
    descriptor = None
    try:
        if hasattr(os, "pidfd_open"):
            descriptor = os.pidfd_open(target.pid)
        if not processes_utils.alive(target.pid, target.start):
            return
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(target.pid, number)
    except OSError:
        return
    finally:
        if descriptor is not None:
            os.close(descriptor)


def end(
    session: SessionIdentity,
    grace: float,
    hurry: Callable[[], bool] = lambda: False,
    term: float = TERM_SECONDS,
) -> dict[int, processes_utils.Process]:
    """End all processes of the session except its runner, and return the remaining ones.

    First the gentle targets get a signal and `grace` seconds, then all get one and `term` seconds, then all are killed.
    `hurry` cuts the grace short.
    """
    tree = members(session)
    for one in gentle_targets(tree):
        _ask(one)
    tree = _wait(session, grace, hurry)
    for one in tree.values():
        _ask(one)
    if tree:
        tree = _wait(session, term)
    deadline = time.monotonic() + KILL_SECONDS
    while tree and time.monotonic() < deadline:
        # Repeat, because a dying tree may still spawn processes.
        for one in tree.values():
            send(one, signal.SIGKILL)
        tree = _wait(session, 4 * _POLL_SECONDS)
    return tree


def _ask(one: processes_utils.Process) -> None:
    send(one, signal.SIGTERM)
    # A stopped process would not receive it.
    if one.state in ("T", "t"):
        send(one, signal.SIGCONT)


def _wait(
    session: SessionIdentity, seconds: float, hurry: Callable[[], bool] = lambda: False
) -> dict[int, processes_utils.Process]:
    """Wait until the session has no members, `hurry` returns true, or time is up; returns the members left."""
    deadline = time.monotonic() + seconds
    known: dict[int, processes_utils.Process] = {}
    while True:
        # Scan all of /proc only when the known ones have ended: the scan takes CPU time that they need to exit.
        known = {pid: one for pid, one in known.items() if processes_utils.alive(pid, one.start)} or members(session)
        if not known:
            return known
        if hurry() or time.monotonic() >= deadline:
            return members(session)
        time.sleep(_POLL_SECONDS)


def own_line(table: dict[int, processes_utils.Process]) -> set[int]:
    """This process and its ancestors: a command must not stop the session that it runs in."""
    line: set[int] = set()
    pid = os.getpid()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].ppid
    return line
