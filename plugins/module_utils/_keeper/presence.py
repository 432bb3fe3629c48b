# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a guest leaves the run and returns (ddp_polite: guest): pure functions of limits, readings and the clock.

Each limit has hysteresis. A guest returns only after a minute without any reason to be away.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, FrozenSet, Mapping, NamedTuple, Tuple

from .._contract import keeper_states as states
from .._contract.plan import Guest
from .._probe.usage import Reading
from . import membership

HOURS, USED, BATTERY, OWN, LOAD = "hours", "used", "battery", "own", "load"
# Ignore shorter peaks of load.
LASTING = {LOAD: 10.0}
QUIET_SECONDS = 60.0
# Cores that other programs may keep busy, to stay and to come back.
MOST_LOAD, LESS_LOAD = 0.5, 0.25
# Hysteresis: this much charge above the limit before a guest returns.
MORE_CHARGE = 5


class GuestState(NamedTuple):
    """State of a guest; it takes part while `why` is empty."""

    why: str = ""  # why it is away, and when it returns
    code: str = ""  # code of that reason
    since: Mapping[str, float] = MappingProxyType({})  # when each current reason appeared
    excused: FrozenSet[str] = frozenset()  # reasons overruled by a user's join, while they last
    last: float = 0.0  # when a reason was last seen


def reasons(limits: Guest, reading: Reading, away: bool) -> Dict[str, str]:
    """All current reasons to be away, with their sentences, the simplest first."""
    found: Dict[str, str] = {}
    if limits["hours"] and not within(limits["hours"], reading.minute):
        found[HOURS] = "outside of %s; back at %s" % (limits["hours"], limits["hours"][:5])
    if reading.users:
        found[USED] = "used by %s; back when it is left alone" % " and ".join(reading.users)
    least = limits["battery_limit"] + (MORE_CHARGE if away and limits["battery_limit"] else 0)
    if reading.charge is not None and limits["battery_limit"] and reading.charge <= least:
        found[BATTERY] = "on battery; back when plugged in"
    if reading.away_if:
        found[OWN] = "ddp_away_if says so; back when it does not"
    if reading.load is not None and reading.load > (LESS_LOAD if away else MOST_LOAD):
        found[LOAD] = "other programs use %.1f cores; back below %.2g" % (reading.load, LESS_LOAD)
    return found


def within(hours: str, minute: int) -> bool:
    """Whether a minute of the day is within hours like 22:00-07:00."""
    begin, end = (60 * int(time[:2]) + int(time[3:]) for time in hours.split("-"))
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def look(limits: Guest, before: GuestState, reading: Reading, now: float) -> GuestState:
    """The state after another reading."""
    found = reasons(limits, reading, bool(before.why))
    excused = before.excused & set(found)
    since = {code: before.since.get(code, now) for code in found if code not in excused}
    counts = [code for code in since if before.why or now - since[code] >= LASTING.get(code, 0.0)]
    if counts:
        # Keep the sentence, with its figure, from when the guest left.
        same = before.code in counts
        return GuestState(
            before.why if same else found[counts[0]], before.code if same else counts[0], since, excused, now
        )
    if before.why and now - before.last < QUIET_SECONDS:
        return before._replace(why="quiet again; back after a minute of it", code="", since=since)
    return GuestState(since=since, excused=excused)


def let_in(guest: GuestState) -> GuestState:
    """A user's join overrules the current reasons."""
    return GuestState(excused=guest.excused | set(guest.since)) if guest.why else guest


def follow(own: membership.OwnState, now: float, why: str) -> Tuple[membership.OwnState, str]:
    """Leave the run for a reason, stay away while one holds, then ask to rejoin; returns the order for this host's rank."""
    state, leaving = own.public.state, own.public.state in (states.ENDING, states.STUCK)
    if state == states.RESTING:
        return own.with_fields(why=why) if why else membership.change(own, now, states.IDLE, why=""), ""
    if not why or state in states.OVER or (leaving and own.after_ending in (states.RESTING, *states.OVER)):
        return own, ""
    own, order = membership.asked_to_end(own, now, states.RESTING, "%s: %s" % (own.public.host, why))
    return own.with_fields(why=why) if own.public.state == states.RESTING else own, order
