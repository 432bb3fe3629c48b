# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of one host's share of a run, only from the files of its run folder, which docs/architecture.md describes."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, cast

from .._contract.document import Document, section, text, whole
from .._contract.keeper_states import FAILED, OVER, TRAINING
from .._contract.lineage import TrainingIdentity, training_of
from .._contract.run_folder import MEMBERS, TRAINING_FILE, checkpoint_steps
from .._kit import processes
from .._kit.files import read_object
from .find import find_rank
from .members import Membership, membership_of, read_members
from .metrics import METRICS_BYTES, Event, RunFigures, describe_events, finite, positive, read_events, read_tail
from .stopping import stop_seconds

ABSENT = "absent"
PREPARED = "prepared"
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
CRASHED = "crashed"
AWAY = "away"
ENDED = (FINISHED, STOPPED, CRASHED, AWAY)
FRESH_SECONDS = 10.0  # a heartbeat of this age still counts as alive
LOG_BYTES = 64 * 1024
# "RuntimeError: ...", also after a rank's prefix.
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]:?\s*)*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class RunState(RunFigures):
    """The state of one host's share of a run, as run_info returns it. Every key is there in every state; what is not known is null."""

    state: str  # `absent`, `prepared`, `running`, `finished`, `stopped`, `crashed` or `away`: docs/architecture.md has them
    run: Optional[str]  # name of the run
    run_dir: Optional[str]  # the run folder
    plan_digest: Optional[str]  # digest of the plan that was deployed here
    training: Optional[TrainingIdentity]  # which training the run folder holds; null where it does not say
    timed: Optional[str]  # ddp_budget or ddp_finish_by of a run with a budget
    timeout_seconds: Optional[float]  # the plan's time limit for what has no usual length
    heartbeat_age: Optional[float]  # age of the trainer's heartbeat, by the host's own clock
    phase: Optional[str]  # what the trainer is in the middle of
    phase_seconds: Optional[float]  # for how long it is in this phase or, of an evaluation, in this batch
    collective: object  # the collective operation it is in or was in last
    batch: Optional[int]  # the batch that an evaluation has come to
    batches: Optional[int]  # how many batches the evaluation has on this rank, where that is known
    eta_seconds: Optional[float]  # seconds left at that pace, while it runs
    idle_seconds: Optional[float]  # seconds since the last sign of progress, while it runs
    session_age: Optional[float]  # seconds since the session was started, while it runs, by the host's own clock
    step_age: Optional[float]  # seconds since the last step was made, while it runs, by the host's own clock
    busy: Optional[float]  # share of a core that the rank used, or was ready to use, during this look
    load: Optional[float]  # processes that wanted to run for each processor of this user, in the last minute
    exit_code: Optional[int]  # exit code of the run
    signal: Optional[int]  # the signal that ended it
    ended: Optional[float]  # when it ended
    error: Optional[str]  # why it crashed, in one sentence
    cause: Optional[str]  # why it was stopped or is away, as far as is known
    revived: Optional[int]  # how many times the job was started again in this session after it had died
    died_of: Optional[str]  # what it died of last
    membership: Optional[Membership]  # by the keeper of this session: its last word
    last_lines: List[str]  # the last lines of the log
    log: Optional[str]  # path of the rank's log
    saved: Optional[int]  # the step of the newest checkpoint in the run folder
    stop_seconds: Optional[float]  # while it runs, what it may need to finish its step and save if it is asked to stop


# A run of which nothing is known.
_KNOWN: Dict[str, Any] = {"state": ABSENT, "last_lines": [], **describe_events([])}
EMPTY = cast(RunState, {**dict.fromkeys(RunState.__annotations__), **_KNOWN})


class Records(NamedTuple):
    """The files of a run folder."""

    run_dir: str
    rank: Optional[int]
    plan: Document
    session: Document
    heartbeat: Document
    training: Document
    events: List[Event]  # of the rank's metrics; of long ones only the beginning and the newest part
    members: Sequence[Document]  # its keeper's events
    member: Document  # its keeper's last word
    lines: List[str]  # of the log

    @property
    def log(self) -> str:
        """The rank's log."""
        return os.path.join(self.run_dir, "log", "rank%d.log" % (self.rank or 0))


def read_records(run_dir: str, rank: Optional[int], lines: int, limit: int = METRICS_BYTES) -> Records:
    """Read the files of a host's share of a run."""

    def read(name: str) -> Document:
        return read_object(os.path.join(run_dir, name))

    plan, session = read("plan.json"), read("session.json")
    rank = find_rank(run_dir, plan, session) if rank is None else rank
    suffix = "rank%d" % (rank or 0)
    records = Records(
        run_dir=run_dir,
        rank=rank,
        plan=plan,
        session=session,
        heartbeat=read("heartbeat-%s.json" % suffix),
        training=read(TRAINING_FILE),
        events=read_events(os.path.join(run_dir, "metrics-%s.jsonl" % suffix), limit),
        members=read_members(run_dir),
        member=read(MEMBERS),
        lines=[],
    )
    return records._replace(lines=log_lines(records.log, max(200, lines)) if lines else [])


