# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host's answer: evidence, or why there is none.

Unreachable, too slow to answer, and a failed module are three different cases.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional

from .._contract.decode import decode
from .._contract.document import section
from .._contract.validate import InvalidHostData
from .._kit.words import plain_reason
from .._run.state import EMPTY
from .evidence import RankEvidence

UNREACHABLE = "unreachable"
TIMED_OUT = "timed out"
FAILED = "failed"


class Answer(NamedTuple):
    """A host's evidence; otherwise the kind of failure, and its text."""

    evidence: Optional[RankEvidence]
    failure: Optional[str] = None
    words: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether the host returned nothing."""
        return self.failure in (UNREACHABLE, TIMED_OUT)


def answer_of(result: Any) -> Answer:
    """The result of doctor_info on a host, whatever happened to the task."""
    if not isinstance(result, Mapping):
        return Answer(None, FAILED, "was not examined: the host was not contacted")
    found = result.get("evidence")
    if found is not None:
        try:
            return Answer(decode(RankEvidence, {**found, "run": {**EMPTY, **section(found, "run")}}))
        except InvalidHostData as why:
            return Answer(None, FAILED, "sent an invalid answer: %s" % why)
    said = (plain_reason(str(result.get("msg") or "")).splitlines() or [""])[0]
    if result.get("unreachable"):
        return Answer(None, UNREACHABLE, "cannot be reached" + (": %s" % said if said else ""))
    if result.get("timedout"):
        period = result["timedout"].get("period")
        return Answer(None, TIMED_OUT, "did not answer within %s s" % period if period else "did not answer in time")
    return Answer(None, FAILED, "could not be examined: %s" % (said or "the host was not contacted"))


def answers_of(results: Mapping[str, Any]) -> Dict[str, Answer]:
    """By host."""
    return {str(host): answer_of(result) for host, result in results.items()}
