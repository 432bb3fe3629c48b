# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One reported fact of plan, preflight or doctor, and its sentence; findings_table.py has the meaning of each code."""

from __future__ import annotations

from typing import Optional, Sequence, TypedDict

from .findings_table import CATALOGUE


class Finding(TypedDict):
    """One reported fact: where, what was seen, why it matters and what to do."""

    code: str
    severity: str
    host: str
    peer: Optional[str]
    seen: str
    why: str
    remedy: str


def finding(
    code: str,
    host: str,
    seen: str,
    peer: Optional[str] = None,
    remedy: Optional[str] = None,
    severity: Optional[str] = None,
) -> Finding:
    """Create a finding; remedy and severity default to the catalogue's."""
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


def sentence(found: Finding) -> str:
    """One sentence with the observation and the remedy; for a wrong setting the observation suffices."""
    text, remedy = found["seen"], found["remedy"]
    if found["code"] != "setting-refused" or remedy != CATALOGUE["setting-refused"].remedy:
        text = "%s; %s" % (text.rstrip("."), remedy[:1].lower() + remedy[1:])
    return text if text.endswith(("?", "!")) else text.rstrip(".") + "."


class PlanError(ValueError):
    """Why there is no plan: all problems, as findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        said = [sentence(found) for found in findings]
        more = [f"{len(said)} problems; nothing was changed:", *(f"- {one}" for one in said)]
        super().__init__(said[0] if len(said) == 1 else "\n".join(more))