def session_alive(session: Document) -> bool:
    """Whether the runner in session.json is still alive: the same process, in the same boot."""
    pid = session.get("pid")
    if session.get("ended") is not None or not isinstance(pid, int):
        return False
    if session.get("boot_id") not in (None, processes.boot_id()):
        return False
    return processes.alive(pid, whole(session, "pid_start"))


def host_state(
    session: Document, alive: bool, figures: RunFigures, has_events: bool, keeper: Optional[Membership]
) -> str:
    """One of the states of docs/architecture.md; decides whether a run was stopped or died."""
    if alive:
        return RUNNING
    if not session:
        if figures["end_reason"] in (FINISHED, STOPPED):
            return str(figures["end_reason"])
        # Events without a session: somebody started the trainer by hand, and it vanished without an exit status.
        return CRASHED if has_events else PREPARED
    if figures["end_reason"] == FINISHED and (session.get("stopped") or keeper):
        return FINISHED
    if keeper and keeper["state"] in OVER:
        # Its rank did not reach the last step.
        return {STOPPED: STOPPED, FAILED: CRASHED}.get(str(keeper["state"]), AWAY)
    if session.get("stopped"):
        return STOPPED
    if session.get("ended") is None or keeper:
        # A keeper whose host shut down too fast to record anything did not die by itself.
        return AWAY if keeper and session.get("terminated_by") else CRASHED
    if session.get("exit_code") != 0:
        # A job that was killed by a signal did not stop by itself, whatever its rank could still write.
        return STOPPED if figures["end_reason"] == STOPPED and not session.get("signal") else CRASHED
    return FINISHED if figures["end_reason"] == FINISHED else STOPPED


def error_text(
    state: str, session: Document, figures: RunFigures, lines: List[str], keeper: Optional[Membership]
) -> Optional[str]:
    """Why it crashed: from its keeper, otherwise from the trainer, if known."""
    if state != CRASHED:
        return None
    if keeper and keeper["state"] == FAILED:
        return keeper["why"] or "its keeper gave up"
    if figures["end_error"] and not keeper:
        return str(figures["end_error"])
    last = ": last line was %r" % lines[-1] if lines else ""
    if session and session.get("ended") is None:
        other = session.get("boot_id") not in (None, processes.boot_id())
        how = "the machine rebooted" if other else "its processes were killed, or nothing could be written to disk"
        return "the session disappeared without an exit status (%s)%s" % (how, "" if keeper else last)
    if keeper:
        how = "by signal %s" % session["signal"] if session.get("signal") else "with code %s" % session.get("exit_code")
        return "its keeper ended %s%s" % (how, last)
    if session.get("signal"):
        return "ended by signal %s%s" % (session["signal"], ": %s" % lines[-1] if lines else "")
    # The line with the error; if there is none, the last one.
    errors = (match.group(1) for match in map(_ERROR_LINE.match, map(str.strip, reversed(lines))) if match)
    return next(errors, lines[-1].strip() if lines else None)


def cause_text(state: str, session: Document, keeper: Optional[Membership]) -> Optional[str]:
    """Why it was stopped or left the run, from its keeper or session."""
    if state not in (STOPPED, AWAY) or (state == STOPPED and session.get("stopped")):
        # by a user, on this host
        return None
    if keeper and keeper["why"]:
        return keeper["why"]
    by = text(session, "terminated_by")
    return None if not by else "%s ended it: its machine shut down, or tmux was killed" % by


def _eta(figures: RunFigures, keeper: Optional[Membership], now: float) -> Optional[float]:
    """Seconds that a running rank has left; None if unknown."""
    if figures["ends"] is not None:
        return max(0.0, figures["ends"] - now)
    if figures["pace_seconds"] is None or figures["steps"] is None or (keeper and keeper["state"] != TRAINING):
        return None
    return max(0.0, (figures["steps"] - figures["done"]) * figures["pace_seconds"])


