# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A link with a delay for kernels whose tc has none (no netem): what enters one tun interface leaves the other a while later."""

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
# Large packets, so that handing them on costs the nodes' cores little; and how many bytes are read at once.
MTU, LARGEST = 9000, 2**16
LOOK_SECONDS = 0.2  # after so long without a packet it is seen that the link is no longer wanted


def open_tun(name: str) -> int:
    """Make an interface; it is there as long as what is returned is open, also when it was moved to another namespace."""
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


def hand_on(ends: Sequence[int], seconds: float, over: threading.Event) -> None:
    """Write every packet that is read from one end to the other one so many seconds later, until it is over."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, int, bytes]] = deque()
    while not over.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            dummy, end, packet = waiting.popleft()
            # An interface that is not up yet takes nothing, as where no cable is plugged in.
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
    """Two interfaces of these names, joined by a link that takes so many seconds one way."""
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
