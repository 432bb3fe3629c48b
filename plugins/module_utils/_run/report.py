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
from typing import Any, Dict, List, Optional, Sequence

from .._contract.document import Document, items, number, section, text, whole
from .._contract.keeper_states import FAILED
from .._kit.words import clock_time
from .collected import CollectedRank, CollectedRun, host_folder, load_run
from .ending import ended_text, ends_text
from .members import last_word
from .metrics import Event, describe_events, finite, start_lines
from .state import CRASHED, cause_text, error_text, host_state, stage_of
from .timeline import happenings

# What each host adds, from their run states: host -> tokens per second without it.
# A part of the page's data, as report.js reads it.
PageData = Dict[str, Any]

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
    """All events of a kind, reduced to these keys."""
    found = [
        [(name, event.get(name)) for name in ("step", "time", *names)] for event in events if event["kind"] == kind
    ]
    return [{name: one if isinstance(one, (int, float, str)) else None for name, one in values} for values in found]


# -- figures ----------------------------------------------------------------------------------------------------------


def rank_end(rank: CollectedRank) -> str:
    """How this rank's newest attempt ended, from the files."""
    figures, said = describe_events(rank.events), last_word(rank.members)
    if rank.session and rank.session.get("ended") is None and (said or figures["end_reason"] is None):
        return "still running when this was collected"
    if not rank.session and figures["end_reason"] is None:
        return "no end was recorded"
    state = host_state(rank.session, False, figures, bool(rank.events), said)
    error = error_text(state, rank.session, figures, rank.lines, said) or figures["end_error"]
    why = cause_text(state, rank.session, said)
    if state == CRASHED:
        return "crashed: %s" % (error or "code %s" % rank.session.get("exit_code"))
    return "%s: %s" % (state, why) if why else state


def why_given_up(ranks: Sequence[CollectedRank]) -> str:
    """Why the keepers gave up; empty if they did not."""
    last = [(finite(rank.members[-1]["time"]) or 0.0, last_word(rank.members)) for rank in ranks if rank.members]
    failed = [(time, said.why or "") for time, said in last if said and said.state == FAILED]
    return min(failed, default=(0.0, ""))[1]


def summary(rank: CollectedRank, steps: Sequence[Event]) -> PageData:
    """One rank's line in the table."""
    figures = describe_events(rank.events)
    kept = ("done", "steps", "val_bpb", "wait_share", "rows", "identical", "digest", "attempts")
    return {
        **{name: value for name, value in figures.items() if name in kept},
        "host": rank.host,
        "rank": rank.rank,
        "end": rank_end(rank),
        "first_loss": finite(steps[0].get("loss")) if steps else None,
        "last_loss": finite(steps[-1].get("loss")) if steps else None,
        "tokens_per_second": figures["tokens_per_second_mean"],
        "wait_seconds": sum(finite(step.get("wait_seconds")) or 0.0 for step in steps) if steps else None,
        "bytes_sent": sum(int(finite(step.get("bytes_sent")) or 0) for step in steps) if steps else None,
        "memory_bytes": max((int(finite(step.get("memory_bytes")) or 0) for step in steps), default=None),
    }


def compared(run: CollectedRun, ranks: Sequence[PageData]) -> List[List[Any]]:
    """Rows of (what, host, expected, measured), if both are known."""
    start = next((event for rank in run.ranks for event in rank.events if event["kind"] == "start"), {})
    planned = section(section(run.plan, "model"), "parameters").get("total")
    made = section(section(start, "model"), "parameters").get("total")
    figures, expected = describe_events(run.ranks[0].events), run.prediction
    rows: List[List[Any]] = [
        ["parameters", "", finite(planned), finite(made)],
        ["tokens per second", "", finite(expected.get("tokens_per_second")), figures["tokens_per_second_mean"]],
        ["seconds per step", "", finite(expected.get("step_seconds")), figures["step_seconds"]],
    ]
    nodes = {number(node, "rank"): node for node in items(run.plan, "nodes")}
    for rank in ranks:
        summary, table = rank["summary"], rank["columns"]
        host, node = summary["host"], nodes.get(summary["rank"], {})
        waits = section(expected, "wait_seconds").get(host)
        rows += [
            ["seconds waited per step", host, waits, mean_of(table, "wait_seconds")],
            ["bytes sent per step", host, expected.get("bytes_sent"), mean_of(table, "bytes_sent")],
            ["bytes of memory", host, node.get("memory_bytes"), summary["memory_bytes"]],
        ]
    return [row for row in rows if row[2] is not None and row[3] is not None]


def mean_of(table: Dict[str, List[Any]], name: str) -> Optional[float]:
    """The mean of a column over the steps that have it."""
    values = [value for value in table.get(name, []) if value is not None]
    return sum(values) / len(values) if values else None


