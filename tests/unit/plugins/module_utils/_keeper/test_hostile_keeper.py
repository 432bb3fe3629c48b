# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A keeper that knows the secret, but says nonsense: over real sockets, it is as silent to the others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership, talk, wire
from ansible_collections.nanochat.ddp.tests.integration.local import free_port, until

SECRET = "s" * 40
RULES = membership.Rules(("desktop", "laptop"), 1, 30.0, 300.0)
TRUE: dict[str, Any] = {
    "state": "training", "generation": [3, ["desktop", "laptop"]], "promised": 3, "steps": 7, "hears": ["laptop"], "why": "x",
}  # fmt: skip


@pytest.fixture
def hear():
    """`hear(**changes)`: the laptop's answer from a desktop that says this."""
    desktop, laptop = (talk.KeeperAddress(host, "127.0.0.1", free_port()) for host in RULES.hosts)
    talks = [talk.Messenger(desktop, (laptop,), SECRET, "1"), talk.Messenger(laptop, (desktop,), SECRET, "1")]
    talks[0].start()

    def say(**changes: Any) -> talk._Answer:
        word = {**json.loads(wire.to_text(membership.Word("desktop"))), **TRUE, **changes}
        talks[0]._said = (time.monotonic(), json.dumps(word))
        return until(lambda: (answer := talks[1]._hear(desktop)) and "no keeper" not in answer.silent and answer, 60)

    yield say
    for one in talks:
        one.close()


def test_a_word_of_an_honest_keeper_is_taken(hear):
    for generation in ([3, ["desktop", "laptop"]], [3, ["desktop"]], None):
        word = hear(generation=generation).word
        assert (word.steps, word.generation and word.generation.number) == (7, generation and 3)
    # Of one that has lost its memory.
    assert hear(promised=int(time.time()) + 600).word.promised > 1.7e9


HOSTILE: list[dict[str, Any]] = [
    {"host": "elsewhere"}, {"generation": [3, ["desktop", "../../x"]]}, {"generation": [3, []]}, {"generation": [3, ["laptop", "laptop"]]},
    {"generation": [-1, ["laptop"]]}, {"generation": [10**400, ["laptop"]]}, {"generation": [3, [["laptop"]]]}, {"promised": "9"},
    {"generation": [2.5, ["laptop"]]}, {"generation": 5}, {"generation": 0}, {"last": [10**30, ["laptop"]]}, {"last": [3, ["elsewhere"]]},
    {"last": [2**53 - 1, ["laptop"]]}, {"promised": 2**53 - 1}, {"promised": 2 * 10**9 + 10**8}, {"crashed": 2**52}, {"missed": 2**52},
    {"regroup": 2**52}, {"outranked": 2**52}, {"promised": 1e308}, {"promised": True}, {"steps": None}, {"steps": -5}, {"go": "yes"},
    {"hears": ["elsewhere"]}, {"hears": [{}]}, {"hears": [1]}, {"left": [None]}, {"why": "x" * 10**4}, {"why": 5}, {"state": ["idle"]},
    {"state": "king"},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda change: ascii(change)[:60])
def test_a_word_that_cannot_be_is_as_none(hear, changes):
    answer = hear(**changes)
    assert (answer.word, answer.silent) == (None, "desktop sent an invalid answer")


def test_the_highest_promise_that_is_believed_leaves_numbers_for_the_others():
    """Who numbers above it is heard again as soon as the clock has gone on by as many seconds."""
    now = 1.8e9
    lie = membership.Word("desktop", promised=int(now) + wire.AHEAD_SECONDS)
    assert wire.to_word(wire.to_text(lie), RULES.hosts, now) == lie
    number = membership.next_number(RULES, membership.OwnState(membership.Word("laptop")), {"desktop": lie})
    honest = membership.Word("laptop", promised=number, generation=membership.Generation(number, ("laptop",)))
    assert wire.to_word(wire.to_text(honest), RULES.hosts, now + len(RULES.hosts)) == honest
