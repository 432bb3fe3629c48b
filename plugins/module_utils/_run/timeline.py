# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run's events in chronological order: starts, restarts, checkpoints, new shares, hosts leaving and returning, ends."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, TypedDict

from .._contract.document import words
from .._contract.keeper_states import FAILED, OVER, TRAINING
from .._kit.words import bytes_text, seconds_text
from .collected import CollectedRank, CollectedRun
from .health import Health, Seen
from .members import steps_repeated
from .metrics import Event, finite
from .sentences import gave_way_text


class Happening(TypedDict):
    """One event; the time may be unknown. The kind decides its mark on the loss curve, if any."""

    time: Optional[float]
    step: Any
    host: str
    severity: str
    text: str
    kind: str


def happenings(run: CollectedRun) -> List[Happening]:
    """Starts, restarts, checkpoints, differing weights, ends and findings, in chronological order."""
    found = [event for rank in run.ranks for event in (*_of_rank(rank), *saves(rank))]
    found += [*membership(run), *_of_findings(run.findings)]
    return sorted(found, key=lambda item: (item["time"] is not None, item["time"] or 0.0, str(item["host"])))


def saves(rank: CollectedRank) -> Iterator[Happening]:
    """All checkpoints of a rank in one line, at the time of the last."""
    found = [event for event in rank.files.events if event["kind"] == "checkpoint"]
    if found:
        last, took = found[-1], finite(found[-1].get("seconds"))
        text = "checkpoint, " if len(found) == 1 else "%d checkpoints; the last: " % len(found)
        text += bytes_text(finite(last.get("bytes"))) + (" in " + seconds_text(took) if took else "")
        at, step = finite(last.get("time")), last.get("step")
        yield Happening(time=at, step=step, host=rank.host, severity="info", text=text, kind="save")


def _of_rank(rank: CollectedRank) -> Iterator[Happening]:
    starts = repeated = 0
    last_start = max((index for index, event in enumerate(rank.files.events) if event["kind"] == "start"), default=-1)
    for index, event in enumerate(rank.files.events):
        kind, severity, text = event["kind"], "info", ""
        if kind == "start":
            starts += 1
            resumed = event.get("resumed_from")
            text = "started" if starts == 1 and resumed is None else "started again"
            text += " from step %s" % resumed if resumed is not None else ""
            again = steps_repeated(rank.files.events[: index + 1]) - repeated
            repeated += again
            text += "; %d steps are repeated" % again if again else ""
            text += kernels(event) if starts == 1 else ""
            # All ranks have the same.
            for notice in words(event, "notices") if rank.files.rank == 0 else ():
                at, step = finite(event.get("time")), event.get("step")
                yield Happening(time=at, step=step, host=rank.host, severity="warning", text=notice, kind="warning")
        elif kind == "shares" and rank.files.rank == 0:
            text = new_shares(event)
        elif kind == "digest" and event.get("identical") is False:
            severity, text = "error", "weights differ between the ranks"
        elif kind == "end":
            failed, survived = event.get("reason") == "error", index < last_start
            severity = "info" if not failed else "warning" if survived else "error"
            text = ": ".join(str(word) for word in (event.get("reason"), event.get("error")) if word)
            text += " (and was restarted)" if failed and survived else ""
        if text:
            # The first start has no mark on the curve.
            marked = "" if text.partition(";")[0] == "started" else str(kind)
            mark = MARKS.get(marked, "") if severity == "info" else severity
            at, step = finite(event.get("time")), event.get("step")
            yield Happening(time=at, step=step, host=rank.host, severity=severity, text=text, kind=mark)


def kernels(event: Event) -> str:
    """The kernels and vectors that a rank uses, as the end of a sentence about its start."""
    named, vectors = words(event, "kernels"), event.get("capability")
    return ("; kernels: " + ", ".join(named) if named else "") + ("; torch's vectors: %s" % vectors if vectors else "")


# Marks on the loss curve; errors and warnings use their severity.
MARKS = {"shares": "shares", "start": "start"}


def new_shares(event: Event) -> str:
    """The ranks' rows per step changed."""
    rows, before = (", ".join(map(str, listed(event, key))) for key in ("rows", "before"))
    speeds = ", ".join("%.0f" % (100 * one) for one in listed(event, "speeds") if finite(one) is not None)
    why = ", following their shares of the speed: %s %%" % speeds if speeds else ""
    return "the ranks now take %s rows (before: %s)%s" % (rows, before, why)


def listed(event: Event, key: str) -> List[Any]:
    """The value, if it is a list."""
    found = event.get(key)
    return found if isinstance(found, list) else []


def _of_findings(findings: Sequence[Event]) -> List[Happening]:
    """Findings of the last rehearsal, each once; it records no times."""
    found: Dict[Tuple[str, str], Happening] = {}
    for finding in findings:
        host, text = str(finding.get("host")), "%s: %s" % (finding.get("code"), finding.get("seen"))
        severity = str(finding.get("severity", "info"))
        found.setdefault(
            (host, text), Happening(time=None, step=None, host=host, severity=severity, text=text, kind="")
        )
    return list(found.values())


def membership(run: CollectedRun) -> List[Happening]:
    """Hosts that left and returned, and the members of each generation."""
    found: List[Happening] = []

    def add(time: float, host: str, severity: str, text: str) -> None:
        found.append(Happening(time=time, step=None, host=host, severity=severity, text=text, kind=""))

    newest = Health([Seen(rank.host, rank.run) for rank in run.ranks]).newest_record()
    for one in newest["away"] if newest else []:
        add(one["left"], one["host"], "warning", "left the run%s" % (" (%s)" % one["why"] if one["why"] else ""))
        if one["back"] is not None:
            add(one["back"], one["host"], "info", "back in the run")
    seen: Set[Tuple[Any, str]] = set()
    # Parts of a split know nothing of each other.
    for event in (event for rank in run.ranks for event in rank.files.members):
        generation = (event.get("generation"), ", ".join(words(event, "members")))
        if event.get("what") == TRAINING and generation not in seen:
            seen.add(generation)
            add(finite(event["time"]) or 0.0, "", "info", "generation %s: %s" % generation)
    for rank, said in ((rank, rank.run["membership"]) for rank in run.ranks):
        for gone in said["gave_way"] if said else []:
            add(gone["time"], gone["host"], "warning", gave_way_text(gone))
        if said and said["state"] in OVER and said["why"]:
            severity = "error" if said["state"] == FAILED else "info"
            add(said["since"], rank.host, severity, "%s: %s" % (said["state"], said["why"]))
    return found
