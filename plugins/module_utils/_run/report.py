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
from typing import Any, Dict, List, Sequence

from .._contract.document import Document, items, number, section, whole
from .._kit.words import clock_time
from .collected import CollectedRank, CollectedRun, host_folder, load_run
from .health import Health, Seen
from .metrics import Event, finite
from .sentences import ended_lines, ends_text, start_lines
from .state import CRASHED, RUNNING, RunState
from .timeline import happenings

PageData = Dict[str, Any]  # a part of the page's data, as report.js reads it

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


def end_text(run: RunState) -> str:
    """How a rank's newest attempt ended."""
    if run["state"] == RUNNING:
        return "still running when this was collected"
    if run["exit_code"] is None and run["ended"] is None and run["end_reason"] is None:
        return "no end was recorded"
    if run["state"] == CRASHED:
        return "crashed: %s" % (run["error"] or run["end_error"] or "code %s" % run["exit_code"])
    return "%s: %s" % (run["state"], run["cause"]) if run["cause"] else run["state"]


SUMMARY = (
    "rank done steps val_bpb first_loss loss tokens_per_second_mean wait_seconds wait_share bytes_sent memory_bytes rows"
    " identical digest attempts"
)


def summary(rank: CollectedRank) -> PageData:
    """One rank's line in the table."""
    figures = {name: value for name, value in rank.run.items() if name in SUMMARY.split()}
    return {**figures, "host": rank.host, "end": end_text(rank.run)}


def compared(run: CollectedRun) -> List[List[Any]]:
    """Rows of (what, host, expected, measured), if both are known."""
    start = next((event for rank in run.ranks for event in rank.files.events if event["kind"] == "start"), {})
    planned = section(section(run.plan, "model"), "parameters").get("total")
    made = section(section(start, "model"), "parameters").get("total")
    first, expected = run.ranks[0].run, run.prediction
    rows: List[List[Any]] = [
        ["parameters", "", finite(planned), finite(made)],
        ["tokens per second", "", finite(expected.get("tokens_per_second")), first["tokens_per_second_mean"]],
        ["seconds per step", "", finite(expected.get("step_seconds")), first["step_seconds"]],
    ]
    nodes = {number(node, "rank"): node for node in items(run.plan, "nodes")}
    for host, figures in ((rank.host, rank.run) for rank in run.ranks):
        node, waits = nodes.get(figures["rank"] or 0, {}), figures["wait_seconds"]
        waited = waits / figures["steps_counted"] if waits is not None else None
        rows += [
            ["seconds waited per step", host, section(expected, "wait_seconds").get(host), waited],
            ["bytes sent per step", host, expected.get("bytes_sent"), figures["bytes_sent"]],
            ["bytes of memory", host, node.get("memory_bytes"), figures["memory_bytes"]],
        ]
    return [row for row in rows if row[2] is not None and row[3] is not None]


def sentences(run: CollectedRun) -> List[str]:
    """The end of a run with a budget, its notices, and what was left out of its files."""
    runs = [rank.run for rank in run.ranks]
    ends = runs[0]["ends"]
    going = [ends_text(ends, runs[0]["share"], day_text)] if ends and runs[0]["end_reason"] is None else []
    return [*going, *ended_lines(runs, day_text), *start_lines(runs), *run.problems]


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
    events = rank.files.events
    return {
        "summary": summary(rank),
        "columns": columns(made_steps(events)),
        "evals": points(events, "eval", "val_bpb"),
        "checkpoints": points(events, "checkpoint", "bytes", "seconds"),
        "samples": points(events, "sample", "prompt", "text"),
        "lines": rank.files.lines[-40:] if rank.run["state"] == CRASHED else [],
    }


def other_data(run: CollectedRun) -> Document:
    """Data of a run to compare with."""
    first = rank_data(run.ranks[0])
    table = {name: one for name, one in first["columns"].items() if name in ("step", "loss", "tokens_per_second")}
    kept = {"summary": first["summary"], "columns": table, "evals": first["evals"]}
    return {"run": run.name, "digest": run.plan.get("digest"), **kept}


def page_data(run: CollectedRun, others: Sequence[CollectedRun] = ()) -> Document:
    """The page's data."""
    start = next((event for event in reversed(run.ranks[0].files.events) if event["kind"] == "start"), {})
    planned = [str(node.get("host")) for node in items(run.plan, "nodes")]
    health = Health([Seen(rank.host, rank.run) for rank in run.ranks])
    first_failed = health.gave_up()
    times = [finite(event.get("time")) or 0.0 for rank in run.ranks for event in rank.files.events]
    return {
        "run": run.name,
        "running": any(rank.run["state"] == RUNNING for rank in run.ranks),
        "stage": run.ranks[0].run["stage"],
        "digest": run.plan.get("digest"),
        "as_of": max(times, default=None),
        "world": run.plan.get("world") or start.get("world") or len(run.ranks),
        "given_up": health.seen[first_failed].run["membership"]["why"] if first_failed else "",
        "missing": sorted(host for host in planned if host_folder(host) not in health.seen),
        "dtype": start.get("dtype"),
        "dtype_reason": start.get("dtype_reason"),
        "ranks": [rank_data(rank) for rank in run.ranks],
        "sentences": sentences(run),
        "happenings": happenings(run),
        "compared": compared(run),
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
