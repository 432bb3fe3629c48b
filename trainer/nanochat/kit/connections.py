# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""This process's TCP connections, including those of libraries, and their pacing: no long queue forms on a slow link, in which ssh
and the keepers would wait.

A connection's round trip minus its shortest one is the time that its packets spend in queues. While that is long, a
connection sends less than the link lets through, and the queue drains; otherwise it speeds up again. One that never
meets a long queue is not paced.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SO_MAX_PACING_RATE = 47  # constant of Linux, missing from Python's socket
MOST = 2**31 - 1  # the largest rate that setsockopt takes
# In struct tcp_info of linux/tcp.h, all in microseconds or bytes (per second).
INFO_BYTES, ROUND_TRIP, ACKED, SHORTEST, DELIVERED = 168, 68, 120, 148, 160
EVERY_SECONDS = 1.0
LONG_SECONDS = 0.1  # of a queue: typing over ssh still feels direct
DRAIN_SECONDS = 4.0  # in which a queue drains
FASTER = 1.1  # each second without a long queue
# Of the best rate so far: other traffic may fill the queue, and must not stop us.
LEAST_SHARE = 0.7

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


class ConnectionState(NamedTuple):
    """What the kernel knows of a connection: seconds, and bytes (per second)."""

    round_trip: float
    shortest: float
    acked: int
    delivered: float

    @property
    def queue(self) -> float:
        """Seconds that packets spend in queues."""
        return self.round_trip - self.shortest


class Pace(NamedTuple):
    """A connection's rate, the best that was delivered, and what the last look saw."""

    rate: float = math.inf
    best: float = 0.0
    acked: int = 0
    delivered: float = 0.0


def next_pace(pace: Pace, seen: ConnectionState, queueing: int) -> Pace:
    """The pace after another look; queueing: the connections that lately met a long queue."""
    # Short bursts seem faster than the link, but not twice in a row.
    best = max(pace.best, min(pace.delivered, seen.delivered))
    if seen.acked == pace.acked or not best:
        # Nothing was sent, so the round trip is old; or this is the first look.
        rate = pace.rate
    elif seen.queue > LONG_SECONDS:
        # With a queue, the link delivers all it can.
        drains = seen.delivered * (1 - seen.queue / DRAIN_SECONDS)
        rate = max(min(pace.rate, drains), LEAST_SHARE * best / queueing)
    else:
        rate = FASTER * pace.rate
    return Pace(rate, best, seen.acked, seen.delivered)


def seen_of(one: socket.socket) -> ConnectionState:
    """What the kernel knows of a connection."""
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    (round_trip,), (shortest,) = (struct.unpack_from("=I", info, at) for at in (ROUND_TRIP, SHORTEST))
    (acked,), (delivered,) = (struct.unpack_from("=Q", info, at) for at in (ACKED, DELIVERED))
    return ConnectionState(round_trip / 1e6, shortest / 1e6, acked, float(delivered))


class Pacer:
    """The paces of all connections."""

    def __init__(self) -> None:
        self.paces: dict[Ends, Pace] = {}
        self.queueing = 1  # connections that met a long queue at the last look

    def look(self) -> None:
        """Look at all connections, and change their paces."""
        queueing, paces = 0, {}
        for one in connections():
            with contextlib.suppress(OSError, struct.error):
                ends, seen = ends_of(one), seen_of(one)
                queueing += seen.queue > LONG_SECONDS
                before = self.paces.get(ends, Pace())
                paces[ends] = pace = next_pace(before, seen, self.queueing)
                if pace.rate != before.rate:
                    one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(min(MOST, pace.rate)))
        # Closed connections are forgotten.
        self.paces, self.queueing = paces, max(1, queueing)


def start_pacing() -> None:
    """Pace all connections from now on, in a thread."""

    def work() -> None:
        pacer = Pacer()
        while True:
            time.sleep(EVERY_SECONDS)
            pacer.look()

    threading.Thread(target=work, name="pacing", daemon=True).start()
