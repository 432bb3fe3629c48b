# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks systemd-logind who is logged in graphically, and whether it kills a user's processes at logout."""

from __future__ import annotations

import re
from typing import List, NamedTuple

from . import bare

GRAPHICAL = ("x11", "wayland", "mir")


class Logind(NamedTuple):
    """Settings of systemd-logind for a user's processes at logout."""

    kills: bool
    lingers: bool


def logind(user: str) -> Logind:
    """Ask loginctl; if it does not answer, nothing is killed."""
    manager = bare.tool(["loginctl", "show-session", "-p", "KillUserProcesses", "-p", "KillExcludeUsers"])[1]
    answers = dict(line.partition("=")[::2] for line in manager.splitlines())
    kills = answers.get("KillUserProcesses") == "yes" and user not in answers.get("KillExcludeUsers", "root").split()
    linger = bare.tool(["loginctl", "show-user", user, "-p", "Linger"])[1]
    return Logind(kills, "Linger=yes" in linger.split())


def desktop_users() -> List[str]:
    """Users who are logged in graphically; none without logind."""
    sessions = bare.tool(["loginctl", "list-sessions", "--no-legend"])[1]
    names = [line.split()[0] for line in sessions.splitlines() if line.strip()]
    properties = ["-p%s" % name for name in ("Name", "Class", "Type", "State")]
    told = bare.tool(["loginctl", "show-session", *names, *properties])[1] if names else ""
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in re.split(r"\n\s*\n", told)]
    users = [one for one in blocks if one.get("Class", "").startswith("user") and one.get("State") != "closing"]
    return sorted({one["Name"] for one in users if one.get("Type") in GRAPHICAL})
