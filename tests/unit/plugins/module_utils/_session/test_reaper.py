# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which processes the end of a session reaches; tests/integration ends real sessions."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._session import reaper

SESSION = reaper.SessionIdentity("ours", 1000, (10, 100))


def one(pid, ppid=1, uid=1000, marker=None, worker=False, state="S", start=100):
    return processes.Process(pid, ppid, uid, start, state, ("python",), "python", marker, worker)


@pytest.fixture
def members(monkeypatch):
    """The pids of the members among the given processes."""

    def find(session, *table):
        monkeypatch.setattr(processes, "processes", lambda: {entry.pid: entry for entry in table})
        return sorted(reaper.members(session))

    return find


FAMILY = [one(10), one(11, 10), one(12, 11, uid=0), one(20, 1, marker="ours"), one(21, 20), one(30), one(31, 30)]
STRANGERS = [one(20, marker="ours", uid=1001), one(21, marker="theirs"), one(22, marker="ours2"), one(23)]
TABLES = {
    "descendants of the runner and processes with its id": (FAMILY, [11, 12, 20, 21]),
    "no strangers": ([one(10), *STRANGERS], []),
    "nothing below another process with the runner's pid": ([one(10, start=101), one(11, 10)], []),
    "no dead process": ([one(10), one(11, 10, state="Z"), one(12, 10)], [12]),
    "not the process that asks, nor its ancestors": ([one(10), one(11, 10), one(os.getpid(), 11), one(13, 11)], [13]),
}


@pytest.mark.parametrize(("table", "found"), TABLES.values(), ids=TABLES)
def test_the_members_of_a_session_are(members, table, found):
    assert members(SESSION, *table) == found


@pytest.mark.parametrize(
    "tree, targets",
    [
        ([one(11, 10), one(12, 11), one(13, 12), one(14, 11)], [13, 14]),
        ([one(11, 10), one(12, 11, worker=True), one(13, 12, worker=True), one(14, 11)], [12]),
        ([one(11, 10), one(12, 11, worker=True), one(13, 11, worker=True)], [12, 13]),
        ([], []),
    ],
)
def test_those_who_can_save_are_asked_first(tree, targets):
    assert sorted(entry.pid for entry in reaper.gentle_targets({entry.pid: entry for entry in tree})) == targets


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("descriptors", [True, False], ids=["pidfd", "kill"])
def test_a_signal_goes_to_the_process_that_was_looked_at_or_to_nobody(child, monkeypatch, descriptors):
    if not descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    target = processes.process(child.pid)

    reaper.send(target._replace(start=target.start - 1), signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.1)

    reaper.send(target, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    reaper.send(target, signal.SIGKILL)  # nobody has the pid any more, and that is no error
