# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight's results as text: a table of the links, and why a run does not start."""

from __future__ import annotations

from typing import Sequence

from .._contract.findings import Finding
from .._kit.words import DASH, plural, table
from .evidence import PreflightEvidence
from .peer_check import LinkTry, closed_ports


def links_text(evidence: PreflightEvidence) -> str:
    """One line per direction between two hosts."""
    rows = [
        [
            f"{host} -> {link['host']}",
            link["nic"] or DASH,
            ports_text(link),
            number(link["latency_ms"], "ms", 2),
            number(link["bandwidth_mbit"], "Mbit/s", 0),
            str(link["mtu"] or DASH),
        ]
        for host, link in evidence.links()
    ]
    return "\n".join(table(["link", "nic", "ports", "round trip", "rate", "MTU"], rows)) if rows else ""


def ports_text(link: LinkTry) -> str:
    """How many of a direction's ports are closed."""
    closed = len(closed_ports(link))
    return f"{closed} of {len(link['ports'])} closed" if closed else "open"


def number(value: float | None, unit: str, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f} {unit}"


def summary(stopping: Sequence[Finding]) -> str:
    """Why the run does not start."""
    listed = ", ".join(dict.fromkeys(f"{found['code']} ({found['host']})" for found in stopping))
    return f"Preflight found {plural(len(stopping), 'error')}, so nothing was started: {listed}."
