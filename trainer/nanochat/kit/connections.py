# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""This process's TCP connections, including those of libraries."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Ends = tuple[tuple[Any, ...], tuple[Any, ...]]


def all_ends() -> set[Ends]:
    """The two addresses of each connection."""
    found = set()
    for one in connections():
        with contextlib.suppress(OSError):
            found.add(ends_of(one))
    return found


def ends_of(one: socket.socket) -> Ends:
    """The two addresses of a connection."""
    return one.getsockname(), one.getpeername()


def connections() -> Iterator[socket.socket]:
    """A duplicate of each connection to another host or process; closed afterwards."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError, ValueError):
            if entry.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    # Listening sockets are left alone, because their thread would die.
                    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if one.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        yield one
