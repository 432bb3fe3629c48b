# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The catalogue of all that preflight, plan, watch and doctor can find: one code, one meaning, one remedy.

docs/troubleshooting.md is generated from it, so a search for the words that a user saw leads to the remedy.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

ERROR = "error"
WARNING = "warning"
INFO = "info"


class Kind(NamedTuple):
    """What one code means, wherever it is found."""

    severity: str
    title: str
    why: str
    remedy: str
    field: tuple = ()  # entries of the list of field failures that this code answers
    seen_as: tuple = ()  # texts by which people search for it


CATALOGUE: Dict[str, Kind] = {}


def finding(
    code: str,
    host: str,
    seen: str,
    peer: Optional[str] = None,
    remedy: Optional[str] = None,
    severity: Optional[str] = None,
) -> Dict[str, Any]:
    """One finding as every part of the collection passes it on; remedy and severity default to the catalogue's."""
    kind = CATALOGUE[code]
    return {
        "code": code,
        "severity": severity or kind.severity,
        "host": host,
        "peer": peer,
        "seen": seen,
        "why": kind.why,
        "remedy": remedy or kind.remedy,
    }


def errors(findings: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Those that stop a run."""
    return [found for found in findings if found["severity"] == ERROR]
