# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a rank may need to stop cleanly, from its own measurements."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document, items, number
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import TELLING, trainer_of

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


def stop_seconds(events: Sequence[Document], heartbeat: Document, plan: Document) -> float:
    """Timeout for a stop: the current step and the next, and a save."""
    timeout = _told(plan, "timeout_seconds") or DEFAULT_TIMEOUT
    attempt = _attempt(events)
    step, save = _measured(events, heartbeat, plan)
    if step is None:
        ours = trainer_of(plan) in (None, *TELLING)
        # The first step may take long; a trainer without metrics gets the plan's timeout.
        return EARLY_SECONDS if ours and heartbeat.get("phase") in EARLY and not _is_training(attempt) else timeout
    # Other work in progress that ends before the rank can stop.
    aside = max(_longest(events, "eval") or 0.0, _longest(events, "sample") or 0.0)
    return min(LONGEST_STOP, CAUTION * (2 * step + save + aside) + MARGIN_SECONDS)


def rescue_seconds(events: Sequence[Document], heartbeat: Document, plan: Document) -> float:
    """Timeout for a rank that lost another: it notices in its next exchange and saves the last finished step."""
    step, save = _measured(events, heartbeat, plan)
    return min(LONGEST_STOP, LAST_WORDS_SECONDS + CAUTION * ((step or 0.0) + save))


def _measured(events: Sequence[Document], heartbeat: Document, plan: Document) -> Tuple[Optional[float], float]:
    """Seconds per step (None before the first) and per save."""
    step = _told(heartbeat, "step_seconds") or _longest(_attempt(events), "step") or _longest(events, "step")
    return step, _told(heartbeat, "save_seconds") or _longest(events, "checkpoint") or _unsaved(plan)


def _attempt(events: Sequence[Document]) -> Sequence[Document]:
    """The events of the newest start."""
    return events[max((at for at, event in enumerate(events) if event["kind"] == "start"), default=0) :]


def _is_training(attempt: Sequence[Document]) -> bool:
    return any(event["kind"] == "start" for event in attempt)


def _told(document: Document, name: str) -> Optional[float]:
    """A duration, or None."""
    found = document.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < 1e6:
        return None
    return float(found)


def _longest(events: Sequence[Document], kind: str) -> Optional[float]:
    """The longest of the recent events of a kind."""
    latest = [event for event in events if event["kind"] == kind][-RECENT:]
    return max((seconds for seconds in (_told(event, "seconds") for event in latest) if seconds), default=None)


def _unsaved(plan: Document) -> float:
    """The time that the first save may take."""
    return max((number(node, "checkpoint_bytes") for node in items(plan, "nodes")), default=0) / SLOWEST_DISK or 1.0
