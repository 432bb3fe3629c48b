# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one host's share of a run is doing, read from its run folder and nothing else.

The files are those of docs/architecture.md. Readers never lock and never wait for the writer: a line that is not yet
whole is left for the next look, and of a big file only the beginning and the newest part are read.
"""

from __future__ import annotations

import os
import time
from typing import Dict, List, Optional, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import (
    Document,
    items,
    number,
    section,
    text,
    whole,
    words,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import (
    PREVIOUS,
    TRAINING,
    checkpoint_steps,
    generations,
    trainer_of,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.training import Training, training_of
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object
from ansible_collections.nanochat.ddp.plugins.module_utils._run.evaluated import StageOf, is_evaluation, stage_of
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import find_rank
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_events import events_of_log
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_tail import error_line, log_lines
from ansible_collections.nanochat.ddp.plugins.module_utils._run.members import absences, read_members, steps_repeated
from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import (
    METRICS_BYTES,
    Event,
    Read,
    Told,
    describe_events,
    finite,
    newest_attempt,
    positive,
    read_events,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stopping import stop_seconds

ABSENT = "absent"
PREPARED = "prepared"
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
CRASHED = "crashed"
ENDED = (FINISHED, STOPPED, CRASHED)
FRESH_SECONDS = 10.0  # a heartbeat is renewed every second; one of this age still counts as life


class Previous(TypedDict):
    """The outputs that a fresh start set aside last."""

    path: str
    count: int
    checkpoint: Optional[int]


class Away(TypedDict):
    """A host that was not in the run for a while."""

    host: str
    left: float
    why: str
    back: Optional[float]


class Membership(TypedDict):
    """What the keeper on a host says of who trains."""

    state: Optional[str]
    generation: Optional[int]
    members: List[str]
    why: Optional[str]
    since: float
    hears: List[str]
    away: List[Away]
    repeated: int


class Beat(TypedDict):
    """What the heartbeat tells."""

    heartbeat_age: Optional[float]
    phase: Optional[str]
    phase_seconds: Optional[float]
    collective: object
    batch: Optional[int]
    batches: Optional[int]


class Filed(TypedDict):
    """What plan and session say of themselves."""

    plan_digest: Optional[str]
    trainer: Optional[str]
    stage: Optional[StageOf]
    timeout_seconds: Optional[float]
    exit_code: Optional[int]
    signal: Optional[int]
    ended: Optional[float]


class Planned(TypedDict):
    """What the speed of a step depends on."""

    plan_facts: Optional[Document]
    links: Dict[str, object]


class RunState(Told, Beat, Filed, Planned):
    """What one host's share of a run is doing, as run_info returns it and describes it."""

    state: str
    run: Optional[str]
    run_dir: Optional[str]
    eta_seconds: Optional[float]
    idle_seconds: Optional[float]
    busy: Optional[float]
    session_age: Optional[float]
    step_age: Optional[float]
    error: Optional[str]
    membership: Optional[Membership]
    last_lines: List[str]
    log: Optional[str]
    sampled: bool
    previous: Optional[Previous]
    training: Optional[Training]
    saved: Optional[int]
    stop_seconds: Optional[float]


def session_alive(session: Document) -> bool:
    """Whether the runner that wrote session.json still runs: the same process, in the same boot."""
    pid = session.get("pid")
    if session.get("ended") is not None or not isinstance(pid, int):
        return False
    if session.get("boot_id") not in (None, processes.boot_id()):
        return False
    return processes.alive(pid, whole(session, "pid_start"))


def heartbeat_alive(heartbeat: Document, now: float) -> bool:
    """Whether the trainer itself lives: a fresh heartbeat of a process that exists."""
    pid, beat = heartbeat.get("pid"), finite(heartbeat.get("time"))
    if not isinstance(pid, int) or beat is None or now - beat > FRESH_SECONDS:
        return False
    return processes.alive(pid, None)


def _host_state(session: Document, alive: bool, told: Told, has_events: bool) -> str:
    """One of the states of docs/architecture.md."""
    if alive:
        return RUNNING
    if not session:
        if told["end_reason"] in (FINISHED, STOPPED):
            return str(told["end_reason"])
        # Events without a session: somebody started the trainer by hand, and it disappeared without an exit status.
        return CRASHED if has_events else PREPARED
    if session.get("stopped"):
        return FINISHED if told["end_reason"] == FINISHED else STOPPED
    if session.get("ended") is None:
        return CRASHED
    if session.get("exit_code") != 0:
        return STOPPED if told["end_reason"] == STOPPED else CRASHED
    return STOPPED if told["end_reason"] == STOPPED or _short(told) else FINISHED


def _short(told: Told) -> bool:
    """Whether metrics show that steps are missing; a trainer without our metrics gets the benefit of the doubt."""
    return isinstance(told["steps"], int) and told["end_reason"] is None and told["done"] < told["steps"]


