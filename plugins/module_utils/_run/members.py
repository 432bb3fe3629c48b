# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who took part in a run and when, from the files of a host's keeper (members.json, members.jsonl)."""

from __future__ import annotations

import os
from typing import Dict, List, Optional, Sequence, TypedDict

from .._contract.document import Document, items, number, section, text, whole, words
from .._contract.keeper_states import ENDING, GAVE_WAY, IDLE, LOST, RESTING, STATES, TRAINING
from .._contract.run_folder import MEMBER_EVENTS
from .metrics import Event, finite, json_lines, read_tail

TAIL_BYTES = 1 << 18


class Absence(TypedDict):
    """A host's absence from a run, and the step from which the others continued."""

    host: str
    left: float
    why: str
    back: Optional[float]
    step: Optional[int]


class GaveWay(TypedDict):
    """This host set its checkpoints aside, because another part of a split run had made more steps."""

    time: float
    host: str
    why: str


class Membership(TypedDict):
    """Who trains, from a keeper's last record."""

    state: Optional[str]  # `training`, or what it does while it waits for other hosts
    generation: Optional[int]  # number of its generation
    members: List[str]
    why: Optional[str]  # reason of the state
    since: float  # when the state began
    waits: Optional[str]  # the host for which it waits
    rests_since: Optional[float]  # since when its machine is in use (ddp_polite guest)
    hears: List[str]  # the hosts that it hears
    hosts: List[str]  # all hosts of the run
    grace: float  # seconds that it gives a missing host
    away: List[Absence]  # hosts that left
    repeated: int  # steps repeated after restarts
    gave_way: List[GaveWay]


def membership_of(
    record: Document, events: Sequence[Document], started: Optional[float], metrics: Sequence[Event], plan: Document
) -> Optional[Membership]:
    """The last record of this session's keeper (members.json, which is not collected) with its events; None if it has none."""
    newest = next((event for event in reversed(events) if event.get("what") in STATES), {})
    record = record or ({**events[-1], "state": newest.get("what"), "since": events[-1]["time"]} if newest else {})
    since, state = finite(record.get("since")), text(record, "state")
    if since is None or (started is not None and since < started):
        return None
    return {
        "state": state,
        "generation": whole(record, "generation"),
        "members": words(record, "members"),
        # The record is of the newest event, which may concern another host; that of the state has its reason.
        "why": text(newest, "why") if state == newest.get("what") else text(record, "why"),
        "since": since,
        "waits": text(record, "waits"),
        "rests_since": rests_since(events),
        "hears": words(record, "hears"),
        "hosts": [str(node.get("host")) for node in items(plan, "nodes")],
        "grace": finite(section(plan, "keeper").get("grace_seconds")) or 0.0,
        "away": absences(events),
        "repeated": steps_repeated(metrics),
        "gave_way": [
            {"time": _time(event), "host": str(event.get("host")), "why": str(event.get("why") or "")}
            for event in events
            if event.get("what") == GAVE_WAY
        ],
    }


def read_members(run_dir: str) -> List[Document]:
    """A keeper's newest events."""
    newest = json_lines(read_tail(os.path.join(run_dir, MEMBER_EVENTS), TAIL_BYTES))
    return [event for event in newest if finite(event.get("time")) is not None]


def _time(event: Document) -> float:
    return finite(event["time"]) or 0.0


def rests_since(events: Sequence[Document]) -> Optional[float]:
    """When the host that wrote these left because its machine is in use; None if it did not."""
    since: Optional[float] = None
    for event in events:
        if event.get("what") in STATES:
            since = (since or _time(event)) if event["what"] == RESTING else None
    return since


def absences(events: Sequence[Document]) -> List[Absence]:
    """Who left and returned, as one keeper saw it from its generations."""
    away: Dict[str, Absence] = {}
    found: List[Absence] = []
    members: List[str] = []
    lost: Dict[str, str] = {}
    broken, why, by_rank = 0.0, "", False
    for event in events:
        what = event.get("what")
        if what == LOST:
            lost[str(event.get("host"))] = str(event.get("why") or "")
        if what in (ENDING, IDLE) and not broken:
            # If the keeper's own rank ended first, the reason was the loss of another one.
            broken, why, by_rank = _time(event), str(event.get("why") or ""), what == IDLE
        if what != TRAINING:
            continue
        present, left = words(event, "members"), broken or _time(event)
        for host in members:
            if host not in present and host not in away:
                reason = lost.get(host, why) if by_rank else why
                away[host] = {"host": host, "left": left, "why": reason, "back": None, "step": whole(event, "steps")}
        for host in present:
            if host in away:
                found.append({**away.pop(host), "back": _time(event)})
        members, broken, why, lost = present, 0.0, "", {}
    return sorted([*found, *away.values()], key=lambda one: one["left"])


def steps_repeated(events: Sequence[Document]) -> int:
    """Steps repeated after restarts, from a rank's metrics."""
    done, repeated = 0, 0
    for event in events:
        if event.get("kind") == "start":
            resumed = number(event, "resumed_from")
            repeated += max(0, done - resumed)
            done = resumed
        elif event.get("kind") == "step" and whole(event, "step") is not None:
            done = number(event, "step") + 1
    return repeated
