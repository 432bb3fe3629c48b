# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A keeper that knows the secret, but sends invalid messages."""

from __future__ import annotations

import json
import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import keeper, membership, talk
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.plausible import is_plausible

RULES = membership.Rules(("a", "b", "c"), 1, 30.0, 300.0)
TRUE: dict[str, Any] = {
    "host": "b",
    "state": "training",
    "generation": [3, ["a", "b"]],
    "promised": 3,
    "steps": 7,
    "hears": ["a"],
    "why": "x",
}


def said(**changes: Any) -> membership.Word:
    """A word as it comes over the network."""
    word = {**json.loads(talk.to_text(membership.Word("b"))), **TRUE, **changes}
    return talk.to_word(json.dumps(word))


def test_a_word_of_an_honest_keeper_is_taken():
    for generation in ([3, ["a", "b"]], [3, ["b"]], None):
        assert is_plausible(said(generation=generation), RULES.hosts)


HOSTILE: list[dict[str, Any]] = [
    {"host": "elsewhere"}, {"generation": [3, ["a", "../../x"]]}, {"generation": [3, []]}, {"generation": [3, ["b", "b"]]},
    {"generation": [-1, ["b"]]}, {"generation": [10**400, ["b"]]}, {"generation": [3, [["b"]]]}, {"promised": "9"}, {"promised": 1e308},
    {"last": [10**30, ["b"]]}, {"last": [3, ["elsewhere"]]},
    {"promised": True}, {"steps": None}, {"steps": -5}, {"go": "yes"}, {"hears": ["elsewhere"]}, {"hears": [{}]},
    {"left": [None]}, {"why": "x" * 10**5}, {"why": 5}, {"state": ["idle"]},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda change: ascii(change)[:60])
def test_a_word_that_cannot_be_is_as_none(changes):
    heard: queue.Queue[membership.Word] = queue.Queue()
    heard.put(said(**changes))
    heard.put(said(host="c"))
    honest = SimpleNamespace(talk=SimpleNamespace(heard=heard), rules=RULES, heard={})
    keeper.Keeper._hear(honest, 0.1)
    assert set(honest.heard) == {"c"}
    # The remaining messages do not crash the decision.
    membership.decide(RULES, membership.OwnState(membership.Word("a")), honest.heard, time.monotonic())
