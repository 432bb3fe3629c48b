# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who took part in a run and when: read from what the keepers wrote down (members.jsonl)."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document, words

EVENTS = "members.jsonl"
TAIL_BYTES = 1 << 18


class Absence(NamedTuple):
    """A host that was not in a run for a while."""

    host: str
    left: float
    why: str
    back: Optional[float]


def read_members(run_dir: str) -> List[Document]:
    """The newest events of a host's keeper."""
    try:
        with open(os.path.join(run_dir, EVENTS), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("time"), (int, float)):
            found.append(event)
    return found


def absences(events: Sequence[Mapping[str, Any]]) -> List[Absence]:
    """Who left and who came back, as one keeper saw it: by the generations in which it trained."""
    away: Dict[str, Absence] = {}
    found: List[Absence] = []
    members: List[str] = []
    broken, why = 0.0, ""
    for event in events:
        if event.get("what") != "training":
            if event.get("what") in ("ending", "idle") and not broken:
                broken, why = float(event["time"]), str(event.get("why") or "")
            continue
        present = words(event, "members")
        for host in members:
            if host not in present and host not in away:
                away[host] = Absence(host, broken or float(event["time"]), why, None)
        for host in present:
            if host in away:
                found.append(away.pop(host)._replace(back=float(event["time"])))
        members, broken, why = present, 0.0, ""
    return sorted([*found, *away.values()], key=lambda one: one.left)


def steps_repeated(events: Sequence[Mapping[str, Any]]) -> int:
    """Steps that were made again after restarts, by a rank's metrics."""
    done, repeated = 0, 0
    for event in events:
        step = event.get("step")
        if event.get("kind") == "start":
            resumed = event.get("resumed_from") or 0
            repeated += max(0, done - resumed) if isinstance(resumed, int) else 0
            done = resumed if isinstance(resumed, int) else 0
        elif event.get("kind") == "step" and isinstance(step, int):
            done = step + 1
    return repeated
