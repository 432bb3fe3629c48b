# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts about a run: the closing table, the status screen, and the live line.

All figures come from run_info, which reads the metrics; unknown values are a dash.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .._contract.document import number, section
from .._kit.words import (
    DASH,
    bytes_text,
    clock_text,
    fitting_table,
    loss_text,
    named,
    seconds_text,
    share_text,
    speed_text,
)
from . import membership_view
from .ending import ended_text, ends_text
from .metrics import start_lines
from .stalls import (
    NO_HEARTBEAT,
    STALLED,
    ObservedRank,
    StallLimits,
    seconds_without_cpu,
    stall_marks,
    standstill,
    state_of,
    waits_for_others,
)

FEW_HOSTS = 4
Row = Mapping[str, Any]  # {"host": ..., "run": from run_info, "verdict"/"sentence": from run_watch}


# -- facts over all ranks -----------------------------------------------------------------------------------------------


def by_rank(rows: Sequence[Row]) -> List[Row]:
    """Sort by rank; hosts without a rank last."""
    return sorted(rows, key=lambda row: (row["run"].get("rank") is None, row["run"].get("rank") or 0, row["host"]))


def first_known(rows: Sequence[Row], key: str) -> Any:
    """A run-wide value from the first rank that has it."""
    return next((row["run"][key] for row in by_rank(rows) if row["run"].get(key) is not None), None)


def slowest(rows: Sequence[Row]) -> Optional[Row]:
    """The rank that the others wait for, which waits least itself; None if nobody waits much."""
    known = [row for row in rows if row["run"].get("wait_share") is not None]
    if len(known) < 2 or any(row["run"].get("state") not in ("running", "finished") for row in rows):
        return None
    least = min(known, key=lambda row: row["run"]["wait_share"])
    most = max(known, key=lambda row: row["run"]["wait_share"])
    return least if most["run"]["wait_share"] - least["run"]["wait_share"] > 0.05 else None


def identical_text(rows: Sequence[Row]) -> str:
    """Whether the weights were identical, in words."""
    said = [row["run"].get("identical") for row in rows]
    ranks = first_known(rows, "world") or len(rows)
    on_ranks = "on both ranks" if ranks == 2 else "on all %d ranks" % ranks
    digest = first_known(rows, "digest")
    digests = {row["run"].get("digest") for row in rows if row["run"].get("digest")}
    if False in said or (len(digests) > 1 and all(row["run"].get("state") == "finished" for row in rows)):
        return "weights NOT identical %s: the ranks diverged" % on_ranks
    if ranks == 1:
        return "only one rank, nothing to compare"
    if len(rows) < ranks or None in said:
        return "weights not compared %s" % on_ranks
    return "weights identical %s%s" % (on_ranks, " (digest %s)" % str(digest)[:16] if digest else "")


# -- the closing table ---------------------------------------------------------------------------------------------------

CLOSING = ("host", "rank", "state", "steps", "rows", "first loss", "last loss", "val bpb", "tok/s", "waited", "memory")


def tells_nothing(run: Mapping[str, Any]) -> bool:
    """Other trainers report progress only on the first rank."""
    silent = run.get("step") is None and run.get("phase") is None and run.get("heartbeat_age") is None
    return silent and not run.get("done") and run.get("state") in ("running", "finished")


def steps_text(run: Mapping[str, Any]) -> str:
    """Finished and planned steps."""
    return "%s/%s" % (DASH if tells_nothing(run) else run.get("done") or 0, run.get("steps"))


def _known_text(run: Mapping[str, Any], key: str) -> str:
    return DASH if run.get(key) is None else str(run[key])


def changed_rows_lines(rows: Sequence[Row]) -> List[str]:
    """Lines about changed shares, if any."""
    changed = {row["host"]: row["run"] for row in rows if row["run"].get("rows_changed") is not None}
    if not changed:
        return []
    last = max(run["rows_changed"] for run in changed.values())
    parts = ["%s %s -> %s" % (host, run["rows_before"], run["rows"]) for host, run in changed.items()]
    return ["  shares of rows changed while training, last at step %s: %s" % (last, ", ".join(parts))]


