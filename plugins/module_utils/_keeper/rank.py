# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""This host's rank: its command and variables in a generation, its start, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Dict, List, Optional, Sequence, Tuple, Union, cast

from .._contract import keeper_states as states
from .._contract.command_line import rank_argv, rank_environ
from .._contract.document import Document, number
from .._contract.plan import Node, Plan
from .._contract.run_folder import APART, CHECKPOINTS
from .._kit import processes
from .._kit.files import read_object, write_whole
from .._kit.ownership import exposure
from .._rules.causes import LASTING, LOSSES
from .._rules.shares import share_rows
from .._run.metrics import finite, read_events
from .._run.stopping import rescue_seconds, stop_seconds
from .._session import reaper
from . import membership

TAIL_BYTES = 65536
EXIT_SECONDS = 10.0  # after a rank has recorded its end
STOPPED_SECONDS = 6.0  # a rank stopped for this long is killed; a silent host is missing after the same time
LOOK_SECONDS = 1.0  # no more time than this passes between two looks
CHECKPOINT = re.compile(r"(?:model|meta|optim|ckpt)_(\d{6,})")
HANG_UP = "hang-up-rank%d"  # asks a rank to close all its connections; read by the trainer
CANNOT_START = 127  # a shell's exit code for it
LOST = -int(signal.SIGKILL)  # of a rank whose preloaded trainer was killed or hangs
TELL_SECONDS = 1.0  # in which that reports an ended rank
# Exit codes of a rank that was asked to end before it had begun.
ASKED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


def command(plan: Plan, host: str, generation: membership.Generation) -> Tuple[List[str], Dict[str, str]]:
    """The planned command and variables for this host's place in a generation. The batch stays; its rows are dealt again."""
    nodes = {node["host"]: node for node in plan["nodes"]}
    members = [nodes[member] for member in generation.members]
    shares = share_rows(sum(plan["training"]["rows"]), [float(node["rows"]) for node in members])
    flags: Dict[str, object] = {**nodes[host]["flags"], "rank-rows": shares}
    # The head is split among the present hosts, like the rows.
    parts = flags.get("head-shares")
    if isinstance(parts, list) and len(parts) == len(nodes):
        flags["head-shares"] = [parts[node["rank"]] for node in members]
    if members[0]["host"] != plan["nodes"][0]["host"]:
        # The tracker's server is on the first host, and unreachable for another.
        flags["tracker"] = "none"
    there: Plan = {**plan, "world": len(members), "master": {**plan["master"], "address": members[0]["address"]}}
    node: Node = {**nodes[host], "rank": generation.members.index(host), "flags": flags}
    return rank_argv(there, node), rank_environ(there, node, generation.number)


class PreloadedTrainer:
    """A process (trainer/scripts/preloaded.py) that forks this host's ranks, one at a time, without restarting Python and PyTorch.

    `poll` and `wait` refer to the rank, like a Popen.
    """

    def __init__(self, python: str, modules: Sequence[str]) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([python, "-m", "scripts.preloaded", *modules], stdin=theirs.fileno())  # pylint: disable=ansible-bad-function
        self._link.setblocking(False)
        self._code: Optional[int] = LOST

    def runner(self) -> Optional[Tuple[int, int]]:
        """Pid and start time; None if it is gone."""
        if self._process.poll() is not None:
            return None
        return self._process.pid, processes.start_ticks(self._process.pid)

    def start(self, words: List[str], environ: Dict[str, str]) -> bool:
        """Request a rank; False if impossible now."""
        if self._process.poll() is not None:
            return False
        try:
            self._link.sendall(json.dumps({"argv": words, "env": environ}).encode() + b"\n")
        except OSError:
            return False
        self._code = None
        return True

    def poll(self) -> Optional[int]:
        """The rank's exit code; None while it runs."""
        if self._code is None:
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                answer = self._link.recv(64)
                self._code = int(answer) if answer else LOST
            if self._code is None and self._process.poll() is not None:
                self._code = LOST
        return self._code

    def wait(self) -> int:
        """The exit code of an ended rank; a preloaded trainer that does not report it is killed."""
        until = time.monotonic() + TELL_SECONDS
        while self.poll() is None:
            if time.monotonic() > until:
                self._process.kill()
                self._process.wait()
            time.sleep(0.01)
        return LOST if self._code is None else self._code

    def close(self) -> None:
        """Let it exit after its rank."""
        self._link.close()


class NeverStarted:
    """Stands for a rank that could not be started."""

    def poll(self) -> int:
        return CANNOT_START

    wait = poll


