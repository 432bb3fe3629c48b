# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A self-contained HTML page from a run's collected files, optionally compared with other runs.

The page contains the metrics and draws them itself, without a network. As a report, the same files
make the same page, byte for byte.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from .._contract.document import Document, items, number, section, text, whole, words
from .._contract.keeper_states import FAILED, OVER
from .._kit.words import bytes_text, clock_time, seconds_text
from .collected import CollectedRank, CollectedRun, host_folder, load_run
from .members import Absence, steps_repeated
from .metrics import Event, finite
from .sentences import ended_lines, ends_text, gave_way_text, start_lines
from .state import CRASHED, RUNNING
from .table import is_identical
from .watching import ended

PageData = Dict[str, Any]  # a part of the page's data, as report.js reads it
Comparison = Callable[[Any, Any], str]  # of an Outlook with the RunState of each host

# Columns shown for every step; empty ones are dropped.
COLUMNS = (
    "loss",
    "seconds",
    "tokens_per_second",
    "forward_backward_seconds",
    "wait_seconds",
    "optimizer_seconds",
    "data_seconds",
    "bytes_sent",
    "memory_bytes",
    "rows",
)
PARTS = ("report.html", "report.css", "report.js")
PAUSE_SECONDS = 30.0  # longer than between two events of a rank that trains


# -- series ---------------------------------------------------------------------------------------------------------


def made_steps(events: Sequence[Event]) -> List[Event]:
    """The steps behind today's weights; a repeated step counts in its last version."""
    latest: Dict[int, Event] = {}
    for event in events:
        step = whole(event, "step")
        if event["kind"] == "start":
            latest = {made: latest[made] for made in latest if made < number(event, "resumed_from")}
        elif event["kind"] == "step" and step is not None:
            latest[step] = event
    return [latest[step] for step in sorted(latest)]


def columns(steps: Sequence[Event]) -> Dict[str, List[Any]]:
    """The steps as one list per figure."""
    table: Dict[str, List[Any]] = {"step": [step["step"] for step in steps]}
    for name in COLUMNS:
        values = [finite(step.get(name)) for step in steps]
        if any(value is not None for value in values):
            table[name] = values
    return table


def points(events: Sequence[Event], kind: str, *names: str) -> List[Document]:
    """All events of a kind, reduced to their step and these keys."""
    found = [[(name, event.get(name)) for name in ("step", *names)] for event in events if event["kind"] == kind]
    return [{name: one if isinstance(one, (int, float, str)) else None for name, one in values} for values in found]


# -- figures ----------------------------------------------------------------------------------------------------------


SUMMARY = "rank done steps val_bpb first_loss loss tokens_per_second_mean wait_seconds wait_share bytes_sent memory_bytes rows"


def summary(rank: CollectedRank) -> PageData:
    """One rank's line in the table."""
    figures = {name: value for name, value in rank.run.items() if name in SUMMARY.split()}
    is_unknown = all(rank.run[key] is None for key in ("exit_code", "ended", "end_reason"))
    end = "no end was recorded" if is_unknown else ended(rank.run).sentence
    end = "still running when this was collected" if rank.run["state"] == RUNNING else end
    return {**figures, "host": rank.host, "end": end}


def sentences(run: CollectedRun) -> List[str]:
    """The end of a run with a budget, its notices, and what was left out of its files."""
    runs = [rank.run for rank in run.ranks]
    ends = runs[0]["ends"]
    going = [ends_text(ends, runs[0]["share"], day_text)] if ends and runs[0]["end_reason"] is None else []
    return [*going, *ended_lines(runs, day_text), *start_lines(runs), *run.problems]


def notices(run: CollectedRun, missing: Sequence[str]) -> List[str]:
    """The trouble of a run: hosts without files, why it was given up, or who crashed."""
    first = run.health.gave_up()
    told = ["%s is part of the plan, but nothing was collected from it." % host for host in missing]
    if first:
        return [*told, "The run was given up: %s" % run.health.seen[first].run["error"]]
    return [*told, *("%s %s" % (rank.host, summary(rank)["end"]) for rank in run.ranks if rank.run["state"] == CRASHED)]