def _closing_row(row: Row) -> List[str]:
    run = row["run"]
    waited = seconds_text(run.get("wait_seconds"))
    return [
        row["host"],
        _known_text(run, "rank"),
        str(row.get("verdict") or run.get("state") or "not seen"),
        steps_text(run) if run.get("steps") else str(run.get("done") or DASH),
        _known_text(run, "rows"),
        loss_text(run.get("first_loss")),
        "not a number" if run.get("diverged") else loss_text(run.get("last_loss")),
        loss_text(run.get("val_bpb")),
        speed_text(run.get("tokens_per_second_mean")),
        waited if run.get("wait_share") is None else "%s (%s)" % (waited, share_text(run["wait_share"])),
        bytes_text(run.get("memory_bytes")),
    ]


def closing_table(rows: Sequence[Row], width: int = 0) -> str:
    """The closing table: one line per rank, then facts about all ranks; width 0 means no limit."""
    rows = by_rank(rows)
    lines = ["run %s" % (first_known(rows, "run") or DASH)]
    lines += fitting_table(CLOSING, [_closing_row(row) for row in rows], width)
    away = [row for row in rows if "away" in (row.get("verdict"), row["run"].get("state"))]
    lines += ["  %s %s" % (row["host"], row["sentence"]) for row in away if row.get("sentence")]
    lines += ["  " + line for line in membership_view.history(runs_of(rows))]
    rows = [row for row in rows if row not in away]
    if any(row["run"].get("step") is not None for row in rows):
        lines.append("  " + identical_text(rows))
        slow = slowest(rows)
        if slow is not None:
            lines.append("  the others wait for %s, which waits least" % slow["host"])
        lines += changed_rows_lines(rows)
    lines += ["  " + line for line in [*budget_lines(rows), *_start_lines(rows)]]
    return "\n".join([*lines, *_checkpoint_lines(rows), *_previous_lines(rows)])


def _checkpoint_lines(rows: Sequence[Row]) -> List[str]:
    """Where the checkpoints are; hosts with the same path share a line."""
    places: Dict[Tuple[Any, str], List[str]] = {}
    for row in rows:
        checkpoint = row["run"].get("checkpoint")
        if checkpoint and checkpoint.get("path"):
            place = (checkpoint["step"], os.path.dirname(str(checkpoint["path"])))
            places.setdefault(place, []).append(row["host"])
    return [
        "  checkpoint of step %s on %s: %s" % (step, named(hosts), folder) for (step, folder), hosts in places.items()
    ]


def _previous_lines(rows: Sequence[Row]) -> List[str]:
    """Where a fresh start put the earlier outputs."""
    lines = []
    for row in rows:
        kept = row["run"].get("previous")
        if isinstance(kept, Mapping):
            newest = kept.get("checkpoint")
            what = "no checkpoint" if newest is None else "checkpoints up to step %s" % newest
            lines.append("  set aside earlier on %s: %s (%s)" % (row["host"], kept.get("path"), what))
    return lines


def counted_text(counts: Mapping[str, int]) -> str:
    """A count per host; with many hosts, equal counts are merged."""
    hosts_by_count: Dict[int, List[str]] = {}
    for host, count in sorted(counts.items()):
        hosts_by_count.setdefault(count, []).append(host)
    if len(counts) <= FEW_HOSTS or max(map(len, hosts_by_count.values())) <= 2:
        return ", ".join("%s %d" % (host, count) for host, count in sorted(counts.items()))
    parts: List[str] = []
    for count, hosts in hosts_by_count.items():
        merged = ["%d hosts %d each" % (len(hosts), count)]
        parts += merged if len(hosts) > 2 else ["%s %d" % (host, count) for host in hosts]
    return ", ".join(parts)


# -- the status screen ----------------------------------------------------------------------------------------------------

HOUR = 3600.0
STATUS = (
    "host",
    "rank",
    "state",
    "step",
    "rows",
    "loss",
    "val bpb",
    "tok/s",
    "mean tok/s",
    "waiting",
    "memory",
    "checkpoint",
    "left",
)


