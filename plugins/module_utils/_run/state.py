# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one host's share of a run is doing, read from its run folder and nothing else.

The files are those of docs/architecture.md. Readers never lock and never wait for the writer: a line that is not yet
whole is left for the next look, and of a big file only the beginning and the newest part are read.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import items, section
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import (
    PREVIOUS,
    checkpoint_steps,
    generations,
    plain_run_name,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object
from ansible_collections.nanochat.ddp.plugins.module_utils._run.effort import Effort, busy_share, effort_of
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_events import events_of_log
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stopping import stop_seconds

ABSENT = "absent"
PREPARED = "prepared"
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
CRASHED = "crashed"
ENDED = (FINISHED, STOPPED, CRASHED)

HEAD_BYTES = 64 * 1024
METRICS_BYTES = 4 * 1024 * 1024  # about 10000 steps; more than that is read in part
PEEK_BYTES = 16 * 1024  # enough to see whether there is news
PEEK_SECONDS = 0.5
IDLE_PEEK_SECONDS = 1.0  # while only an end would be news
LOG_BYTES = 64 * 1024
RECENT_STEPS = 10  # speed "now"
ETA_STEPS = 50  # pace for the time left, with the pauses for evaluations and saves in it
BUSY_SECONDS = 1.0  # over so long the use of CPU is measured where there was no progress for IDLE_SECONDS
IDLE_SECONDS = 10.0
FRESH_SECONDS = 10.0  # a heartbeat is renewed every second; one of this age still counts as life

Event = Dict[str, Any]


class Read(NamedTuple):
    """The events of one metrics file, and whether that is all of them."""

    events: List[Event]
    complete: bool


def finite(value: Any) -> Optional[float]:
    """The number as a float, or None for what is no finite number (a loss that became NaN must not break JSON)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def read_tail(path: str, limit: int) -> bytes:
    """The last bytes of a file, starting at a whole line; empty when there is no file."""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit))
            data = stream.read(limit)
    except OSError:
        return b""
    return data if size <= limit else data.partition(b"\n")[2]


def parse_events(data: bytes) -> List[Event]:
    """The events in some bytes of a metrics file; what is not a whole JSON object with a kind is passed over."""
    events = []
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            events.append(event)
    return events


def read_events(path: str, limit: int = METRICS_BYTES) -> Read:
    """The events of a metrics file; of one bigger than limit its beginning and its newest part."""
    try:
        size = os.path.getsize(path)
    except OSError:
        return Read([], True)
    if size <= limit:
        return Read(parse_events(read_tail(path, limit)), True)
    head = b""
    if limit > 2 * HEAD_BYTES:
        with open(path, "rb") as stream:
            head = stream.read(HEAD_BYTES)
    return Read(parse_events(head) + parse_events(read_tail(path, limit - len(head))), False)


# -- is it alive ----------------------------------------------------------------------------------------------------


def session_alive(session: Dict[str, Any]) -> bool:
    """Whether the runner that wrote session.json still runs: the same process, in the same boot."""
    pid = session.get("pid")
    if session.get("ended") is not None or not isinstance(pid, int):
        return False
    if session.get("boot_id") not in (None, processes.boot_id()):
        return False
    return processes.alive(pid, session.get("pid_start"))


def heartbeat_alive(heartbeat: Dict[str, Any], now: float) -> bool:
    """Whether the trainer itself lives: a fresh heartbeat of a process that exists."""
    pid, beat = heartbeat.get("pid"), finite(heartbeat.get("time"))
    if not isinstance(pid, int) or beat is None or now - beat > FRESH_SECONDS:
        return False
    return processes.alive(pid, None)


# -- what the events say ----------------------------------------------------------------------------------------------


def _number(event: Event, key: str) -> float:
    return finite(event.get(key)) or 0.0


def _speed(steps: List[Event]) -> Optional[float]:
    """Tokens per second of all ranks over some steps: all their tokens over all their seconds."""
    seconds = sum(_number(step, "seconds") for step in steps)
    tokens = sum(_number(step, "tokens_per_second") * _number(step, "seconds") for step in steps)
    return tokens / seconds if seconds > 0 else None


def median(values: List[float]) -> Optional[float]:
    """The middle value; None of nothing."""
    if not values:
        return None
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _last(events: List[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["kind"] == kind), {})


def _pace(steps: List[Event]) -> Optional[float]:
    """Seconds by the clock from one step to the next, evaluations and saves included."""
    window = steps[-ETA_STEPS:]
    if len(window) < 2:
        return _number(window[0], "seconds") or None if window else None
    done = window[-1]["step"] - window[0]["step"]
    return (window[-1]["time"] - window[0]["time"]) / done if done > 0 else None


def _attempt(events: List[Event]) -> Tuple[int, List[Event]]:
    """How many times the run was started, and the events of its newest start."""
    starts = [index for index, event in enumerate(events) if event["kind"] == "start"]
    return len(starts), events[starts[-1] :] if starts else events


def _speeds(steps: List[Event]) -> Dict[str, Any]:
    """Speeds and shares of the steps of one attempt; its first step, which warms up, counts for the totals only."""
    steady = steps[1:] if len(steps) > 1 else steps
    seconds = sum(_number(step, "seconds") for step in steady)
    waited = sum(_number(step, "wait_seconds") for step in steady)
    told = any("wait_seconds" in step for step in steps)
    return {
        "tokens_per_second": _speed(steady[-RECENT_STEPS:]),
        "tokens_per_second_mean": _speed(steady),
        "step_seconds": median([_number(step, "seconds") for step in steady]),
        "wait_seconds": sum(_number(step, "wait_seconds") for step in steps) if told else None,
        "wait_share": waited / seconds if seconds > 0 and told else None,
        # The mean, since with local steps most send nothing.
        "bytes_sent": _mean_bytes(steady),
        "memory_bytes": steps[-1].get("memory_bytes") if steps else None,
        "steps_counted": len(steady),
    }


def _mean_bytes(steps: List[Event]) -> Optional[int]:
    sent = [_number(step, "bytes_sent") for step in steps if "bytes_sent" in step]
    return round(sum(sent) / len(sent)) if sent else None


def _positive(value: Any) -> Optional[int]:
    """A count that was really given; the trainer's -1 means that it is worked out later."""
    return value if isinstance(value, int) and value > 0 else None


def _checkpoint(events: List[Event]) -> Optional[Dict[str, Any]]:
    last = _last(events, "checkpoint")
    return {key: last.get(key) for key in ("step", "time", "path", "bytes")} if last else None


def describe_events(events: List[Event]) -> Dict[str, Any]:
    """Everything about the run that its metrics tell, the newest attempt's where it is about now."""
    attempts, attempt = _attempt(events)
    all_steps = [event for event in events if event["kind"] == "step" and isinstance(event.get("step"), int)]
    steps = [event for event in attempt if event["kind"] == "step" and isinstance(event.get("step"), int)]
    start, end = _last(attempt, "start"), _last(attempt, "end")
    resumed = start.get("resumed_from")
    done = steps[-1]["step"] + 1 if steps else resumed if isinstance(resumed, int) else 0
    settings: Any = start.get("settings")
    evaluation = _last(events, "eval")
    compared = [
        event["identical"]
        for event in attempt
        if event["kind"] in ("digest", "end") and isinstance(event.get("identical"), bool)
    ]
    described = {
        "rank": start.get("rank"),
        "world": start.get("world"),
        "step": steps[-1]["step"] if steps else None,
        "done": done,
        "steps": _positive(start.get("steps")) or _positive((settings or {}).get("num_iterations")),
        "loss": finite(steps[-1].get("loss")) if steps else None,
        "diverged": bool(steps) and steps[-1].get("loss") is not None and finite(steps[-1].get("loss")) is None,
        "first_loss": finite(all_steps[0].get("loss")) if all_steps else None,
        "last_loss": finite(all_steps[-1].get("loss")) if all_steps else None,
        "val_bpb": finite(evaluation.get("val_bpb")) if evaluation else finite(end.get("val_bpb")),
        # Weights that were seen to differ once make no model, whatever is compared later.
        "identical": all(compared) if compared else None,
        "digest": _last(attempt, "digest").get("digest"),
        "checkpoint": _checkpoint(events),
        "end_reason": end.get("reason"),
        "end_error": end.get("error"),
        "end_cause": end.get("cause"),
        "end_blames": end.get("blames"),
        "attempts": attempts,
        "resumed_from": resumed,
        "pace_seconds": _pace(steps),
        "updated": finite(events[-1].get("time")) if events else None,
        "stepped": finite(steps[-1].get("time")) if steps else None,
        "started": finite(start.get("time")),
    }
    described.update(_speeds(steps))
    return described


# -- what the log says ------------------------------------------------------------------------------------------------

# "RuntimeError: ...", also behind a rank's prefix; torchrun's own summary of a failed child says nothing new.
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]:?\s*)*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_HOLLOW = ("ChildFailedError", "SignalException", "KeyboardInterrupt")
# torchrun ends the log with a box of its own about the failed child, and lines of its logger about it.
_RULER = re.compile(r"^(={8,}|-{8,})$")
_AGENT = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)*[EWI]\d{4} \S+ +\d+ torch/|^Traceback \(most recent call last\):|^\s"
    r"|^torchrun: rank \d+ \(pid \d+\) ended with exit code"
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_lines(path: str, count: int) -> List[str]:
    """The last lines of a log, as text without terminal codes."""
    text = read_tail(path, LOG_BYTES).decode("utf-8", "replace")
    lines = [line for line in map(plain_line, text.split("\n")) if line]
    return lines[-count:] if count else []


