# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measures the work of real processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.polling import Effort, busy_share, effort_of

SPIN = "import time\nprint(flush=True)\nwhile time.monotonic() < {until}: pass"


def child(code: str) -> subprocess.Popen[bytes]:
    """A process whose child runs the code, as torchrun's agent has the trainer below it."""
    parent = f"import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    begun = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert begun.stdout is not None and begun.stdin is not None
    begun.stdout.readline()
    return begun


@pytest.mark.parametrize(("code", "works"), [(SPIN, True), ("print(flush=True)\ninput()", False)])
def test_a_process_that_computes_is_told_from_one_that_waits(code: str, works: bool) -> None:
    process = child(code.format(until=time.monotonic() + 60))
    try:
        first = effort_of({"child_pid": process.pid}, {})
        time.sleep(1.0)
        share = busy_share(first, effort_of({"child_pid": process.pid}, {}))
        # However many others want the cores: what it waits for one counts as well.
        assert share is not None and (share > 0.5) is works
    finally:
        if works:
            for pid in children(process.pid):
                os.kill(pid, 9)
        process.communicate(b"\n")


def children(pid: int) -> list[int]:
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(word) for word in told.stdout.split()]


def test_without_processes_nothing_is_known() -> None:
    assert effort_of({}, {}) is None
    assert effort_of({"child_pid": 2**22 + 1}, {"pid": None}) is None
    assert busy_share(None, Effort(1.0, 1.0)) is None
    assert busy_share(Effort(1.0, 5.0), Effort(3.0, 4.0)) == 0.0


def test_reading_from_a_disk_counts_as_work() -> None:
    assert busy_share(Effort(1.0, 5.0, 0), Effort(2.0, 5.0, 3 * 10**6)) == 1.0
    assert busy_share(Effort(1.0, 5.0, 100), Effort(2.0, 5.0, 4196)) == 0.0


def test_a_kernel_without_figures_of_its_scheduler_counts_ticks(tmp_path: Path) -> None:
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    ticks = os.sysconf("SC_CLK_TCK")
    (task / "stat").write_text(f"7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 {3 * ticks} {ticks} 0 0 20 0 1 0 100 0 0\n")
    (tmp_path / "7" / "io").write_text("rchar: 9\nread_bytes: 4096\n")
    found = effort_of({"child_pid": 7}, {}, str(tmp_path))
    assert found is not None and (found.seconds, found.read) == (4.0, 4096)
