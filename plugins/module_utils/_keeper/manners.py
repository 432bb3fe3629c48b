# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a guest leaves the run, and when it comes back (ddp_polite guest): pure functions of its limits, what is read and the clock.

Each reason has a limit to leave and an easier one to come back. A reason that comes and goes leaves the guest away: it comes back
only after ddp_quiet_minutes without any.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, FrozenSet, Mapping, NamedTuple, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.keeper_states import (
    ENDING,
    IDLE,
    OVER,
    RESTING,
    STUCK,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Guest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.usage import Reading

HOURS, USED, BATTERY, METERED, HOT, LOAD = "hours", "used", "battery", "metered", "hot", "load"
# A peak of load or heat that is shorter is no reason to leave.
LASTING = {HOT: 10.0, LOAD: 10.0}
# What a guest that is away wants, beside its limits, to come back.
COOLER, MORE_CHARGE, LESS_LOAD = 10.0, 5, 0.5


class Stay(NamedTuple):
    """How a guest and its machine stand: it takes part as long as `why` is empty."""

    why: str = ""  # it is away, and when it comes back
    code: str = ""  # the reason of that
    since: Mapping[str, float] = MappingProxyType({})  # when each reason that is there now was seen first
    excused: FrozenSet[str] = (
        frozenset()
    )  # reasons that a user who let it in by hand has overruled, as long as they last
    last: float = 0.0  # when there was a reason last


def reasons(limits: Guest, reading: Reading, away: bool) -> Dict[str, str]:
    """Every reason to be away now, with its sentence, the plainest first."""
    found: Dict[str, str] = {}
    if limits["hours"] and not within(limits["hours"], reading.minute):
        found[HOURS] = "outside of %s; back at %s" % (limits["hours"], limits["hours"][:5])
    if reading.users:
        found[USED] = "used by %s; back when it is left alone" % " and ".join(reading.users)
    least = limits["battery_limit"] + (MORE_CHARGE if away and limits["battery_limit"] else 0)
    if reading.charge is not None and limits["battery_limit"] and reading.charge <= least:
        found[BATTERY] = "on battery; back when plugged in"
    if reading.metered:
        found[METERED] = "on a metered connection; back on another one"
    most = limits["heat_limit"] - (COOLER if away else 0.0)
    if reading.celsius is not None and reading.celsius > most:
        found[HOT] = "at %.0f °C; back below %.0f °C" % (reading.celsius, limits["heat_limit"] - COOLER)
    cores = limits["load_limit"] * (LESS_LOAD if away else 1.0)
    if reading.load is not None and reading.load > cores:
        back = limits["load_limit"] * LESS_LOAD
        found[LOAD] = "other programs use %.1f cores; back below %.2g" % (reading.load, back)
    return found


def within(hours: str, minute: int) -> bool:
    """Whether a minute of the day is within hours such as 22:00-07:00."""
    begin, end = (60 * int(time[:2]) + int(time[3:]) for time in hours.split("-"))
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def look(limits: Guest, before: Stay, reading: Reading, now: float) -> Stay:
    """How it stands after one more reading."""
    found = reasons(limits, reading, bool(before.why))
    excused = before.excused & set(found)
    since = {code: before.since.get(code, now) for code in found if code not in excused}
    counts = [code for code in since if before.why or now - since[code] >= LASTING.get(code, 0.0)]
    if counts:
        # A number in the sentence is that of the moment at which it left.
        same = before.code in counts
        return Stay(before.why if same else found[counts[0]], before.code if same else counts[0], since, excused, now)
    if before.why and now - before.last < 60 * limits["quiet_minutes"]:
        return before._replace(
            why="quiet again; back after %g minutes of it" % limits["quiet_minutes"], code="", since=since
        )
    return Stay(since=since, excused=excused)


def let_in(stay: Stay) -> Stay:
    """A user lets it in by hand: what keeps it away now does so no longer."""
    return Stay(excused=stay.excused | set(stay.since)) if stay.why else stay


def follow(own: membership.Own, now: float, why: str) -> Tuple[membership.Own, str]:
    """Leave the run for a reason, stay away while one holds, then ask to rejoin; returns the order for this host's rank."""
    state, leaving = own.word.state, own.word.state in (ENDING, STUCK)
    if state == RESTING:
        return (own._replace(word=own.word._replace(why=why)) if why else membership.change(own, now, IDLE, why="")), ""
    if not why or state in OVER or (leaving and own.after_ending in (RESTING, *OVER)):
        return own, ""
    own, order = membership.asked_to_end(own, now, RESTING, "%s: %s" % (own.word.host, why))
    return (own._replace(word=own.word._replace(why=why)) if own.word.state == RESTING else own), order
