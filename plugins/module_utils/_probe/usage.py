# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Current use of a machine: users, power, load, and what its owner's command says. Read-only.

Each fact is a pure function of the text of a command or a few files, and None if unavailable.
"""

from __future__ import annotations

import glob
import os
import re
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .._contract.probe import Usage
from .._kit import bare
from .._kit.files import read_text

Run = Callable[[Sequence[str]], Tuple[int, str, str]]

SESSIONS = ("loginctl", "list-sessions", "--no-legend")
SESSION = ("loginctl", "show-session")
PROPERTIES = ("Name", "Class", "Type", "Seat", "Remote", "State", "IdleHint", "LockedHint")
GRAPHICAL = ("x11", "wayland", "mir")
SECONDS = 5.0  # time limit of a command
AWAY_IF_SECONDS = 10.0  # between two runs of ddp_away_if


class Reading(NamedTuple):
    """Use of a machine at one moment."""

    users: Tuple[str, ...] = ()  # at its screen
    charge: Optional[int] = None  # percent, while on battery
    load: Optional[float] = None  # cores kept busy at normal priority, so without training
    away_if: bool = False  # whether ddp_away_if ended with 0
    minute: int = 0  # of the day, by the host's clock


def run(argv: Sequence[str]) -> Tuple[int, str, str]:
    """Run a command; exit code 127 if it is missing or hangs."""
    return bare.run(argv, {"LC_ALL": "C"}, seconds=SECONDS)


# -- who is logged in


def logins(run_command: Run) -> Optional[List[Dict[str, str]]]:
    """The properties of all sessions of logind; None without it."""
    code, out, dummy = run_command(SESSIONS)
    if code:
        return None
    names = [line.split()[0] for line in out.splitlines() if line.strip()]
    return sessions_in(run_command([*SESSION, *names, *("-p" + name for name in PROPERTIES)])[1]) if names else []


def sessions_in(text: str) -> List[Dict[str, str]]:
    """Parse user sessions from loginctl's output, separated by blank lines."""
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in re.split(r"\n\s*\n", text)]
    return [block for block in blocks if block.get("Class", "").startswith("user")]


def graphical(sessions: Sequence[Dict[str, str]]) -> List[str]:
    """Users logged in graphically."""
    return sorted({one["Name"] for one in sessions if one.get("Type") in GRAPHICAL and one.get("State") != "closing"})


def at_work(sessions: Sequence[Dict[str, str]]) -> Tuple[str, ...]:
    """Users whose session is in a seat's foreground or graphical, and neither idle nor locked; never SSH logins."""
    here = [one for one in sessions if one.get("Seat") or one.get("Type") in GRAPHICAL]
    busy = [one for one in here if "yes" not in (one.get("IdleHint"), one.get("LockedHint"))]
    return tuple(sorted({one["Name"] for one in busy if one.get("State") == "active" and one.get("Name")}))


# -- power, load


def charge(root: str) -> Optional[int]:
    """Battery charge in percent while on battery; None if plugged in or without a battery."""
    supplies = [_supply(folder) for folder in glob.glob(os.path.join(glob.escape(root), "sys/class/power_supply/*"))]
    # Skip the batteries of mice and the like.
    own = [one for one in supplies if one["type"] == "Battery" and one["scope"] != "Device"]
    plugged = any(one["type"] != "Battery" and one["online"] == "1" for one in supplies)
    if plugged or not any(one["status"] == "Discharging" for one in own):
        return None
    return min((int(one["capacity"]) for one in own if one["capacity"].isdigit()), default=100)


def _supply(folder: str) -> Dict[str, str]:
    names = ("type", "scope", "online", "status", "capacity")
    return {name: read_text(os.path.join(folder, name)).strip() for name in names}


class Ticks(NamedTuple):
    """CPU ticks since boot: at normal priority, and in total including idle."""

    normal: int
    total: int
    processors: int


def ticks(text: str) -> Optional[Ticks]:
    """Parse /proc/stat. A guest's rank has nice 19, so it counts in another column."""
    found = re.search(r"^cpu +(\d+(?: +\d+)+)", text, re.M)
    times = [int(word) for word in found.group(1).split()[:8]] if found else []
    return Ticks(times[0], sum(times), max(1, len(re.findall(r"^cpu\d+ ", text, re.M)))) if times else None


def load(before: Optional[Ticks], now: Optional[Ticks]) -> Optional[float]:
    """Cores kept busy at normal priority between two looks."""
    if before is None or now is None or now.total <= before.total:
        return None
    return (now.normal - before.normal) / (now.total - before.total) * now.processors


# -- all together


class UsageMeter:
    """Takes readings; load is measured between two of them."""

    def __init__(self, away_if: Optional[str], root: str = "/", run_command: Run = run) -> None:
        self.away_if, self.root, self.run = away_if, root, run_command
        self._ticks: Optional[Ticks] = None
        self._asked, self._said_away = float("-inf"), False

    def read(self) -> Reading:
        if self.away_if and time.monotonic() - self._asked >= AWAY_IF_SECONDS:
            self._said_away = self.run(["/bin/sh", "-c", self.away_if])[0] == 0
            self._asked = time.monotonic()
        before, self._ticks = self._ticks, ticks(read_text(os.path.join(self.root, "proc/stat")))
        clock = time.localtime()
        return Reading(
            users=at_work(logins(self.run) or []),
            charge=charge(self.root),
            load=load(before, self._ticks),
            away_if=self._said_away,
            minute=60 * clock.tm_hour + clock.tm_min,
        )


def facts(run_command: Run) -> Usage:
    """The facts that a plan needs."""
    sessions = logins(run_command)
    return {
        "graphical": graphical(sessions or []),
        "blind": [] if sessions is not None else ["who uses it (no logind)"],
    }
