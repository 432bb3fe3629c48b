# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes that only compute, for tests on a busy machine."""

from __future__ import annotations

import subprocess
import sys

# Also ends if the test is killed.
SPIN = """
import os, sys, time
end, parent = time.monotonic() + float(sys.argv[1]), os.getppid()
while time.monotonic() < end and os.getppid() == parent:
    sum(range(100_000))
"""


class Load:
    """This many processes, which end after this many seconds, or with end()."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        argv = [sys.executable, "-S", "-c", SPIN, str(self.seconds)]
        self.processes = [subprocess.Popen(argv) for dummy in range(self.count)]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