def _error(state: str, session: Document, told: Told, lines: List[str]) -> Optional[str]:
    """Why it crashed, in the trainer's words where there are any."""
    if state != CRASHED:
        return None
    if told["end_error"]:
        return str(told["end_error"])
    if session and session.get("ended") is None:
        return "the session disappeared without an exit status (the machine restarted or the processes were killed)" + (
            ": last line was %r" % lines[-1] if lines else ""
        )
    if session.get("signal"):
        return "ended by signal %s%s" % (session["signal"], ": %s" % lines[-1] if lines else "")
    return error_line(lines)


def _eta(state: str, told: Told) -> Optional[float]:
    if state != RUNNING or told["pace_seconds"] is None or not isinstance(told["steps"], int):
        return None
    return float(max(0.0, (told["steps"] - told["done"]) * told["pace_seconds"]))


NO_BEAT: Beat = {
    "heartbeat_age": None,
    "phase": None,
    "phase_seconds": None,
    "collective": None,
    "batch": None,
    "batches": None,
}
EMPTY: RunState = {
    "state": ABSENT,
    "run": None,
    "run_dir": None,
    "plan_digest": None,
    "exit_code": None,
    "signal": None,
    "ended": None,
    **NO_BEAT,
    "eta_seconds": None,
    "idle_seconds": None,
    "busy": None,
    "session_age": None,
    "trainer": None,
    "stage": None,
    "timeout_seconds": None,
    "step_age": None,
    "error": None,
    "membership": None,
    "last_lines": [],
    "log": None,
    "sampled": False,
    "previous": None,
    "training": None,
    "saved": None,
    "stop_seconds": None,
    "plan_facts": None,
    "links": {},
    **describe_events([]),
}


def read_run(
    run_dir: str,
    rank: Optional[int] = None,
    lines: int = 10,
    now: Optional[float] = None,
    limit: int = METRICS_BYTES,
) -> RunState:
    """Everything that can be told about this host's share of a run; the same keys in every state."""
    run: RunState = {**EMPTY, "run_dir": run_dir, "run": os.path.basename(run_dir.rstrip("/")), "rank": rank}
    if not os.path.isdir(run_dir):
        return run
    now = time.time() if now is None else now
    plan = read_object(os.path.join(run_dir, "plan.json"))
    session = read_object(os.path.join(run_dir, "session.json"))
    rank = find_rank(run_dir, plan, session) if rank is None else rank
    suffix = "rank%d" % (rank or 0)
    heartbeat = read_object(os.path.join(run_dir, "heartbeat-%s.json" % suffix))
    log = os.path.join(run_dir, "log", suffix + ".log")
    metrics = read_events(os.path.join(run_dir, "metrics-%s.jsonl" % suffix), limit)
    if not heartbeat:
        metrics = _or_of_log(metrics, session, log)
    told = _told(metrics.events, session, plan)
    alive = session_alive(session) or (not session.get("ended") and heartbeat_alive(heartbeat, now))
    tail = log_lines(log, max(200, lines)) if lines else []
    state, started = _host_state(session, alive, told, bool(metrics.events)), finite(session.get("started"))
    run = {
        **run,
        **told,
        **_of_plan_and_session(plan, session),
        **_planned(plan, rank),
        "rows": told["rows"] if told["rows"] is not None else whole(_node(plan, rank), "rows"),
        "state": state,
        "rank": rank if rank is not None else told["rank"],
        "world": told["world"] or whole(heartbeat, "world") or whole(plan, "world"),
        "steps": _steps(told, heartbeat, plan),
        "started": started or told["started"],
        "error": _error(state, session, told, tail),
        "last_lines": tail[-lines:] if lines else [],
        "log": log,
        "sampled": not metrics.complete,
        "previous": previous_of(run_dir),
        "training": training_of(read_object(os.path.join(run_dir, TRAINING))),
        "saved": max(checkpoint_steps(run_dir), default=None),
        "stop_seconds": stop_seconds(metrics.events, heartbeat, plan) if alive else None,
        "membership": _membership(run_dir, started, metrics.events) if session.get("ended") is None else None,
    }
    return _timed(run, heartbeat, now)


def _timed(run: RunState, heartbeat: Document, now: float) -> RunState:
    """The same with what depends on the clock."""
    run["eta_seconds"] = _eta(run["state"], run)
    run = {**run, **_beat(heartbeat, run, now)}
    run["idle_seconds"] = _idle(run, now)
    if run["state"] == RUNNING:
        run["session_age"], run["step_age"] = _age(run["started"], now), _age(run["stepped"], now)
    return run


def _of_plan_and_session(plan: Document, session: Document) -> Filed:
    """What stands in their files as it is returned."""
    return {
        "plan_digest": text(plan, "digest"),
        "trainer": trainer_of(plan),
        "stage": stage_of(plan),
        "timeout_seconds": finite(plan.get("timeout_seconds")),
        "exit_code": whole(session, "exit_code"),
        "signal": whole(session, "signal"),
        "ended": finite(session.get("ended")),
    }