def state_text(run: Mapping[str, Any], mark: Optional[str] = None) -> str:
    """The state with the most important detail; `mark` is from stalls.stall_marks."""
    state = str(state_of(run) or "not reached")
    if state in ("absent", "prepared"):
        return "never started" if state == "absent" else "prepared, not started"
    if membership_view.without_keeper(run):
        return "no keeper"
    if state == "crashed":
        return "crashed (code %s)" % run["exit_code"] if run.get("exit_code") is not None else "crashed"
    if mark == NO_HEARTBEAT:
        return "no heartbeat %s" % since_text(run["heartbeat_age"])
    idle = run.get("idle_seconds") if run.get("idle_seconds") is not None else run.get("session_age")
    if mark == STALLED and idle is not None:
        return "stalled %s" % since_text(idle)
    if membership_view.rests(run):
        return "away"
    if state == "running" and waits_for_others(run):
        return "waiting (%s)" % run["membership"]["state"]
    if state == "running" and run.get("step") is None:
        return "starting%s" % (" (%s)" % run["phase"] if run.get("phase") else "")
    still = standstill(run)
    if still is not None:
        phase = " (%s)" % run["phase"] if run.get("phase") else ""
        return "no step %s%s" % (since_text(still), phase)
    return state


def training_rows(rows: Sequence[Row]) -> List[Row]:
    """The rows of the training hosts; all without keepers."""
    found = membership_view.parts(runs_of(rows))
    members = [row for row in rows if found and row["host"] in found[0].members]
    return members or list(rows)


def runs_of(rows: Sequence[Row]) -> Dict[str, Mapping[str, Any]]:
    """The runs by host."""
    return {row["host"]: row["run"] for row in rows}


def marks(rows: Sequence[Row]) -> Dict[str, str]:
    """Judge whether a run's hosts make progress, from one poll each."""
    limits = StallLimits(timeout=first_known(rows, "timeout_seconds") or StallLimits().timeout)
    ranks: Dict[str, ObservedRank] = {}
    for row in rows:
        run, silent = row["run"], 0.0 if row.get("reachable", True) else math.inf
        ranks[row["host"]] = ObservedRank(run, seconds_without_cpu(run), run.get("session_age") or 0.0, silent)
    return stall_marks(ranks, limits)


def _status_row(row: Row, mark: Optional[str]) -> List[str]:
    run = row["run"]
    checkpoint = run.get("checkpoint") or {}
    # Only a rank that makes steps has a speed.
    steps_now = run.get("state") == "running" and not waits_for_others(run) and standstill(run) is None
    return [
        row["host"],
        _known_text(run, "rank"),
        state_text(run, mark) if row.get("reachable", True) else "no answer",
        steps_text(run) if run.get("steps") else DASH,
        _known_text(run, "rows"),
        "not a number" if run.get("diverged") else loss_text(run.get("loss") or run.get("last_loss")),
        loss_text(run.get("val_bpb")),
        speed_text(run.get("tokens_per_second")) if steps_now else DASH,
        speed_text(run.get("tokens_per_second_mean")),
        share_text(run.get("wait_share")),
        bytes_text(run.get("memory_bytes")),
        DASH if checkpoint.get("step") is None else "step %s" % checkpoint["step"],
        DASH if run.get("state") != "running" or mark else seconds_text(run.get("eta_seconds")),
    ]


def since_text(seconds: float) -> str:
    """Elapsed time; beyond hours, the start time."""
    return "for %s" % seconds_text(seconds) if seconds < HOUR else "since %s" % clock_text(time.time() - seconds)


def course_text(rows: Sequence[Row], now: float, stalls: bool = False) -> str:
    """When the run began and ended, or its time left."""
    runs = [row["run"] for row in rows]
    began = min((run["started"] for run in runs if run.get("started")), default=None)
    if began is None:
        return ""
    if any(run.get("state") == "running" for run in runs):
        eta = None if stalls else first_known(rows, "eta_seconds")
        left = "" if eta is None else ", %s left, until about %s" % (seconds_text(eta), clock_text(now + eta))
        if first_known(rows, "ends") is not None and eta is not None:
            left = ", " + ends_text(now + eta, first_known(rows, "share"))
        return ", began %s, %s ago%s" % (clock_text(began), seconds_text(max(0.0, now - began)), left)
    ended = max((run["ended"] for run in runs if run.get("ended")), default=None)
    if ended is None:
        return ", began %s" % clock_text(began)
    return ", took %s, ended %s, %s ago" % (
        seconds_text(max(0.0, ended - began)),
        clock_text(ended),
        seconds_text(max(0.0, now - ended)),
    )


