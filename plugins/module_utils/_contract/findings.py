# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The registry of all that preflight, plan, watch and doctor can find: one code, one meaning, one remedy.

docs/troubleshooting.md is generated from it, so a search for the words that a user saw leads to the remedy.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import (
    findings_of_plan,
    findings_of_preflight,
    findings_of_runs,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import Kind


class Facts(TypedDict, total=False):
    """Facts of a finding, for programs."""

    pids: List[int]  # processes that it is about
    pieces: List[str]  # of evidence that are missing


class Finding(TypedDict):
    """One thing worth saying, made where it is seen: where, what was seen, why that matters and what to do."""

    code: str
    severity: str
    host: str
    peer: Optional[str]
    seen: str
    why: str
    remedy: str
    facts: Facts


# Of more than so many hosts the same is told once, as such hosts share a row of a table (_kit/words.py).
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
    """One finding as every part of the collection passes it on; remedy and severity default to the catalogue's.

    Facts are what programs may want of the sentence (such as pids): nothing is ever read out of a sentence again.
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
    """Sentence with what was seen and what to do; for a wrong setting the sentence itself says what it must be."""
    text, remedy = found["seen"], found["remedy"]
    if found["code"] != "setting-refused" or remedy != CATALOGUE["setting-refused"].remedy:
        text = "%s; %s" % (text.rstrip("."), remedy[:1].lower() + remedy[1:])
    return text if text.endswith(("?", "!")) else text.rstrip(".") + "."


def told_once(findings: Sequence[Finding]) -> Iterator[Tuple[Finding, str]]:
    """The findings for people: what was seen of many hosts alike, but for figures, of the first of them, with which more there are."""
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
    """The text of a refused plan: every problem, one sentence each."""
    if len(findings) == 1:
        return sentence(findings[0])
    lines = [f"- {sentence(found)}{f' Also: {more}.' if more else ''}" for found, more in told_once(findings)]
    return "\n".join([f"{len(findings)} problems; nothing was changed:", *lines])
