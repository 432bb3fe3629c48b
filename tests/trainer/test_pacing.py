# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections that share a slow link are paced until its queue is short; tests/integration/test_saturated_link.py has a real one."""

from __future__ import annotations

import itertools
import socket

import pytest

from nanochat.kit import connections
from nanochat.kit.connections import LEAST_SHARE, SO_MAX_PACING_RATE, ConnectionState, Pace, Pacer, next_pace

LINK = 125_000.0  # bytes per second
FULL = 2.0  # seconds of its queue when it is full
SHORTEST = 0.01


def share_link(count: int, others: float = 0.0, seconds: int = 120) -> list[tuple[float, float]]:
    """Queue and bytes delivered, second by second, if connections send all that their pace allows; others: bytes per second of
    other traffic, which is not paced."""
    paces, queue, course = [Pace()] * count, 0.0, []
    for second in range(1, seconds):
        wanted = [min(pace.rate, LINK) for pace in paces]
        # Above the link's rate, each gets its share and the rest waits.
        sent = sum(wanted) + others
        queue = min(FULL, max(0.0, queue + sent / LINK - 1))
        full = queue > 0 or sent > LINK
        delivered = [LINK * one / sent if full else one for one in wanted]
        queueing = count if queue > connections.LONG_SECONDS else 1
        looks = [ConnectionState(SHORTEST + queue, SHORTEST, second, one) for one in delivered]
        paces = [next_pace(pace, seen, queueing) for pace, seen in zip(paces, looks, strict=True)]
        course.append((queue, sum(delivered)))
    return course


def test_a_queue_becomes_short_and_the_link_stays_in_use() -> None:
    for count in (1, 2, 9):
        late = share_link(count)[60:]
        assert max(queue for queue, dummy in late) < 0.5, count
        assert sum(sent for dummy, sent in late) / len(late) > 0.85 * LINK, count


def test_other_traffic_that_fills_the_queue_does_not_stop_us() -> None:
    queue, sent = share_link(1, others=LINK)[-1]
    assert queue == FULL
    assert sent > LINK / 4


def test_an_idle_connection_keeps_its_pace() -> None:
    before = Pace(rate=1000.0, best=LINK, acked=7, delivered=LINK)
    assert next_pace(before, ConnectionState(SHORTEST + FULL, SHORTEST, 7, LINK), 1) == before


def test_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there = server.accept()[0]
        client.sendall(b"x" * 1000)
        assert there.recv(1000)
        seen = connections.seen_of(client)
        assert 0 < seen.shortest <= seen.round_trip + 0.01 < 5 and seen.acked >= 1000 and seen.delivered > 0
        acked = itertools.count()
        monkeypatch.setattr(connections, "seen_of", lambda dummy: ConnectionState(2.1, 0.1, next(acked), LINK))
        listening = server.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)
        pacer = Pacer()
        pacer.look()
        pacer.queueing = 1
        pacer.look()
        assert client.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == LEAST_SHARE * LINK
        assert server.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == listening
        # Without a queue it speeds up again until it has no limit.
        monkeypatch.setattr(connections, "seen_of", lambda dummy: ConnectionState(0.1, 0.1, next(acked), LINK))
        for ends, pace in pacer.paces.items():
            pacer.paces[ends] = pace._replace(rate=1.7e308)
        pacer.look()
        assert client.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == connections.MOST
        there.close()