def _told(events: List[Event], session: Document, plan: Document) -> Told:
    """What metrics tell of the session; what an earlier evaluation in the same folder measured is not true of this one."""
    told = _this_session(describe_events(events), session)
    if not is_evaluation({"stage": stage_of(plan)}):
        return told
    measured = [event for event in newest_attempt(events)[1] if event["kind"] == "eval"]
    return {**told, "steps": None, "val_bpb": finite(measured[-1].get("val_bpb")) if measured else None}


def _node(plan: Document, rank: Optional[int]) -> Document:
    return next((node for node in items(plan, "nodes") if node.get("rank") == rank), {})


def _planned(plan: Document, rank: Optional[int]) -> Planned:
    """The links as a rehearsal measured them from here; the plan's part is told by its first rank alone."""
    place = text(_node(plan, rank), "base_dir")
    links = section(read_object(os.path.join(place, "measured.json")), "links") if place else {}
    if rank != 0 or not items(plan, "nodes"):
        return {"plan_facts": None, "links": links}
    nodes = [{key: node.get(key) for key in ("host", "rank", "address", "rows")} for node in items(plan, "nodes")]
    parts = {part: section(plan, part) for part in ("model", "training")}
    return {"plan_facts": {"world": whole(plan, "world"), "nodes": nodes, **parts}, "links": links}


def _or_of_log(metrics: Read, session: Document, log: str) -> Read:
    """Another trainer than this collection's tells its steps in the log."""
    if not session or metrics.events:
        return metrics
    return Read(events_of_log(log, number(session, "log_begin")), True)


def _age(since: Optional[float], now: float) -> Optional[float]:
    return None if since is None else max(0.0, now - since)


def previous_of(run_dir: str) -> Optional[Previous]:
    """The newest of the generations that were set aside, how many there are, and the newest step of its checkpoints."""
    numbers = generations(run_dir)
    if not numbers:
        return None
    place = os.path.join(run_dir, PREVIOUS, str(numbers[-1]))
    return {"path": place, "count": len(numbers), "checkpoint": max(checkpoint_steps(place), default=None)}


def _idle(run: RunState, now: float) -> Optional[float]:
    """Seconds since the last sign of progress; None when it is not running or gives no such signs."""
    if run["state"] != RUNNING:
        return None
    signs = [run["phase_seconds"]] if run["phase_seconds"] is not None else []
    if run["updated"] is not None and run["step"] is not None:
        signs.append(max(0.0, now - run["updated"]))
    return min(signs) if signs else None


def _this_session(told: Told, session: Document) -> Told:
    """What metrics of an earlier start say about the end is not true of a session that was started after it."""
    started, updated = finite(session.get("started")), told["updated"]
    if started is None or updated is None or updated >= started:
        return told
    return {
        **describe_events([]),
        "first_loss": told["first_loss"],
        "last_loss": told["last_loss"],
        "val_bpb": told["val_bpb"],
        "checkpoint": told["checkpoint"],
        "attempts": told["attempts"],
        "updated": updated,
        "rank": told["rank"],
        "world": told["world"],
    }


def _steps(told: Told, heartbeat: Document, plan: Document) -> Optional[int]:
    """How many steps the run has; from what was measured before what was planned."""
    if is_evaluation({"stage": stage_of(plan)}):
        return None
    return told["steps"] or positive(heartbeat.get("steps")) or positive(section(plan, "training").get("iterations"))


def _membership(run_dir: str, started: Optional[float], events: List[Event]) -> Optional[Membership]:
    """What the keeper of this session says of who trains; None where there is no keeper."""
    told = read_object(os.path.join(run_dir, "members.json"))
    since = finite(told.get("since"))
    if since is None or (started is not None and since < started):
        return None
    return {
        "state": text(told, "state"),
        "generation": whole(told, "generation"),
        "members": words(told, "members"),
        "why": text(told, "why"),
        "since": since,
        "hears": words(told, "hears"),
        "away": [
            {"host": one.host, "left": one.left, "why": one.why, "back": one.back}
            for one in absences(read_members(run_dir))
        ],
        "repeated": steps_repeated(events),
    }


def _beat(heartbeat: Document, run: RunState, now: float) -> Beat:
    """Ages by this host's own clock, so that clocks which differ between hosts do no harm."""
    beat, since = finite(heartbeat.get("time")), finite(heartbeat.get("phase_since"))
    if beat is None or (run["started"] is not None and beat < run["started"]):
        return NO_BEAT
    living = run["state"] == RUNNING
    return {
        "heartbeat_age": max(0.0, now - beat),
        "phase": text(heartbeat, "phase"),
        "phase_seconds": max(0.0, (now if living else beat) - since) if since is not None else None,
        "collective": heartbeat.get("collective"),
        "batch": positive(heartbeat.get("batch")),
        "batches": positive(heartbeat.get("batches")),
    }
