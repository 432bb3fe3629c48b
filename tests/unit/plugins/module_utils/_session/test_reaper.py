# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is asked first to end, and whom a signal reaches; tests/integration ends real sessions."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._session import reaper


def one(pid, ppid, worker=False):
    return processes.Process(pid, ppid, 1000, 100, "S", ("python",), "python", None, worker)


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