def budget_lines(rows: Sequence[Row]) -> List[str]:
    """When a run with a budget finished."""
    runs = (row["run"] for row in by_rank(rows))
    over = next((run for run in runs if run.get("end_reason") == "finished" and run.get("ends")), None)
    return [ended_text(over["updated"], over["ends"], over["timed"])] if over else []


def _start_lines(rows: Sequence[Row]) -> List[str]:
    notices = (notice for row in rows for notice in row["run"].get("notices") or ())
    return start_lines(notices, first_known(rows, "epoch"))


def of_newest_training(rows: Sequence[Row]) -> List[Row]:
    """Without hosts that hold an older training of the run."""
    numbers = [number(section(row["run"], "training"), "number") for row in rows]
    return [row for row, one in zip(rows, numbers) if not one or one == max(numbers)]


def _other_runs(rows: Sequence[Row]) -> List[str]:
    """Hosts whose newest run is another one, or who hold an older training."""
    texts = []
    newer: Dict[str, List[str]] = {}
    for row in rows:
        if row.get("newest_run") and row["newest_run"] != row["run"].get("run"):
            newer.setdefault(str(row["newest_run"]), []).append(row["host"])
    for name, hosts in newer.items():
        texts.append("%s: the newest run there is %s (-e ddp_run=%s shows that one)" % (", ".join(hosts), name, name))
    current = of_newest_training(rows)
    older = "%s: holds an older training of this run, %s; the next start says how to set it aside"
    for row in rows:
        if row not in current:
            saved = row["run"].get("saved")
            what = "without a checkpoint" if saved is None else "with checkpoints up to step %d" % saved
            texts.append(older % (row["host"], what))
    return texts


def _headline(rows: Sequence[Row], stalls: bool) -> str:
    name = first_known(rows, "run")
    if all(row["run"].get("state") is None for row in rows):
        return "no host answers"
    if name and any(row["run"].get("state") not in (None, "absent") for row in rows):
        return "run %s%s" % (name, course_text(of_newest_training(rows), time.time(), stalls))
    return "no run%s on any host" % (" %s" % name if name else "")


class StatusScreen(NamedTuple):
    """The status: a headline, a table, and one sentence per problem."""

    headline: str
    heads: Sequence[str]
    cells: Sequence[Sequence[Any]]
    sentences: List[str]


def status_screen(rows: Sequence[Row]) -> StatusScreen:
    """The parts of the status; table rows are in rank order."""
    rows = by_rank(rows)
    current = of_newest_training(rows)
    runs = runs_of(current)
    marked = marks(rows)
    lines = [*budget_lines(current), *_start_lines(current), *_other_runs(rows)]
    lines += [*(line.strip() for line in changed_rows_lines(current)), *membership_view.lines(runs)]
    slow = None if marked or len(membership_view.parts(runs)) > 1 else slowest(training_rows(current))
    if slow is not None:
        lines.append("slow one: %s (it waits least, so the others wait for it)" % slow["host"])
    if any(row["run"].get("identical") is False for row in current):
        lines.append(identical_text(current))
    lines += ["%s: %s" % (row["host"], row["problem"]) for row in rows if row.get("problem")]
    lines += ["%s: %s" % error for error in membership_view.own_errors(runs).items()]
    if marked or any(state_of(row["run"]) == "crashed" for row in rows):
        lines.append("run the playbook nanochat.ddp.doctor to find out why")
    cells = [_status_row(row, marked.get(row["host"])) for row in rows]
    return StatusScreen(_headline(rows, bool(marked)), STATUS, cells, lines)


def status_table(rows: Sequence[Row], width: int = 0) -> str:
    """One screen: the state of every host, then one sentence per problem; width 0 means no limit."""
    screen = status_screen(rows)
    table = fitting_table(screen.heads, screen.cells, width)
    return "\n".join([screen.headline, *table, *("  " + line for line in screen.sentences)])


def status_data(rows: Sequence[Row]) -> Dict[str, object]:
    """The same for programs."""
    rows = by_rank(rows)
    slow, marked = slowest(rows), marks(rows)
    hosts = {
        row["host"]: {
            **row["run"],
            "reachable": row.get("reachable", True),
            "problem": row.get("problem"),
            "shown": state_text(row["run"], marked.get(row["host"])),
        }
        for row in rows
    }
    return {"run": first_known(rows, "run"), "slowest": slow["host"] if slow is not None else None, "hosts": hosts}
