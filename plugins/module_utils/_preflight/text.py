# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight's results as text: a table of the links, and why a run does not start."""

from __future__ import annotations

from typing import Any, Sequence

from .._contract.findings import Finding
from .._kit.words import DASH, plural, table
from .evidence import PreflightEvidence
from .peer_check import LinkTry, closed_ports

# With more directions than this, nobody reads a line for each.
MANY_LINKS = 12


def links_text(evidence: PreflightEvidence) -> str:
    """One line per direction between two hosts; among many hosts one per host, with its worst result."""
    links = {host: tried["links"] for host, tried in evidence.tries.items() if tried["links"]}
    if sum(map(len, links.values())) > MANY_LINKS:
        head = ["from", "to", "nic", "ports", "longest round trip", "lowest rate", "MTU"]
        rows = [[host, plural(len(tried), "host"), *worst_values(tried)] for host, tried in links.items()]
        return "\n".join(table(head, rows))
    rows = [[f"{host} -> {link['host']}", *worst_values([link])] for host, tried in links.items() for link in tried]
    return "\n".join(table(["link", "nic", "ports", "round trip", "rate", "MTU"], rows)) if rows else ""


def worst_values(links: Sequence[LinkTry]) -> list[str]:
    """A row for one link, or the worst values of several."""
    return [
        ", ".join(dict.fromkeys(link.get("nic") or DASH for link in links)),
        ports_text(links),
        number(max(known_values(links, "latency_ms"), default=None), "ms", 2),
        number(min(known_values(links, "bandwidth_mbit"), default=None), "Mbit/s", 0),
        str(min(known_values(links, "mtu"), default=None) or DASH),
    ]


def known_values(links: Sequence[LinkTry], name: str) -> list[Any]:
    return [link[name] for link in links if link.get(name) is not None]


def ports_text(links: Sequence[LinkTry]) -> str:
    closed = sum(len(closed_ports(link)) for link in links)
    return f"{closed} of {sum(len(link['ports']) for link in links)} closed" if closed else "open"


def number(value: Any, unit: str, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f} {unit}"


def summary(stopping: Sequence[Finding]) -> str:
    """Why the run does not start."""
    listed = ", ".join(dict.fromkeys(f"{found['code']} ({found['host']})" for found in stopping))
    return f"Preflight found {plural(len(stopping), 'error')}, so nothing was started: {listed}."
