# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Forks ranks without restarting Python and PyTorch: the keeper's side of trainer/scripts/preloaded.py."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from typing import Dict, List, Optional, Sequence, Tuple

from .._kit import processes

# Exit code of a rank whose preloaded trainer was killed or hangs.
LOST = -int(signal.SIGKILL)
TELL_SECONDS = 1.0


class PreloadedTrainer:
    """A process that forks this host's ranks, one at a time; `poll` and `wait` refer to the rank, like a Popen."""

    def __init__(self, python: str, modules: Sequence[str]) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([python, "-m", "scripts.preloaded", *modules], stdin=theirs.fileno())  # pylint: disable=ansible-bad-function
        self._link.setblocking(False)
        self._code: Optional[int] = LOST

    def runner(self) -> Optional[Tuple[int, int]]:
        """Pid and start time; None if it is gone."""
        if self._process.poll() is not None:
            return None
        return self._process.pid, processes.start_ticks(self._process.pid)

    def start(self, words: List[str], environ: Dict[str, str]) -> bool:
        """Request a rank; False if impossible now."""
        if self._process.poll() is not None:
            return False
        try:
            self._link.sendall(json.dumps({"argv": words, "env": environ}).encode() + b"\n")
        except OSError:
            return False
        self._code = None
        return True

    def poll(self) -> Optional[int]:
        """The rank's exit code; None while it runs."""
        if self._code is None:
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                answer = self._link.recv(64)
                self._code = int(answer) if answer else LOST
            if self._code is None and self._process.poll() is not None:
                self._code = LOST
        return self._code

    def wait(self) -> int:
        """The exit code of an ended rank; a preloaded trainer that does not report it is killed."""
        until = time.monotonic() + TELL_SECONDS
        while self.poll() is None:
            if time.monotonic() > until:
                self._process.kill()
                self._process.wait()
            time.sleep(0.01)
        return LOST if self._code is None else self._code

    def close(self) -> None:
        """Let it exit after its rank."""
        self._link.close()