def plain_line(line: str) -> str:
    """A line as a terminal would end up showing it, without codes."""
    return _ANSI.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()


def error_line(lines: List[str]) -> Optional[str]:
    """The line of a log that names the error; without one, the last line that is not torchrun's own."""
    lines = _without_box(lines)
    for line in reversed(lines):
        match = _ERROR_LINE.match(line.strip())
        if match and not any(word in match.group(1) for word in _HOLLOW):
            return match.group(1)
    own = [line for line in lines if not _AGENT.match(line) and not any(word in line for word in _HOLLOW)]
    return own[-1].strip() if own else None


def _without_box(lines: List[str]) -> List[str]:
    """The lines without rulers and without torchrun's box, which says FAILED below its first ruler and ends with another one."""
    kept, inside = [], False
    for line, following in zip(lines, [*lines[1:], ""]):
        if _RULER.match(line.strip()):
            inside = (line.startswith("=") and following.rstrip().endswith(" FAILED")) or (
                inside and line.startswith("-")
            )
        elif not inside:
            kept.append(line)
    return kept


# -- the whole picture ------------------------------------------------------------------------------------------------


def newest_run(base_dir: str) -> Optional[str]:
    """The run folder below a base folder that was written to last; None when there is none."""
    runs = os.path.join(base_dir, "runs")
    try:
        folders = [entry.path for entry in os.scandir(runs) if entry.is_dir()]
    except OSError:
        return None
    return max(folders, key=_touched) if folders else None


