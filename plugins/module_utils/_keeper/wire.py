# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A keeper's word as text, and the only reader of others' words: signed by a host of the run, they may still be nonsense."""

from __future__ import annotations

import json
from typing import Any, Collection

from .._contract import keeper_states as states
from . import membership

LONGEST = 4096
DEFAULTS = membership.Word("")
GENERATIONS = ("generation", "last")
NUMBERS = ("promised", "regroup", "outranked", "crashed", "missed")
# Generations are numbered from 1; from the seconds since 1970 where a keeper has lost its memory. A number that lies further ahead than
# clocks differ is refused: as others number theirs above it, it would soon leave none that all accept.
AHEAD_SECONDS = 3600


def to_text(word: membership.Word) -> str:
    return json.dumps(word._asdict(), sort_keys=True)


def to_word(text: str, hosts: Collection[str], wall: float) -> membership.Word:
    """The word in a text, if each part has its type and bounds and all hosts are in the plan; wall: seconds since 1970.

    ValueError, KeyError, TypeError or RecursionError otherwise.
    """
    given = json.loads(text)
    found = {name: given[name] for name in membership.Word._fields}
    found.update({name: given[name] and _generation(given[name]) for name in GENERATIONS})
    found.update({name: tuple(given[name]) for name in ("hears", "left", "failed")})
    word, highest = membership.Word(**found), int(wall) + AHEAD_SECONDS
    mine = [one for one in (word.generation, word.last) if one is not None]
    fits = (
        word.host in hosts
        and word.state in states.STATES
        and all(_fits(getattr(word, name), default, hosts) for name, default in DEFAULTS._asdict().items())
        and all(len(one.members) == len(set(one.members)) > 0 and set(one.members) <= set(hosts) for one in mine)
        and all(number <= highest for number in (*(one.number for one in mine), *(getattr(word, n) for n in NUMBERS)))
    )
    if not fits:
        raise ValueError("no keeper says this")
    return word


def _generation(given: Any) -> membership.Generation:
    number, members = given
    if not _is_count(number):
        raise ValueError("no number of a generation")
    return membership.Generation(number, tuple(members))


def _fits(value: Any, default: Any, hosts: Collection[str]) -> bool:
    """Whether a part has the type of its default (None: of a generation, checked where it is made)."""
    if default is None:
        return value is None or isinstance(value, membership.Generation)
    if isinstance(default, tuple):
        return all(isinstance(one, str) and one in hosts for one in value)
    if type(value) is not type(default):
        return False
    return len(value) <= LONGEST if isinstance(value, str) else isinstance(value, bool) or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
