# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Current use of a machine: users, power, temperature, load and connection. Read-only.

Each fact is a pure function of the text of a command or a few files, and None if unavailable.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .._contract.probe import Usage
from .._kit.files import read_text

Run = Callable[[Sequence[str]], Tuple[int, str, str]]

SESSIONS = ("loginctl", "list-sessions", "--no-legend")
SESSION = ("loginctl", "show-session")
PROPERTIES = ("Name", "Class", "Type", "Seat", "Remote", "State", "IdleHint", "LockedHint")
NETWORK_MANAGER = "org.freedesktop.NetworkManager"
METERED = ("busctl", "get-property", NETWORK_MANAGER, "/org/freedesktop/NetworkManager", NETWORK_MANAGER, "Metered")
GRAPHICAL = ("x11", "wayland", "mir")
SECONDS = 5.0  # time limit of a command
SENSIBLE = range(1, 150)  # plausible degrees Celsius


class Reading(NamedTuple):
    """Use of a machine at one moment."""

    users: Tuple[str, ...] = ()  # at its screen
    charge: Optional[int] = None  # percent, while on battery
    celsius: Optional[float] = None  # of the hottest sensor
    load: Optional[float] = None  # cores kept busy at normal priority, so without training
    metered: bool = False
    minute: int = 0  # of the day, by the host's clock


def run(argv: Sequence[str]) -> Tuple[int, str, str]:
    """Run a command; exit code 127 if it is missing or hangs."""
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return 127, "", ""
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


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


# -- power, temperature, load, connection


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


def celsius(root: str) -> Optional[float]:
    """Temperature of the hottest sensor."""
    zones = glob.glob(os.path.join(glob.escape(root), "sys/class/thermal/thermal_zone*/temp"))
    found = [int(text) / 1000 for text in (read_text(zone).strip() for zone in zones) if re.fullmatch(r"-?\d+", text)]
    return max((one for one in found if int(one) in SENSIBLE), default=None)


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


def metered(run_command: Run) -> Optional[bool]:
    """Whether NetworkManager knows or guesses that the connection is metered; None without it."""
    code, out, dummy = run_command(METERED)
    return out.split() in (["u", "1"], ["u", "3"]) if code == 0 else None


# -- all together


class UsageMeter:
    """Takes readings; load is measured between two of them."""

    def __init__(self, root: str = "/", run_command: Run = run) -> None:
        self.root, self.run = root, run_command
        self._ticks: Optional[Ticks] = None

    def read(self) -> Reading:
        before, self._ticks = self._ticks, ticks(read_text(os.path.join(self.root, "proc/stat")))
        clock = time.localtime()
        return Reading(
            users=at_work(logins(self.run) or []),
            charge=charge(self.root),
            celsius=celsius(self.root),
            load=load(before, self._ticks),
            metered=bool(metered(self.run)),
            minute=60 * clock.tm_hour + clock.tm_min,
        )


def facts(run_command: Run, root: str = "/") -> Usage:
    """The facts that a plan needs."""
    sessions = logins(run_command)
    known = (
        ("who uses it (no logind)", sessions is not None),
        ("its temperature (no sensor)", celsius(root) is not None),
        ("whether its connection is metered (no NetworkManager)", metered(run_command) is not None),
    )
    return {"graphical": graphical(sessions or []), "blind": [what for what, is_known in known if not is_known]}
