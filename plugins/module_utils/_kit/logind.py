# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether systemd-logind kills a user's processes at logout."""

from __future__ import annotations

from typing import NamedTuple

from . import bare


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
