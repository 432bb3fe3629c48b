# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What preflight found, for people: a table of the links, the findings with what to do, and one sentence for the end."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._findings import ERROR, WARNING
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight_evidence import Evidence
from ansible_collections.nanochat.ddp.plugins.module_utils._run_table import DASH, table


def links_text(evidence: Evidence) -> str:
    """One line for each direction between two hosts."""
    rows = [
        [
            f"{host} -> {link['host']}",
            link.get("nic") or DASH,
            ports_text(link["ports"]),
            number(link.get("latency_ms"), "ms", 2),
            number(link.get("bandwidth_mbit"), "Mbit/s", 0),
            str(link.get("mtu") or DASH),
        ]
        for host, tried in evidence.tries.items()
        for link in tried["links"]
    ]
    return "\n".join(table(["link", "nic", "ports", "round trip", "rate", "MTU"], rows)) if rows else ""


def ports_text(ports: Sequence[Mapping[str, Any]]) -> str:
    closed = [port for port in ports if port["error"] not in ("", "stranger")]
    return f"{len(closed)} of {len(ports)} closed" if closed else "open"


def number(value: Any, unit: str, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f} {unit}"


def findings_text(findings: Sequence[Mapping[str, Any]]) -> str:
    """The findings as a table, and below each what to do."""
    if not findings:
        return "Preflight found nothing that stands against the run."
    lines = []
    for found in findings:
        where = f"{found['host']} <- {found['peer']}" if found["peer"] else found["host"]
        lines.append(f"{found['severity'].upper():8}{found['code']:22}{where}")
        lines += [f"        seen: {found['seen']}", f"        why:  {found['why']}", f"        do:   {found['remedy']}"]
    return "\n".join(lines)


def summary(stopping: Sequence[Mapping[str, Any]]) -> str:
    """Why the run does not start."""
    errors = sum(found["severity"] == ERROR for found in stopping)
    warnings = sum(found["severity"] == WARNING for found in stopping)
    counted = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((errors, "error"), (warnings, "warning"))
        if count
    ]
    told = ", ".join(dict.fromkeys(f"{found['code']} ({found['host']})" for found in stopping))
    return f"Preflight found {' and '.join(counted)}, so nothing is started: {told}."