def _touched(run_dir: str) -> float:
    """When anything that a running trainer writes was written last."""
    names = [
        name for name in _names(run_dir) if name.startswith(("session.json", "plan.json", "metrics-", "heartbeat-"))
    ]
    times = [_mtime(os.path.join(run_dir, name)) for name in names]
    return max(times) if times else _mtime(run_dir)


def _mtime(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0.0


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def find_rank(run_dir: str, plan: Dict[str, Any], session: Dict[str, Any]) -> Optional[int]:
    """This host's rank: from its session's name, its files or its folder in the plan."""
    match = re.search(r"-rank(\d+)$", str(session.get("session") or ""))
    if match:
        return int(match.group(1))
    ranks = [re.match(r"(?:metrics|heartbeat)-rank(\d+)\.json", name) for name in _names(run_dir)]
    found = {int(match.group(1)) for match in ranks if match}
    if len(found) == 1:
        return found.pop()
    nodes = [node for node in items(plan, "nodes") if node.get("run_dir") == run_dir]
    return nodes[0].get("rank") if len(nodes) == 1 else None


def _host_state(session: Dict[str, Any], alive: bool, told: Dict[str, Any], has_events: bool) -> str:
    """One of the states of docs/architecture.md."""
    if alive:
        return RUNNING
    if not session:
        if told["end_reason"] in (FINISHED, STOPPED):
            return str(told["end_reason"])
        # Events without a session: somebody started the trainer by hand, and it went without a word.
        return CRASHED if has_events else PREPARED
    if session.get("stopped"):
        return FINISHED if told["end_reason"] == FINISHED else STOPPED
    if session.get("ended") is None:
        return CRASHED
    if session.get("exit_code") != 0:
        return STOPPED if told["end_reason"] == STOPPED else CRASHED
    return STOPPED if told["end_reason"] == STOPPED or _short(told) else FINISHED


def _short(told: Dict[str, Any]) -> bool:
    """Whether metrics show that steps are missing; a trainer without our metrics gets the benefit of the doubt."""
    return isinstance(told["steps"], int) and told["end_reason"] is None and told["done"] < told["steps"]


def _error(state: str, session: Dict[str, Any], told: Dict[str, Any], lines: List[str]) -> Optional[str]:
    """Why it crashed, in the trainer's words where there are any."""
    if state != CRASHED:
        return None
    if told["end_error"]:
        return str(told["end_error"])
    if session and session.get("ended") is None:
        return "the session is gone without a word (the machine restarted or the processes were killed)" + (
            ": last line was %r" % lines[-1] if lines else ""
        )
    if session.get("signal"):
        return "ended by signal %s%s" % (session["signal"], ": %s" % lines[-1] if lines else "")
    return error_line(lines)


def _eta(state: str, told: Dict[str, Any]) -> Optional[float]:
    if state != RUNNING or told["pace_seconds"] is None or not isinstance(told["steps"], int):
        return None
    return float(max(0.0, (told["steps"] - told["done"]) * told["pace_seconds"]))


EMPTY: Dict[str, Any] = dict(
    state=ABSENT,
    run=None,
    run_dir=None,
    plan_digest=None,
    exit_code=None,
    signal=None,
    ended=None,
    heartbeat_age=None,
    phase=None,
    phase_seconds=None,
    collective=None,
    eta_seconds=None,
    idle_seconds=None,
    busy=None,
    session_age=None,
    trainer=None,
    timeout_seconds=None,
    step_age=None,
    error=None,
    membership=None,
    last_lines=[],
    log=None,
    sampled=False,
    previous=None,
    stop_seconds=None,
    **describe_events([]),
)


def read_run(
    run_dir: str,
    rank: Optional[int] = None,
    lines: int = 10,
    now: Optional[float] = None,
    limit: int = METRICS_BYTES,
) -> Dict[str, Any]:
    """Everything that can be told about this host's share of a run; the same keys in every state."""
    run = dict(EMPTY, run_dir=run_dir, run=os.path.basename(run_dir.rstrip("/")), rank=rank)
    if not os.path.isdir(run_dir):
        return run
    now = time.time() if now is None else now
    plan = read_object(os.path.join(run_dir, "plan.json"))
    session = read_object(os.path.join(run_dir, "session.json"))
    rank = find_rank(run_dir, plan, session) if rank is None else rank
    suffix = "rank%d" % (rank or 0)
    told_by = "rank%d" % _rank_now(run_dir, session, rank or 0)
    heartbeat = read_object(os.path.join(run_dir, "heartbeat-%s.json" % told_by))
    log = os.path.join(run_dir, "log", suffix + ".log")
    metrics = read_events(os.path.join(run_dir, "metrics-%s.jsonl" % told_by), limit)
    if session and not metrics.events and not heartbeat:
        # Another trainer than this collection's tells its steps in the log.
        metrics = Read(events_of_log(log, int(session.get("log_begin") or 0)), True)
    told = _this_session(describe_events(metrics.events), session)
    alive = session_alive(session) or (not session.get("ended") and heartbeat_alive(heartbeat, now))
    tail = log_lines(log, max(200, lines)) if lines else []
    run.update(told)
    run["state"] = _host_state(session, alive, told, bool(metrics.events))
    run.update(
        rank=rank if rank is not None else told["rank"],
        world=told["world"] or heartbeat.get("world") or plan.get("world"),
        steps=_steps(told, heartbeat, plan),
        plan_digest=plan.get("digest"),
        trainer=section(plan, "trainer").get("source"),
        timeout_seconds=finite(plan.get("timeout_seconds")),
        exit_code=session.get("exit_code"),
        signal=session.get("signal"),
        started=finite(session.get("started")) or told["started"],
        ended=finite(session.get("ended")),
        error=_error(run["state"], session, told, tail),
        last_lines=tail[-lines:] if lines else [],
        log=log,
        sampled=not metrics.complete,
        previous=previous_of(run_dir),
        stop_seconds=stop_seconds(metrics.events, heartbeat, plan) if alive else None,
    )
    run["eta_seconds"] = _eta(run["state"], run)
    run.update(_beat(heartbeat, run, now))
    run["idle_seconds"] = _idle(run, now)
    if session.get("ended") is None:
        run["membership"] = _membership(run_dir, finite(session.get("started")))
    if run["state"] == RUNNING:
        run["session_age"] = None if run["started"] is None else max(0.0, now - run["started"])
        run["step_age"] = None if run["stepped"] is None else max(0.0, now - run["stepped"])
    return run


def read_effort(run_dir: str, rank: Optional[int]) -> Optional[Effort]:
    """How hard the rank's processes have worked so far; None where there are none."""
    session = read_object(os.path.join(run_dir, "session.json"))
    if session.get("ended") is not None:
        return None
    rank = find_rank(run_dir, {}, session) if rank is None else rank
    return effort_of(session, read_object(os.path.join(run_dir, "heartbeat-rank%d.json" % (rank or 0))))


def _measure_busy(run: Dict[str, Any], first: Optional[Effort], sleep: Callable[[float], None] = time.sleep) -> None:
    """The share of a core that a running rank works, since the first reading; a moment is waited where it matters and that was just now."""
    if run["state"] != RUNNING or first is None:
        return
    left = BUSY_SECONDS - (time.monotonic() - first.at)
    idle = run["idle_seconds"]
    if left > 0 and (idle is None or idle > IDLE_SECONDS):
        sleep(left)
        left = 0.0
    if left <= 0:
        run["busy"] = busy_share(first, read_effort(run["run_dir"], run["rank"]))


def previous_of(run_dir: str) -> Optional[Dict[str, Any]]:
    """The newest of the generations that were set aside, how many there are, and the newest step of its checkpoints."""
    numbers = generations(run_dir)
    if not numbers:
        return None
    place = os.path.join(run_dir, PREVIOUS, str(numbers[-1]))
    return {"path": place, "count": len(numbers), "checkpoint": max(checkpoint_steps(place), default=None)}


def _idle(run: Dict[str, Any], now: float) -> Optional[float]:
    """Seconds since the last sign of progress; None when it is not running or gives no such signs."""
    if run["state"] != RUNNING:
        return None
    signs = [run["phase_seconds"]] if run["phase_seconds"] is not None else []
    if run["updated"] is not None and run["step"] is not None:
        signs.append(max(0.0, now - run["updated"]))
    return min(signs) if signs else None


def _this_session(told: Dict[str, Any], session: Dict[str, Any]) -> Dict[str, Any]:
    """What metrics of an earlier start say about the end is not true of a session that was started after it."""
    started, updated = finite(session.get("started")), told["updated"]
    if started is None or updated is None or updated >= started:
        return told
    cleared = describe_events([])
    kept = ("first_loss", "last_loss", "val_bpb", "checkpoint", "attempts", "updated", "rank", "world")
    cleared.update({key: told[key] for key in kept})
    return cleared


def _steps(told: Dict[str, Any], heartbeat: Dict[str, Any], plan: Dict[str, Any]) -> Optional[int]:
    """How many steps the run has; from what was measured before what was planned."""
    return told["steps"] or _positive(heartbeat.get("steps")) or _positive(section(plan, "training").get("iterations"))


def _rank_now(run_dir: str, session: Dict[str, Any], planned: int) -> int:
    """By which rank the newest files go: where hosts are missing, a keeper has given this one another than the planned."""
    told = read_object(os.path.join(run_dir, "members.json"))
    since, rank = finite(told.get("since")), told.get("rank")
    fits = since is not None and since >= (finite(session.get("started")) or 0.0)
    return rank if fits and isinstance(rank, int) else planned


def _membership(run_dir: str, started: Optional[float]) -> Optional[Dict[str, Any]]:
    """What the keeper of this session says of who trains; None where there is no keeper."""
    told = read_object(os.path.join(run_dir, "members.json"))
    since = finite(told.get("since"))
    if since is None or (started is not None and since < started):
        return None
    return {key: told.get(key) for key in ("state", "generation", "members", "why", "since", "hears")}


def _beat(heartbeat: Dict[str, Any], run: Dict[str, Any], now: float) -> Dict[str, Any]:
    """Ages by this host's own clock, so that clocks which differ between hosts do no harm."""
    beat, since = finite(heartbeat.get("time")), finite(heartbeat.get("phase_since"))
    if beat is None or (run["started"] is not None and beat < run["started"]):
        return {}
    living = run["state"] == RUNNING
    return {
        "heartbeat_age": max(0.0, now - beat),
        "phase": heartbeat.get("phase"),
        "phase_seconds": max(0.0, (now if living else beat) - since) if since is not None else None,
        "collective": heartbeat.get("collective"),
    }


# -- waiting for news ---------------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """What the caller knows already, and how long it can wait for more."""

    state: Optional[str] = None
    step: Optional[int] = None
    at_least: float = 0.0
    timeout: float = 0.0


def wait_for_news(
    peek: Callable[[], Dict[str, Any]],
    wait: Wait,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once the state differs from what the caller knows, or (after at_least seconds) the step, or time is up.

    A peek costs about half a millisecond; more than two of them a second would be of no use to anybody.
    """
    begun = clock()
    run = peek()
    while run["state"] == wait.state and run["state"] not in ENDED and clock() - begun < wait.timeout:
        waited = clock() - begun
        if run["step"] != wait.step and waited >= wait.at_least:
            return
        sleep(PEEK_SECONDS if waited + IDLE_PEEK_SECONDS > wait.at_least else IDLE_PEEK_SECONDS)
        run = peek()


# How a module is told which run is meant: its options, and what AnsibleModule is to ask of them (documentation fragment "run").
WHICH_RUN: Dict[str, Any] = dict(run_dir=dict(type="path"), base_dir=dict(type="path"), run=dict(type="str"))
ONE_RUN: Dict[str, Any] = dict(
    required_one_of=[("run_dir", "base_dir")], mutually_exclusive=[("run_dir", "base_dir"), ("run_dir", "run")]
)
# What run_info is told.
LOOK: Dict[str, Any] = dict(
    rank=dict(type="int"),
    lines=dict(type="int", default=10),
    wait=dict(
        type="dict",
        options=dict(
            state=dict(type="str"),
            step=dict(type="int"),
            at_least=dict(type="float", default=0.0),
            timeout=dict(type="float", default=0.0),
        ),
    ),
    **WHICH_RUN,
)


def find_run_dir(params: Dict[str, Any]) -> Optional[str]:
    """The run folder that a module's parameters mean: run_dir, or run (or the newest) below base_dir, if there is one."""
    if params.get("run_dir"):
        return str(params["run_dir"])
    base = str(params["base_dir"])
    if params.get("run"):
        return os.path.join(base, "runs", plain_run_name(params["run"]))
    return newest_run(base)


def look(params: Dict[str, Any]) -> Dict[str, Any]:
    """What run_info returns for its parameters."""
    run_dir, rank = find_run_dir(params), params.get("rank")
    if run_dir is None:
        return dict(EMPTY)
    wait = params.get("wait")
    first = read_effort(run_dir, rank)
    if wait:
        known = Wait(wait["state"], wait["step"], wait["at_least"], wait["timeout"])
        wait_for_news(lambda: read_run(run_dir, rank, lines=0, limit=PEEK_BYTES), known)
    run = read_run(run_dir, rank, lines=params["lines"])
    _measure_busy(run, first)
    return run


def say(mark: str, params: Dict[str, Any]) -> None:
    """The program of a look: prints what `look` finds behind a mark."""
    # The host expands the paths: its home is not the controller's.
    for name in ("run_dir", "base_dir"):
        if params[name]:
            params[name] = os.path.expanduser(os.path.expandvars(params[name]))
    sys.stdout.write(mark + json.dumps(look(params)) + "\n")
