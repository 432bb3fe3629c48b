# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A process that outlives the module that forks it, such as a server; and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Callable, Sequence

from .processes import alive, start_ticks


def spawn(name: str, sockets: Sequence[socket.socket], work: Callable[[], None]) -> tuple[int, int]:
    """Fork twice, so that the process has no parent and leaves no zombie; returns its pid and start, which come through a pipe.

    It has this name and these sockets, and ends with the work. Raises OSError if it could not be started.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                os.write(writing, f"{os.getpid()} {start_ticks(os.getpid())}".encode())
                _detach(name, [one.fileno() for one in sockets])
                work()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read().split()
    if len(words) != 2:
        raise OSError(None, "the process could not be started", name)
    return int(words[0]), int(words[1])


def _detach(name: str, keep: Sequence[int]) -> None:
    """Set the name and close the connection that started us, which would otherwise wait for our exit."""
    os.chdir("/")
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(name)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(descriptor)


def end(pid: int, started: int, patience: float = 2.0) -> bool:
    """End exactly this process; whether it ran."""
    if not alive(pid, started):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while alive(pid, started) and time.monotonic() < deadline:
            time.sleep(0.01)
        if alive(pid, started):
            os.kill(pid, signal.SIGKILL)
    return True
