# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The last words of an interrupted play."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from ansible_collections.nanochat.ddp.plugins.callback.story import Story


def test_a_second_interrupt_does_not_take_the_last_words_away():
    told: list[str] = []
    heard: list[int] = []

    def say(text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        told.append(text)

    terminal = SimpleNamespace(leave=lambda: True, say=say, quiet=False)
    story: Any = SimpleNamespace(_terminal=terminal, _run=SimpleNamespace(unfinished=True))
    before = signal.signal(signal.SIGINT, lambda number, dummy: heard.append(number))
    try:
        Story._at_exit(story)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told[0].startswith("Training continues in the background")
    assert not heard
