# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Queries of the rendezvous store that all ranks share, with a timeout.

torch's store client waits forever if the store's host is frozen or cut off. So every query runs in a thread that can be abandoned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
GRACE_SECONDS = 0.5


class StoreSilent(RuntimeError):
    """The store did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result or exception; StoreSilent if it takes too long."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        # The caller must see any error; otherwise it would wait in vain.
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="rendezvous", daemon=True).start()
    # A caller that was suspended finds its time over, and the answer a moment later.
    if not (futures.wait([answer], seconds).done or futures.wait([answer], GRACE_SECONDS).done):
        raise StoreSilent(seconds)
    return answer.result()
