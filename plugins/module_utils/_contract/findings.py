# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The registry of all that preflight, plan, watch and doctor can find: one code, one meaning, one remedy.

docs/troubleshooting.md is generated from it, so a search for the words that a user saw leads to the remedy.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import (
    findings_of_plan,
    findings_of_preflight,
    findings_of_runs,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import Kind


class Facts(TypedDict, total=False):
    """What programs want of a finding."""

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
    """What was seen and what to do, with a mark at its end; of a setting the sentence itself says what it must be."""
    text, remedy = found["seen"], found["remedy"]
    if found["code"] != "setting-refused" or remedy != CATALOGUE["setting-refused"].remedy:
        text = "%s; %s" % (text.rstrip("."), remedy[:1].lower() + remedy[1:])
    return text if text.endswith(("?", "!")) else text.rstrip(".") + "."


def refusal_text(findings: Sequence[Finding]) -> str:
    """What people read where a plan is refused: every problem, one sentence each."""
    sentences = [sentence(found) for found in findings]
    if len(sentences) == 1:
        return sentences[0]
    return "\n".join([f"{len(sentences)} problems; nothing was changed:", *["- " + text for text in sentences]])
