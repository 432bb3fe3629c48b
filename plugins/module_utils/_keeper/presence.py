# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a guest leaves the run and returns (ddp_polite: guest): by the clock, the load, the command below, and one of its owner's."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from typing import Set, Tuple

from .._contract import keeper_states as states
from .._contract.plan import Guest
from .._kit import bare
from .._kit.files import read_text
from . import membership

# NANOCHAT_MACHINE is a folder that replaces /, for tests that play a laptop.
IN_USE = """
# Who sits at the screen, never an SSH login; without logind nobody does.
session=$(loginctl show-seat seat0 --property=ActiveSession --value)
facts=$([ -z "$session" ] || loginctl show-session "$session" -p Name -p Class -p IdleHint -p LockedHint)
case $facts in
*Hint=yes*) ;;
*Class=user*) echo "used by $(echo "$facts" | sed -n s/^Name=//p); back when it is left alone"; exit ;;
esac
# Never the battery of a mouse. With a weak charger (AC, ADP1, ucsi-...) a battery loses charge though it is plugged in.
power="$NANOCHAT_MACHINE/sys/class/power_supply"
grep -qs Discharging "$power"/BAT*/status "$power"/CMB*/status && ! grep -qs 1 "$power"/[Au]*/online &&
    echo "on battery; back when plugged in"
"""
SECONDS = 5.0  # time limit of a command
ASK_SECONDS = 2.0  # between two runs of the command above
OWN_EVERY = 5  # such runs for each of the owner's command, and for each look at the load
MOST_LOAD, LESS_LOAD = 0.5, 0.25  # cores that other programs may keep busy, to stay and to come back
LONGEST = 120  # characters of the reason that a command gives
QUIET_SECONDS = 60.0  # without any reason, before a guest returns


def within(hours: str, minute: int) -> bool:
    """Whether a minute of the day is within hours like 22:00-07:00."""
    begin, end = (60 * int(time[:2]) + int(time[3:]) for time in hours.split("-"))
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def reason(command: str) -> str:
    """Why a command says that its host is away: the first line that it prints. Empty if it does not end with 0, or in time."""
    code, out, dummy = bare.run(["/bin/sh", "-c", command], {"LC_ALL": "C"}, seconds=SECONDS)
    line = "".join(char for char in out.partition("\n")[0] if char.isprintable()).strip()[:LONGEST]
    if not any(map(str.isalpha, line)):  # such as the number of a process
        line = "ddp_away_if says so; back when it does not"
    return "" if code else line


def cpu_seconds() -> float:
    """CPU time of all programs at normal priority since boot. A guest's rank has nice 19, so it counts in another column."""
    columns = read_text(os.environ.get("NANOCHAT_MACHINE", "") + "/proc/stat").split()
    return int(columns[1]) / os.sysconf("SC_CLK_TCK") if columns else 0.0


class Attendance:
    """Whether a guest takes part now. Commands may take long, so they are run beside the keeper."""

    def __init__(self, limits: Guest) -> None:
        self.hours, self.command = limits["hours"], limits["away_if"]
        self.why = ""  # why it is away, and when it returns; it takes part while this is empty
        self.last = 0.0  # when a reason was last seen
        self.excused: Set[str] = set()  # reasons, their figures aside, that a user's join overrules while they last
        self.used, self.own, self.busy = reason(IN_USE), reason(self.command) if self.command else "", ""
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        spent, since = cpu_seconds(), time.monotonic()
        for turn in itertools.count(1):
            time.sleep(ASK_SECONDS)
            self.used = reason(IN_USE)
            if turn % OWN_EVERY:
                continue
            self.own = reason(self.command) if self.command else ""
            before, spent = spent, cpu_seconds()
            begun, since = since, time.monotonic()
            cores = (spent - before) / (since - begun)
            is_busy = cores > (LESS_LOAD if self.busy else MOST_LOAD)
            self.busy = "other programs use %.1f cores; back below %.2g" % (cores, LESS_LOAD) if is_busy else ""

    def look(self, now: float, let_in: bool) -> str:
        """Why this host is away. A guest leaves at once, and returns after a minute without any reason, or if a user lets it in."""
        clock = time.localtime()
        inside = not self.hours or within(self.hours, 60 * clock.tm_hour + clock.tm_min)
        outside = "" if inside else "outside of %s; back at %s" % (self.hours, str(self.hours)[:5])
        found = {re.sub(r"\d+", "0", why): why for why in (outside, self.used, self.own, self.busy) if why}
        if let_in and self.why:
            self.why, self.excused = "", set(found)
        self.excused &= set(found)
        counts = [why for code, why in found.items() if code not in self.excused]
        if counts:
            # A sentence keeps its figure from when the guest left.
            self.why = self.why if re.sub(r"\d+", "0", self.why) in found else counts[0]
            self.last = now
        elif self.why:
            self.why = "quiet again; back after a minute of it" if now - self.last < QUIET_SECONDS else ""
        return self.why


def follow(own: membership.OwnState, now: float, why: str) -> Tuple[membership.OwnState, str]:
    """Leave the run for a reason, stay away while one holds, then ask to rejoin; returns the order for this host's rank."""
    state, leaving = own.public.state, own.public.state in (states.ENDING, states.STUCK)
    if state == states.RESTING:
        return own.with_fields(why=why) if why else membership.change(own, now, states.IDLE, why=""), ""
    if not why or state in states.OVER or (leaving and own.after_ending in (states.RESTING, *states.OVER)):
        return own, ""
    own, order = membership.asked_to_end(own, now, states.RESTING, "%s: %s" % (own.public.host, why))
    return own.with_fields(why=why) if own.public.state == states.RESTING else own, order
