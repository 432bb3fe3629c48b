# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Splits the time between two generations, from last step to first, into parts, as one host saw it."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

from .._contract import keeper_states as states
from .._contract.document import Document
from .._run.metrics import finite

# In order; each begins where the previous one ends.
PARTS = ("notice", "end", "agree", "process", "meet", "load", "step")


class Pause:
    """One pause, with the time of each transition in seconds since 1970."""

    def __init__(self) -> None:
        self.marks: Dict[str, float] = {}

    def change(self, state: str, last_step: Optional[float], now: float) -> None:
        """Record a change of the keeper's state; last_step: when its rank finished its last step."""
        if not self.marks and last_step is not None and state != states.TRAINING:
            self.marks = {"since": last_step, "notice": now}
        elif self.marks and state == states.TRAINING:
            self.marks["agree"] = now
        if state == states.IDLE and self.marks:
            # A keeper may become idle several times; after the first, it is agreeing.
            self.marks.setdefault("end", now)

    def over(self, start: Document, step: Document) -> Dict[str, float]:
        """Seconds of each part, after the new generation's first step; empty without a pause."""
        marks, self.marks = self.marks, {}
        opening = start.get("opening")
        if not marks or not isinstance(opening, Mapping):
            return {}
        of_rank = (opening.get("began"), opening.get("met"), start.get("time"), step.get("time"))
        times = [marks.get(name) for name in PARTS[:3]] + [finite(at) for at in of_rank]
        found, before = {}, marks["since"]
        for name, at in zip(PARTS, times):
            if at is not None:
                found[name], before = round(max(0.0, at - before), 2), max(before, at)
        return found


def in_words(parts: Mapping[str, float]) -> str:
    """For the log."""
    each = ", ".join("%s %.1f" % (name, seconds) for name, seconds in parts.items())
    return "%.1f s without a step: %s" % (sum(parts.values()), each)
