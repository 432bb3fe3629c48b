# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rendezvous store that all ranks share, queried with a timeout.

torch's store client waits forever if the store's host is frozen or cut off. So every query
runs in a thread that can be abandoned.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
GRACE_SECONDS = 0.5


class StoreSilent(RuntimeError):
    """The store did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    """Make a call whose caller may no longer wait."""
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(call())
        # The caller must see any error; otherwise it would wait in vain.
        except BaseException as error:
            answer.set_exception(error)


def _result(answer: Future[T], seconds: float) -> T:
    # A caller that was suspended finds its time over, and the answer a moment later.
    if not (futures.wait([answer], seconds).done or futures.wait([answer], GRACE_SECONDS).done):
        answer.cancel()
        raise StoreSilent(seconds)
    return answer.result()


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result or exception, if it comes in time."""
    answer: Future[T] = Future()
    threading.Thread(target=_answer, args=(answer, call), name="rendezvous", daemon=True).start()
    return _result(answer, seconds)


class Rendezvous:
    """A store, and the thread that queries it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    def _serve(self) -> None:
        while True:
            _answer(*self._calls.get())

    def ask(self, seconds: float, call: Callable[[Store], T]) -> T:
        """The result of the call on the store; StoreSilent on timeout."""
        answer: Future[T] = Future()
        self._calls.put((answer, lambda: call(self.store)))
        return _result(answer, seconds)
