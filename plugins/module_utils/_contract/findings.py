# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The registry of all findings of preflight, plan, watch and doctor: one code, one meaning, one remedy.

docs/troubleshooting.md is generated from it, so that searching for an error message finds the remedy.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, TypedDict

from . import findings_of_plan, findings_of_preflight, findings_of_runs
from .kind import Kind


class Facts(TypedDict, total=False):
    """Facts of a finding, for programs."""

    pids: List[int]  # processes concerned
    pieces: List[str]  # missing pieces of evidence


class Finding(TypedDict):
    """One reported fact: where, what was seen, why it matters and what to do."""

    code: str
    severity: str
    host: str
    peer: Optional[str]
    seen: str
    why: str
    remedy: str
    facts: Facts


# Above this number of hosts, similar findings are merged, like table rows (_kit/words.py).
MANY_ALIKE = 16

CATALOGUE: Dict[str, Kind] = {
    **findings_of_plan.KINDS,
    **findings_of_preflight.KINDS,
    **findings_of_runs.KINDS,
}


def finding(
    code: str,
    host: str,
    seen: str,
    peer: Optional[str] = None,
    remedy: Optional[str] = None,
    severity: Optional[str] = None,
    facts: Optional[Facts] = None,
) -> Finding:
    """Create a finding; remedy and severity default to the catalogue's.

    `facts` is for programs (such as pids), so that nobody parses the sentences.
    """
    kind = CATALOGUE[code]
    return {
        "code": code,
        "severity": severity or kind.severity,
        "host": host,
        "peer": peer,
        "seen": seen,
        "why": kind.why,
        "remedy": remedy or kind.remedy,
        "facts": facts or {},
    }


def sentence(found: Finding) -> str:
    """One sentence with the observation and the remedy; for a wrong setting the observation suffices."""
    text, remedy = found["seen"], found["remedy"]
    if found["code"] != "setting-refused" or remedy != CATALOGUE["setting-refused"].remedy:
        text = "%s; %s" % (text.rstrip("."), remedy[:1].lower() + remedy[1:])
    return text if text.endswith(("?", "!")) else text.rstrip(".") + "."


def told_once(findings: Sequence[Finding]) -> Iterator[Tuple[Finding, str]]:
    """The findings for display: of many hosts that differ only in figures, the first, with the number of others."""
    alike: Dict[Tuple[str, ...], List[Finding]] = {}
    groups = [alike.setdefault(_but_for_the_host(found), []) for found in findings]
    for found, group in zip(findings, groups):
        group.append(found)
    for found, group in zip(findings, groups):
        if len(group) <= MANY_ALIKE:
            yield found, ""
        elif found is group[0]:
            yield found, "%d more, %s ... %s" % (len(group) - 1, group[1]["host"], group[-1]["host"])


def _but_for_the_host(found: Finding) -> Tuple[str, ...]:
    text = found["seen"]
    for name in filter(None, (found.get("host"), found.get("peer"))):
        text = text.replace(name, "HOST")
    return found["code"], found["severity"], re.sub(r"\d+(\.\d+)?", "N", text)


def refusal_text(findings: Sequence[Finding]) -> str:
    """The text of a rejected plan: one sentence per problem."""
    if len(findings) == 1:
        return sentence(findings[0])
    lines = [f"- {sentence(found)}{f' Also: {more}.' if more else ''}" for found, more in told_once(findings)]
    return "\n".join([f"{len(findings)} problems; nothing was changed:", *lines])
