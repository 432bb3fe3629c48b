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
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
GRACE_SECONDS = 0.5


class StoreSilent(RuntimeError):
    """The store did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


class _Question:
    """A call for the thread, and its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.done = call, threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.abandoned = False

    def answer(self) -> None:
        if self.abandoned:
            return
        try:
            self.value = self.call()
        # The caller must see any error; otherwise it would wait in vain.
        except BaseException as error:
            self.error = error
        self.done.set()

    def wait(self, seconds: float) -> Any:
        # A caller that was suspended finds its time over, and the answer a moment later.
        if not self.done.wait(seconds) and not self.done.wait(GRACE_SECONDS):
            self.abandoned = True
            raise StoreSilent(seconds)
        if self.error is not None:
            raise self.error
        return self.value


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result or exception, if it comes in time."""
    question = _Question(call)
    threading.Thread(target=question.answer, name="rendezvous", daemon=True).start()
    answer: T = question.wait(seconds)
    return answer


class Rendezvous:
    """A store, and the thread that queries it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._questions: queue.SimpleQueue[_Question] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="rendezvous", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._questions.get().answer()

    def ask(self, seconds: float, call: Callable[[Store], T]) -> T:
        """The result of the call on the store; StoreSilent on timeout."""
        question = _Question(lambda: call(self.store))
        self._questions.put(question)
        answer: T = question.wait(seconds)
        return answer
