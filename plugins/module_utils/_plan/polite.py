# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How polite training is on each host (ddp_polite), decided from settings and probe; problems and findings."""

from __future__ import annotations

from typing import Iterator, Sequence

from .._contract.findings import Finding, finding
from .._contract.plan import Guest
from .._contract.politeness import GUEST, LOW, OFF
from .._contract.settings import Asked
from .._contract.settings_table import AUTO, PREFIX, find
from .._kit.words import named
from .decided import Decided
from .hosts import Host

LIMITS = ("hours", "battery_limit", "away_if")


def decide(host: Host) -> str:
    """off, low or guest. A resumed run keeps auto's first result, so that a login does not restart it."""
    if host.settings.polite != AUTO:
        return host.settings.polite
    kept = host.kept_fact("polite")
    if kept in (OFF, LOW):
        return str(kept)
    return LOW if host.fact("usage", "graphical") else OFF


def guest_limits(host: Host) -> Guest | None:
    """A guest's limits; None for other hosts."""
    if decide(host) != GUEST:
        return None
    one = host.settings
    return {"hours": one.hours, "battery_limit": one.battery_limit, "away_if": one.away_if}


def problems(asked: Asked, hosts: Sequence[Host], decided: Decided) -> Iterator[str]:
    """Settings with which a guest could not leave or return, and limits set for a host that is not a guest."""
    guests = [host for host in hosts if host.settings.polite == GUEST]
    for host in hosts:
        changed = [name for name in LIMITS if getattr(host.settings, name) != find(PREFIX + name).default]
        if changed and host not in guests:
            yield f"ddp_{changed[0]} is set on {host.name}, but only a guest leaves by it; set ddp_polite to guest there, or take it out."
    if not guests:
        return
    who = f"ddp_polite is guest on {named([host.name for host in guests])}"
    if not decided.ours:
        yield f"{who}, which needs the trainer of this collection (ddp_trainer_source: ours); use low."
    elif not asked.run.resume:
        yield f"{who}, which needs ddp_resume, or the run would begin at the first step each time; use low."
    elif not decided.run.restarts:
        yield f"{who}, which needs keepers to leave and come back by; set ddp_restarts, 3 for instance, or use low."
    elif len(hosts) > 1 and not 0 < (decided.run.min_hosts or 0) < len(hosts):
        yield f"{who}, but all {len(hosts)} hosts are needed to train; set ddp_min_hosts to {max(1, len(hosts) - len(guests))}, or use low."


def findings(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Facts that guests cannot read."""
    for host in hosts:
        blind = host.fact("usage", "blind") or []
        if decide(host) == GUEST and blind:
            seen = f"{host.name} cannot tell {named(blind)}, so that never makes it leave"
            yield finding("guest-blind", host.name, seen)
