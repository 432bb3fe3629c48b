# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A keeper's state as text, and the only reader of others' states: signed by a host of the run, they may still be nonsense."""

from __future__ import annotations

import json
from typing import Any, Collection

from .._contract import keeper_states as states
from . import membership

LONGEST = 4096
DEFAULTS = membership.KeeperState("")._asdict()
NUMBERS = ("promised", "regroup", "outranked")
# Generations are numbered from 1; from the seconds since 1970 where a keeper has lost its memory. A number that lies further ahead than
# clocks differ is refused: as others number theirs above it, it would soon leave none that all accept.
AHEAD_SECONDS = 3600


def to_text(public: membership.KeeperState) -> str:
    return json.dumps(public._asdict(), sort_keys=True)


def to_state(text: str, hosts: Collection[str], wall: float) -> membership.KeeperState:
    """The state in a text, if each part has its type and bounds and all hosts are in the plan; wall: seconds since 1970.

    ValueError, KeyError, TypeError or RecursionError otherwise.
    """
    given = json.loads(text)
    public = membership.KeeperState(**{name: _part(given[name], default, hosts) for name, default in DEFAULTS.items()})
    numbers = [one.number for one in (public.generation, public.last) if one] + [
        getattr(public, name) for name in NUMBERS
    ]
    if public.host not in hosts or public.state not in states.STATES or max(numbers) > int(wall) + AHEAD_SECONDS:
        raise ValueError("no keeper says this")
    return public


def _part(value: Any, default: Any, hosts: Collection[str]) -> Any:
    """A part of a state, if it has the type of its default (None: of a generation) and is within bounds."""
    if default is None and value is not None:
        number, members = value
        value = membership.Generation(_part(number, 0, hosts), _part(members, (), hosts))
        fits = len(value.members) == len(set(value.members)) > 0
    elif isinstance(default, tuple):
        fits = isinstance(value, list) and all(isinstance(one, str) and one in hosts for one in value)
        value = tuple(value)
    elif isinstance(value, str):
        fits = isinstance(default, str) and len(value) <= LONGEST
    else:
        fits = type(value) is type(default) and (not value or 0 <= value < 2**53)
    if not fits:
        raise ValueError("no keeper says this")
    return value