def budget_lines(run: CollectedRun) -> List[str]:
    """The end of a run with a budget."""
    first = run.ranks[0]
    figures, given = describe_events(first.events), text(section(run.plan, "training"), "timed")
    ends, updated = figures["ends"], figures["updated"]
    if ends is None or updated is None:
        return []
    if figures["end_reason"] is not None:
        return [ended_text(updated, ends, given, day_text)]
    return [ends_text(ends, figures["share"], day_text)]


def _start_lines(run: CollectedRun) -> List[str]:
    figures = [describe_events(rank.events) for rank in run.ranks]
    return start_lines((notice for one in figures for notice in one["notices"]), figures[0]["epoch"])


def day_text(at: float) -> str:
    """A point in time that reads the same on any day."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(clock_time(at)))


def plan_rows(plan: Document) -> List[List[str]]:
    """The plan as pairs of words, without environment or other possible secrets."""
    if not plan:
        return []
    rows = [["digest", str(plan.get("digest"))]]
    master = section(plan, "master")
    rows.append(["master", "%s, %s port %s" % (master.get("host"), master.get("address"), master.get("port"))])
    for part in ("model", "training", "data", "trainer"):
        for key, value in sorted(section(plan, part).items()):
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                rows.append(["%s: %s" % (part, key.replace("_", " ")), str(value)])
    for node in items(plan, "nodes"):
        words = [
            "%s %s" % (key.replace("_", " "), node[key])
            for key in ("address", "nic", "device", "dtype", "threads", "rows")
            if key in node
        ]
        rows.append(["rank %s: %s" % (node.get("rank"), node.get("host")), ", ".join(words)])
    return rows


# -- the page ---------------------------------------------------------------------------------------------------------


def rank_data(rank: CollectedRank) -> PageData:
    """A rank's data for the page."""
    steps = made_steps(rank.events)
    return {
        "summary": summary(rank, steps),
        "columns": columns(steps),
        "evals": points(rank.events, "eval", "val_bpb"),
        "checkpoints": points(rank.events, "checkpoint", "bytes", "seconds"),
        "samples": points(rank.events, "sample", "prompt", "text"),
        "lines": rank.lines[-40:] if rank_end(rank).startswith(CRASHED) else [],
    }


def other_data(run: CollectedRun) -> Document:
    """Data of a run to compare with."""
    first = run.ranks[0]
    steps = made_steps(first.events)
    table = columns(steps)
    return {
        "run": run.name,
        "digest": run.plan.get("digest"),
        "summary": summary(first, steps),
        "columns": {name: table[name] for name in ("step", "loss", "tokens_per_second") if name in table},
        "evals": points(first.events, "eval", "val_bpb"),
    }


def page_data(
    run: CollectedRun,
    others: Sequence[CollectedRun] = (),
) -> Document:
    """The page's data."""
    ranks = [rank_data(rank) for rank in run.ranks]
    start = next((event for event in reversed(run.ranks[0].events) if event["kind"] == "start"), {})
    planned = [str(node.get("host")) for node in items(run.plan, "nodes")]
    present = {rank.host for rank in run.ranks}
    times = [finite(event.get("time")) or 0.0 for rank in run.ranks for event in rank.events]
    return {
        "run": run.name,
        "stage": stage_of(run.plan),
        "digest": run.plan.get("digest"),
        "as_of": max(times, default=None),
        "world": run.plan.get("world") or start.get("world") or len(ranks),
        "given_up": why_given_up(run.ranks),
        "missing": sorted(host for host in planned if host_folder(host) not in present),
        "dtype": start.get("dtype"),
        "dtype_reason": start.get("dtype_reason"),
        "ranks": ranks,
        "sentences": [*budget_lines(run), *_start_lines(run), *run.problems],
        "happenings": happenings(run),
        "compared": compared(run, ranks),
        "plan": plan_rows(run.plan),
        "others": [other_data(other) for other in others],
    }


def render(data: Document, parts: Dict[str, str]) -> str:
    """Fill the template; the JSON cannot close its script element."""
    title = "%s - training report" % data["run"]
    embedded = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    embedded = embedded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    page = parts["report.html"].replace("{{ TITLE }}", re.sub(r"[^\w .-]", "", title))
    page = page.replace("{{ STYLE }}", parts["report.css"]).replace("{{ SCRIPT }}", parts["report.js"])
    return page.replace("{{ DATA }}", embedded)


def make_report(runs: Sequence[str], page: str) -> str:
    """The page about the first of these folders, compared with the rest."""
    loaded = [load_run(path) for path in runs]
    parts = {name: Path(page, name).read_text(encoding="utf-8") for name in PARTS}
    return render(page_data(loaded[0], loaded[1:]), parts)