def day_text(at: float) -> str:
    """A point in time that reads the same on any day."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(clock_time(at)))


def plan_text(plan: Document) -> str:
    """The plan as JSON, without environment or other possible secrets."""
    told: Dict[str, Any] = {part: section(plan, part) for part in ("master", "model", "training", "data", "trainer")}
    keys = ("host", "rank", "address", "nic", "threads", "rows")
    told["nodes"] = [{key: node[key] for key in keys if key in node} for node in items(plan, "nodes")]
    return json.dumps(told, indent=1, sort_keys=True)


# -- what happened --------------------------------------------------------------------------------------------------------


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


# -- the page ---------------------------------------------------------------------------------------------------------


def rank_data(rank: CollectedRank) -> PageData:
    """A rank's data for the page."""
    events = rank.files.events
    return {
        "summary": summary(rank),
        "columns": columns(made_steps(events)),
        "evals": points(events, "eval", "val_bpb"),
        "checkpoints": points(events, "checkpoint"),
        "samples": points(events, "sample", "prompt", "text"),
        "lines": rank.files.lines[-40:] if rank.run["state"] == CRASHED else [],
    }


def page_data(run: CollectedRun, others: Sequence[CollectedRun], compare: Comparison) -> Document:
    """The page's data."""
    start = next((event for event in reversed(run.ranks[0].files.events) if event["kind"] == "start"), {})
    planned = {str(node.get("host")) for node in items(run.plan, "nodes")}
    missing = sorted(host for host in planned if host_folder(host) not in [rank.host for rank in run.ranks])
    times = [at for rank in run.ranks for event in rank.files.events if (at := finite(event.get("time"))) is not None]
    model = section(start, "model")
    depth, made = whole(section(model, "config"), "n_layer"), whole(section(model, "parameters"), "total")
    return {
        "run": run.name,
        "running": any(rank.run["state"] == RUNNING for rank in run.ranks),
        "digest": run.plan.get("digest"),
        "began": min(times, default=None),
        "as_of": max(times, default=None),
        "model": ", ".join(part for part in (depth and f"depth {depth}", made and f"{made:,} parameters") if part),
        "data": text(section(run.plan, "data"), "id"),
        "hosts": hosts_over_time(run, max(times, default=0.0)),
        "identical": None if missing else is_identical(run.health),
        "notices": notices(run, missing),
        "ranks": [rank_data(rank) for rank in run.ranks],
        "sentences": sentences(run),
        "happenings": happenings(run),
        "compared": compare(section(run.rehearsal, "prediction"), {rank.host: rank.run for rank in run.ranks}),
        "plan": plan_text(run.plan),
        "others": [{"run": one.name, "digest": one.plan.get("digest"), **rank_data(one.ranks[0])} for one in others],
    }


def render(data: Document, parts: Dict[str, str]) -> str:
    """Fill the template; the JSON cannot close its script element."""
    title = "%s - training report" % data["run"]
    embedded = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    embedded = embedded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    page = parts["report.html"].replace("{{ TITLE }}", re.sub(r"[^\w .-]", "", title))
    page = page.replace("{{ STYLE }}", parts["report.css"]).replace("{{ SCRIPT }}", parts["report.js"])
    return page.replace("{{ DATA }}", embedded)


def make_report(runs: Sequence[str], page: str, compare: Comparison = lambda expected, made: "") -> str:
    """The page about the first of these folders, compared with the rest; compare: its prediction with its ranks, in words."""
    loaded = [load_run(path) for path in runs]
    parts = {name: Path(page, name).read_text(encoding="utf-8") for name in PARTS}
    return render(page_data(loaded[0], loaded[1:], compare), parts)
