# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a rank may need to stop cleanly, from its own measurements."""

from __future__ import annotations

from typing import List, Optional, Tuple

from .._contract.document import Document, items, number
from .metrics import finite, newest_attempt

# Nothing to save in these phases, and a rank may not even notice the request.
EARLY = (None, "start", "rendezvous", "agree", "resume")
EARLY_SECONDS = 10.0
# Time for a first checkpoint on a slow disk.
SLOWEST_DISK = 10e6
# The next step or save may take longer than earlier ones, and processes need time to exit.
CAUTION = 2.0
MARGIN_SECONDS = 30.0
# A rank whose connections were closed reports the lost rank within this time.
LAST_WORDS_SECONDS = 8.0
# Upper limit of a stop, whatever the figures say.
LONGEST_STOP = 86400.0
RECENT = 20
DEFAULT_TIMEOUT = 300.0


def stop_seconds(events: List[Document], heartbeat: Document, plan: Document) -> float:
    """Timeout for a stop: the current step and the next, and a save."""
    step, save = _measured(events, heartbeat, plan)
    if step is None:
        if heartbeat.get("phase") in EARLY and not newest_attempt(events)[0]:
            return EARLY_SECONDS
        # The first step may take long.
        return _duration(plan, "timeout_seconds") or DEFAULT_TIMEOUT
    # Other work in progress that ends before the rank can stop.
    aside = max(_longest(events, "eval") or 0.0, _longest(events, "sample") or 0.0)
    return min(LONGEST_STOP, CAUTION * (2 * step + save + aside) + MARGIN_SECONDS)


def rescue_seconds(events: List[Document], heartbeat: Document, plan: Document) -> float:
    """Timeout for a rank that lost another: it notices in its next exchange and saves the last finished step."""
    step, save = _measured(events, heartbeat, plan)
    return min(LONGEST_STOP, LAST_WORDS_SECONDS + CAUTION * ((step or 0.0) + save))


def _measured(events: List[Document], heartbeat: Document, plan: Document) -> Tuple[Optional[float], float]:
    """Seconds per step (None before the first) and per save."""
    attempt = newest_attempt(events)[1]
    step = _duration(heartbeat, "step_seconds") or _longest(attempt, "step") or _longest(events, "step")
    sizes = [number(node, "checkpoint_bytes") for node in items(plan, "nodes")]
    first_save = max(sizes, default=0) / SLOWEST_DISK or 1.0
    return step, _duration(heartbeat, "save_seconds") or _longest(events, "checkpoint") or first_save


def _duration(document: Document, name: str) -> Optional[float]:
    """Plausible seconds in a document, or None."""
    found = finite(document.get(name))
    return found if found is not None and 0 < found < 1e6 else None


def _longest(events: List[Document], kind: str) -> Optional[float]:
    """The longest of the recent events of a kind."""
    latest = [event for event in events if event["kind"] == kind][-RECENT:]
    return max((seconds for seconds in (_duration(event, "seconds") for event in latest) if seconds), default=None)
