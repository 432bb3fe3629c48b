# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A delayed link for kernels without netem: packets entering one tun interface leave the other later."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

DEVICE = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # of linux/if_tun.h
# Large packets, so that forwarding costs the nodes' cores little; and the size of a read.
MTU, LARGEST = 9000, 2**16
LOOK_SECONDS = 0.2  # without packets, check this often whether the link is still needed


def open_tun(name: str) -> int:
    """Make an interface that exists while the returned file is open, even if moved to another namespace."""
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


def hand_on(ends: Sequence[int], seconds: float, over: threading.Event) -> None:
    """Forward every packet from one end to the other after a delay, until stopped."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, int, bytes]] = deque()
    while not over.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            dummy, end, packet = waiting.popleft()
            # An interface that is down drops packets, like an unplugged cable.
            with contextlib.suppress(OSError):
                os.write(end, packet)
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else LOOK_SECONDS
        for end in select.select(ends, [], [], pause)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(end, LARGEST)
                    waiting.append((time.monotonic() + seconds, other[end], packet))


@contextlib.contextmanager
def delayed(names: Sequence[str], seconds: float) -> Iterator[None]:
    """Two interfaces with these names, joined by a link with this one-way delay in seconds."""
    ends = [open_tun(name) for name in names]
    over = threading.Event()
    relay = threading.Thread(target=hand_on, args=(ends, seconds, over), daemon=True)
    relay.start()
    try:
        yield
    finally:
        over.set()
        relay.join()
        for end in ends:
            os.close(end)
