# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run's events in chronological order: starts, restarts, checkpoints, new shares, hosts leaving and returning, ends."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from .._contract.document import items, words
from .._contract.keeper_states import FAILED, OVER
from .._kit.words import bytes_text, seconds_text
from .collected import CollectedRank, CollectedRun
from .members import Absence, steps_repeated
from .metrics import Event, finite
from .sentences import gave_way_text

PAUSE_SECONDS = 30.0  # longer than between two events of a rank that trains


class Happening(NamedTuple):
    """One event; the time may be unknown. The kind decides its mark on the loss curve, if any."""

    time: Optional[float]
    host: str
    text: str
    severity: str = "info"
    step: Any = None
    kind: str = ""


def happenings(run: CollectedRun) -> List[Dict[str, Any]]:
    """Starts, restarts, checkpoints, differing weights, absences, ends and findings, in chronological order."""
    found = [event for rank in run.ranks for event in (*_of_rank(rank), *_saves(rank), *_of_keeper(rank))]
    # The rehearsal records no times.
    findings = [
        (str(one.get("host")), "%(code)s: %(seen)s" % one, str(one["severity"]))
        for one in items(run.rehearsal, "findings")
    ]
    found += [*_of_absences(run), *(Happening(None, *each) for each in dict.fromkeys(findings))]
    found.sort(key=lambda item: (item.time is not None, item.time or 0.0, item.host))
    return [event._asdict() for event in found]


def _saves(rank: CollectedRank) -> Iterator[Happening]:
    """All checkpoints of a rank in one line, at the time of the last."""
    found = [event for event in rank.files.events if event["kind"] == "checkpoint"]
    if found:
        last, took = found[-1], finite(found[-1].get("seconds"))
        text = "checkpoint, " if len(found) == 1 else "%d checkpoints; the last: " % len(found)
        text += bytes_text(finite(last.get("bytes"))) + (" in " + seconds_text(took) if took else "")
        yield Happening(finite(last.get("time")), rank.host, text, step=last.get("step"))


def _of_rank(rank: CollectedRank) -> Iterator[Happening]:
    events, starts, repeated = rank.files.events, 0, 0
    last_start = max((index for index, event in enumerate(events) if event["kind"] == "start"), default=-1)
    for index, event in enumerate(events):
        kind, severity, text, mark = event["kind"], "info", "", ""
        at, step = finite(event.get("time")), event.get("step")
        if kind == "start":
            starts, resumed = starts + 1, event.get("resumed_from")
            is_first = starts == 1 and resumed is None
            text = "started" if is_first else "started again"
            text += " from step %s" % resumed if resumed is not None else ""
            again = steps_repeated(events[: index + 1]) - repeated
            repeated += again
            text += "; %d steps are repeated" % again if again else ""
            mark = "" if is_first else "start"
            # All ranks have the same.
            for notice in words(event, "notices") if rank.files.rank == 0 else ():
                yield Happening(at, rank.host, notice, "warning", step, "warning")
        elif kind == "shares" and rank.files.rank == 0:
            shares = (found if isinstance(found, list) else [] for found in map(event.get, ("rows", "before")))
            text = "the ranks now take %s rows (before: %s)" % tuple(", ".join(map(str, rows)) for rows in shares)
            mark = "shares"
        elif kind == "digest" and event.get("identical") is False:
            severity, text = "error", "weights differ between the ranks"
        elif kind == "end":
            failed, survived = event.get("reason") == "error", index < last_start
            severity = "info" if not failed else "warning" if survived else "error"
            text = ": ".join(str(word) for word in (event.get("reason"), event.get("error")) if word)
            text += " (and was restarted)" if failed and survived else ""
        if text:
            yield Happening(at, rank.host, text, severity, step, mark if severity == "info" else severity)


def _absences(run: CollectedRun) -> List[Absence]:
    newest = run.health.newest_record()
    return newest["away"] if newest else []


def _of_absences(run: CollectedRun) -> Iterator[Happening]:
    for one in _absences(run):
        why = " (%s)" % one["why"] if one["why"] else ""
        yield Happening(one["left"], one["host"], "left the run" + why, "warning")
        if one["back"] is not None:
            yield Happening(one["back"], one["host"], "back in the run")


def _of_keeper(rank: CollectedRank) -> Iterator[Happening]:
    """When its keeper yielded to others, and the end that it decided."""
    said = rank.run["membership"]
    for gone in said["gave_way"] if said else []:
        yield Happening(gone["time"], gone["host"], gave_way_text(gone), "warning")
    if said and said["state"] in OVER and said["why"]:
        severity = "error" if said["state"] == FAILED else "info"
        yield Happening(said["since"], rank.host, "%s: %s" % (said["state"], said["why"]), severity)


# -- the hosts over time ------------------------------------------------------------------------------------------------


def _trained(events: List[Event]) -> List[List[float]]:
    """When a host trained: begin and end of all that it did without a longer pause."""
    found: List[List[float]] = []
    for event in events:
        at, took = finite(event.get("time")), 0.0 if event["kind"] == "end" else finite(event.get("seconds")) or 0.0
        if at is not None and found and at - took - found[-1][1] < PAUSE_SECONDS:
            found[-1][1] = max(found[-1][1], at)
        elif at is not None:
            found.append([at - took, at])
    return found


def hosts_over_time(run: CollectedRun, until: float) -> List[Dict[str, Any]]:
    """For each host when it trained, and when not: with the reason if it was away, with none if it waited."""
    found = []
    for rank in [*run.ranks, *run.former]:
        away = [
            (one["left"], one["back"] or until, one["why"] or "away")
            for one in _absences(run)
            if one["host"] == rank.host
        ]
        away += [(0.0, until, "no longer in the plan")] if rank in run.former else []
        spans, gaps = _trained(rank.files.events), []
        for (dummy, left), (back, dummy) in zip(spans, [*spans[1:], [until, until]]):
            if back - left >= PAUSE_SECONDS:
                gaps.append((left, back, next((why for one, other, why in away if one < back and other > left), None)))
        found.append({"host": rank.host, "trained": spans, "gaps": gaps})
    return found