class LocalRank:
    """The process of this host's rank, if any."""

    def __init__(self, plan: Plan, host: str, run_dir: str) -> None:
        self.plan, self.host, self.run_dir = plan, host, run_dir
        # The number in its file names in every generation: the plan's.
        self.places = {node["host"]: int(node["rank"]) for node in plan["nodes"]}
        self.number = self.places[host]
        self.node = next(node for node in plan["nodes"] if node["host"] == host)
        self.python = os.path.join(self.node["venv_dir"], "bin", "python")
        self._metrics = self.path(f"metrics-rank{self.number}.jsonl")
        self._heartbeat = self.path(f"heartbeat-rank{self.number}.json")
        self._counted: Tuple[Tuple[int, int], int] = ((-1, 0), 0)
        self.process: Union[subprocess.Popen[bytes], PreloadedTrainer, NeverStarted, None] = None
        self.preloaded: Optional[PreloadedTrainer] = None
        self.started_at = self.ends_at = self.exits_at = 0.0
        self._before: List[Document] = []  # the newest events before this start, whatever the clock says
        self._stopped = self._looked = 0.0  # how long it was seen stopped, and when it was looked at
        self.order = ""  # the newest, of this start
        self._out_of_time = False  # it was killed after its time was up
        self.resumed_from: Optional[int] = None  # the step from which this start resumed, once the rank has reported it
        self._code = 0  # the last exit code
        self._unstartable = ""  # why no process could be made at the last start
        self.stuck: Dict[int, processes.Process] = {}  # its unkillable processes
        me = os.getpid()
        marker = os.environ.get(processes.SESSION_VARIABLE, "")
        self._session = reaper.SessionIdentity(marker, os.getuid(), (me, processes.start_ticks(me)))

    @property
    def session(self) -> reaper.SessionIdentity:
        """Processes to end with the rank: all of this session except keeper and preloaded trainer."""
        spared = self.preloaded.runner() if self.preloaded is not None else None
        return self._session._replace(runner=spared or self._session.runner)

    def prepare(self) -> None:
        """Load PyTorch before the next start is due."""
        if self.preloaded is None and not self._exposed():
            # The next start reports a Python that is gone.
            with contextlib.suppress(OSError):
                self.preloaded = PreloadedTrainer(self.python, [self.plan["trainer"]["script"]])

    def path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)

    def start(self, generation: membership.Generation) -> None:
        """Start it in a generation."""
        self.ends_at = self.exits_at = 0.0
        self.order, self._out_of_time, self.resumed_from = "", False, None
        with contextlib.suppress(OSError):
            os.remove(self.path(HANG_UP % self.number))
        places = ",".join(str(self.places[member]) for member in generation.members)
        argv, variables = command(self.plan, self.host, generation)
        added = {**variables, "NANOCHAT_PLACES": places, "NANOCHAT_GENERATION": str(generation.number)}
        self.started_at, self._unstartable, self.process = time.time(), self._exposed(), NeverStarted()
        self._before = self._newest("end", "step", "start")
        if self._unstartable:
            return
        if self.preloaded is not None and self.preloaded.start(argv[1:], added):
            self.process = self.preloaded
            return
        # The preloaded trainer was killed, or cannot run here.
        self.close()
        try:
            self.process = subprocess.Popen(  # pylint: disable=ansible-bad-function
                argv, stdin=subprocess.DEVNULL, env={**os.environ, **added}
            )
        except OSError as error:
            self._unstartable = "%s cannot be started: %s" % (argv[0], error.strerror)

    def _exposed(self) -> str:
        """Who else could change what its rank runs; empty for nobody."""
        used = (self.python, self.node["trainer_dir"])
        return next(filter(None, (exposure(path, owned=False) for path in used)), "")

    def close(self) -> None:
        """No more starts."""
        if self.preloaded is not None:
            self.preloaded.close()
            self.preloaded = None

    def end(self, order: str, least: float = 0.0, why: str = "") -> None:
        """End it: after its step and a checkpoint, or (if its peers are lost, also after the first order) with what it has; it gets at
        least this many seconds."""
        if self.process is None or self.order in (order, membership.SAVE):
            return
        self.order = order
        allowed = stop_seconds if order == membership.FINISH_STEP else rescue_seconds
        needed = allowed(read_events(self._metrics), read_object(self._heartbeat), cast(Document, self.plan))
        limit = time.monotonic() + max(least, needed)
        self.ends_at = min(self.ends_at or limit, limit)
        if order == membership.SAVE:
            # A rank blocked on a frozen or unreachable one wakes up, saves the last finished step and exits.
            with contextlib.suppress(OSError):
                write_whole(self.path(HANG_UP % self.number), why.encode("utf-8", "replace"), 0o644)
        if order == membership.FINISH_STEP:
            for one in reaper.gentle_targets(reaper.members(self.session)):
                reaper.send(one, signal.SIGTERM)

    def ended(self) -> Optional[str]:
        """How it ended (FINISHED, STOPPED or FAILED), once; None while it runs or if there is none."""
        if self.process is None or any(processes.alive(one.pid, one.start) for one in self.stuck.values()):
            return None
        self.started_at = min(self.started_at, time.time())
        beat = read_object(self._heartbeat)
        self._kill_if_stopped(beat)
        now = time.monotonic()
        if not self.exits_at and beat.get("phase") == "end" and self._end_event():
            self.exits_at = now + EXIT_SECONDS
        # Its time to end is up, or its time to exit after that.
        if any(limit and now > limit for limit in (self.ends_at, self.exits_at)):
            self._out_of_time = True
        elif self.process.poll() is None:
            return None
        # A rank that has recorded its end has nothing left to save.
        self.stuck = reaper.end(self.session, 0, term=0.0 if self.exits_at else reaper.TERM_SECONDS)
        if self.stuck:
            return None
        code = self._code = self.process.wait()
        self.process = None
        if code < 0:
            # Write into the log what a killed rank could not, in words that people search for.
            with contextlib.suppress(OSError, ValueError):
                words = (self.number, -code, signal.Signals(-code).name, code)
                sys.stdout.write("keeper: rank %d was killed by signal %d (%s, exitcode: %d)\n" % words)
                sys.stdout.flush()
        reason = self._end_event().get("reason") if code == 0 or self._out_of_time else None
        known = {"finished": states.FINISHED, "stopped": states.STOPPED}
        return known.get(str(reason), states.FAILED)

    def _kill_if_stopped(self, beat: Document) -> None:
        """A rank that somebody has stopped (SIGSTOP, Ctrl-Z) holds up all; the others need not wait until their timeout."""
        now = time.monotonic()
        one = processes.process(number(beat, "pid")) if self._of_this_start(beat) else None
        # A keeper that was stopped, too, has seen nothing meanwhile.
        passed, self._looked = min(now - self._looked, LOOK_SECONDS), now
        if one is None or one.state != "T" or one.marker != self.session.id:
            self._stopped = 0.0
            return
        self._stopped += passed
        if self._stopped > STOPPED_SECONDS:
            reaper.send(one, signal.SIGKILL)

    def _end_event(self) -> Document:
        """The last event of this start; a killed rank recorded none, and an earlier start's may be there."""
        (end,) = self._newest("end")
        return end if self._of_this_start(end) else {}

    def _of_this_start(self, document: Document) -> bool:
        return (finite(document.get("time")) or 0.0) >= self.started_at and document not in self._before

    def lasting_error(self) -> str:
        """The rank's last error if a restart would not change it; empty otherwise."""
        end = self._end_event()
        return str(end.get("error") or end["cause"]) if end.get("cause") in LASTING else ""

    def own_failure(self) -> Optional[str]:
        """How it failed by its own error or crash, as far as known; None if another rank or its link was lost, or it was asked to end."""
        for event in filter(self._of_this_start, self._newest("end", "step", "start")):
            return str(event.get("error", "")) if event.get("cause") not in LOSSES else None
        # It ended before it recorded anything: its Python is broken, memory was short, or it crashed while it was loaded.
        began = "it ended with code %d before it had begun" % self._code
        return None if self._code in ASKED else self._unstartable or began

    def steps(self) -> int:
        """Finished steps, from the last event; the keeper asks several times a second."""
        try:
            written = os.stat(self._metrics)
        except OSError:
            return 0
        seen = (written.st_size, written.st_mtime_ns)
        if seen != self._counted[0]:
            last, start = self._newest("step", "start")
            self._counted = (seen, number(last, "step") + 1 if "step" in last else 0)
            if self._of_this_start(start):
                self.resumed_from = number(start, "resumed_from")
        return self._counted[1]

    def set_apart(self, generation: int, since: int) -> str:
        """Move checkpoints made after a step aside, because another part of the run continues; the folder, empty if there were none."""
        found = [
            os.path.join(place, name)
            for one in CHECKPOINTS
            for place, dummy, names in os.walk(self.path(one))
            for name in names
        ]
        late = [path for path in found if int((CHECKPOINT.match(os.path.basename(path)) or [0, 0])[1]) > since]
        if not late:
            return ""
        # Every start of the run counts generations from 1.
        place = os.path.join(APART, "generation-%d-%d" % (generation, time.time()))
        os.makedirs(self.path(place))
        for path in late:
            os.replace(path, os.path.join(self.path(place), os.path.basename(path)))
        return place

    def _newest(self, *kinds: str) -> List[Document]:
        """The newest event of each kind among the last ones."""
        newest = {event["kind"]: event for event in read_events(self._metrics, TAIL_BYTES)}
        return [newest.get(kind, {}) for kind in kinds]