def read_run(run_dir: str, rank: Optional[int] = None, lines: int = 10, limit: int = METRICS_BYTES) -> RunState:
    """Everything known about this host's share of a run; the same keys in every state."""
    if not os.path.isdir(run_dir):
        return {**EMPTY, "run_dir": run_dir, "run": os.path.basename(run_dir.rstrip("/")), "rank": rank}
    now = time.time()
    records = read_records(run_dir, rank, lines, limit)
    session, pid, beat = records.session, whole(records.heartbeat, "pid"), finite(records.heartbeat.get("time"))
    # A trainer that was started by hand has no session.
    beats = pid is not None and beat is not None and now - beat <= FRESH_SECONDS and processes.alive(pid, None)
    run = describe(records, session_alive(session) or (beats and not session.get("ended")))
    run["last_lines"] = run["last_lines"][-lines:] if lines else []
    run["load"] = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return _by_the_clock(run, _of_session(records.heartbeat, run["started"]), now)


def describe(records: Records, alive: bool) -> RunState:
    """The state by the files alone, without the fields that depend on the clock."""
    plan, session = records.plan, records.session
    figures, started = _session_figures(records.events, session), finite(session.get("started"))
    keeper = membership_of(records.member, records.members, started, records.events, plan)
    state = host_state(session, alive, figures, bool(records.events), keeper)
    heartbeat = _of_session(records.heartbeat, started or figures["started"])
    return {
        **EMPTY,
        **figures,
        "state": state,
        "run": os.path.basename(records.run_dir.rstrip("/")),
        "run_dir": records.run_dir,
        "rank": figures["rank"] if records.rank is None else records.rank,
        "world": figures["world"] or whole(heartbeat, "world") or whole(plan, "world"),
        # Of long metrics the newest start may be unread, so the heartbeat comes first.
        "steps": positive(heartbeat.get("steps"))
        or figures["steps"]
        or positive(section(plan, "training").get("iterations")),
        "started": started or figures["started"],
        "plan_digest": text(plan, "digest"),
        "training": training_of(records.training),
        "timed": text(section(plan, "training"), "timed"),
        "timeout_seconds": finite(plan.get("timeout_seconds")),
        "exit_code": whole(session, "exit_code"),
        "signal": whole(session, "signal"),
        "ended": finite(session.get("ended")),
        "error": error_text(state, session, figures, records.lines, keeper),
        "cause": cause_text(state, session, keeper),
        "revived": whole(session, "revived"),
        "died_of": text(session, "died_of"),
        "membership": keeper,
        "last_lines": records.lines,
        "log": records.log,
        "saved": max(checkpoint_steps(records.run_dir), default=None),
        "stop_seconds": stop_seconds(records.events, heartbeat, plan) if alive else None,
    }


def _by_the_clock(run: RunState, heartbeat: Document, now: float) -> RunState:
    """Add the ages, by this host's own clock, so that clock differences do not matter."""
    beat, runs = finite(heartbeat.get("time")), run["state"] == RUNNING
    if beat is not None:
        run["heartbeat_age"] = max(0.0, now - beat)
        run["phase"], run["collective"] = text(heartbeat, "phase"), heartbeat.get("collective")
        run["phase_seconds"] = _age(finite(heartbeat.get("phase_since")), now if runs else beat)
        run["batch"], run["batches"] = positive(heartbeat.get("batch")), positive(heartbeat.get("batches"))
    if runs:
        updated = None if run["step"] is None else _age(run["updated"], now)
        run["idle_seconds"] = min((age for age in (run["phase_seconds"], updated) if age is not None), default=None)
        run["session_age"], run["step_age"] = _age(run["started"], now), _age(run["stepped"], now)
        run["eta_seconds"] = _eta(run, run["membership"], now)
    return run


def _session_figures(events: List[Event], session: Document) -> RunFigures:
    """The metrics of this session, without the end of an earlier one."""
    figures = describe_events(events)
    started, updated = finite(session.get("started")), figures["updated"]
    if started is not None and updated is not None and updated < started:
        kept = ("first_loss", "loss", "diverged", "val_bpb", "updated", "rank", "world")
        earlier = {name: value for name, value in figures.items() if name in kept}
        figures = cast(RunFigures, {**describe_events([]), **earlier})
    return figures


def _of_session(heartbeat: Document, started: Optional[float]) -> Document:
    """The heartbeat of this session; empty if it is an earlier one's, which may differ in steps and ranks."""
    beat = finite(heartbeat.get("time"))
    return {} if beat is None or (started is not None and beat < started) else heartbeat


def _age(since: Optional[float], now: float) -> Optional[float]:
    return None if since is None else max(0.0, now - since)


def log_lines(path: str, count: int) -> List[str]:
    """The last lines of a log as a terminal finally shows them, without codes and empty lines."""
    written = read_tail(path, LOG_BYTES).decode("utf-8", "replace").split("\n")
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in written)
    return [plain for plain in (_ANSI.sub("", line).rstrip() for line in lines) if plain][-count:]
