# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated host for the real keeper.Keeper and rank.LocalRank: clocks, a disk and processes that a test controls.

`simulated` replaces all that connects keeper.py and rank.py with the machine: time, os, open, files, subprocess, reaper and
processes, the connections of talk.py, and the readings of guests.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import queue
import signal
import types
from typing import Any
from unittest import mock

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import keeper_states as states
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import run_folder
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import keeper, rank, talk
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import RESTARTED_VARIABLE

RUN = "run"
FOLDER = f"{RUN}/{run_folder.KEEPER_FOLDER}"
STOP, LEAVE = f"{RUN}/{run_folder.SESSION_FILES}/stop", f"{FOLDER}/{run_folder.KEEPER_LEAVE}"
MEMORY, SETTINGS = f"{FOLDER}/{run_folder.KEEPER_MEMORY}", f"{FOLDER}/{run_folder.KEEPER_SETTINGS}"
PLAN = f"{RUN}/{run_folder.PLAN}"
MODEL = f"{RUN}/{run_folder.CHECKPOINTS[0]}/d1/model_%06d.pt"
HANG_UP = f"{RUN}/{rank.HANG_UP}"
END_SECONDS = 5.0  # how long a rank may take to end
SESSION = "session"
LINGER = 3  # how long a keeper that is over still says so
# Seconds of the wall clock in one tick: more than the generations that may be numbered in it.
WALL, WALL_SECONDS = 10**9, 60


def plan_of(rules, timeout):
    """The parts of a plan that a keeper reads."""
    same = {"keeper_port": 1, "guest": {}, "venv_dir": "", "trainer_dir": ""}
    nodes = [{**same, "host": host, "rank": place, "address": host} for place, host in enumerate(rules.hosts)]
    return {"rules": rules, "timeout_seconds": timeout, "trainer": {"script": ""}, "nodes": nodes}


class Lineage:
    """One step of training, and the steps before it."""

    __slots__ = ("before", "number", "step")

    def __init__(self, before, step, number):
        self.before, self.step, self.number = before, step, number


START = Lineage(None, 0, 0)


class Process:
    """A rank."""

    pids = itertools.count(100)

    def __init__(self, host, generation):
        self.host, self.generation, self.pid, self.start = host, generation, next(self.pids), 0
        self.code = None  # once it has exited
        self.alive = True  # until its end
        self.told = self.stopped = False  # by SIGTERM, by SIGSTOP
        self.head = None  # what it has trained, once all ranks have met
        self.waits_since = host.observer.tick
        host.write_beat(self, "rendezvous")

    def poll(self):
        return self.code

    wait = poll

    def end(self, code, **end):
        """It ends, and (unless it hangs: None) exits; end: what it records."""
        self.alive = False
        if end:
            self.host.write_event("end", **end)
            self.host.write_beat(self, "end")
        self.code = code if self.code is None else self.code


class Host:
    """One machine, and the keeper that runs there."""

    def __init__(self, name, clock, plan, observer):
        self.name, self.plan, self.observer = name, plan, observer
        self.clock, self.suspended = clock, 0.0  # the monotonic clock, and how many seconds it stood still
        self.wall = WALL
        self.disk = {SETTINGS: json.dumps({"host": name, "launch": "1", "secret": ""})}
        self.saves = {}  # path of a checkpoint -> what was trained
        self.metrics: list[dict[str, Any]] = []
        self.beat: dict[str, Any] = {}
        self.is_full = self.is_used = self.unkillable = False
        self.restarted = False
        self.boots = 1
        self.process = None
        self.crashes = 0  # of its ranks, by their own error
        self.log = []
        self.keeper = None
        # The faults that it is in, until when.
        self.off_at = self.deaf_until = self.thaws_at = self.unkillable_until = self.full_until = self.needed_until = 0
        self.broken_until = self.lies_until = 0
        self.back_at = None  # when the keeper starts again
        self.over_at = None  # when its keeper ended
        self.gone = False  # for good: nobody starts it again, or it is of another start of the run
        self.sick_at = None  # the step at which its rank fails each time
        self.mail = {}  # messages that wait while it is frozen

    @property
    def own(self):
        return self.keeper.own

    @property
    def rank(self):
        """The process of its rank while it is alive."""
        return self.process if self.process is not None and self.process.alive else None

    @property
    def saved(self):
        """The newest checkpoint."""
        return self.saves[max(self.saves)] if self.saves else START

    def save(self, trained):
        if trained.step:
            self.saves[MODEL % trained.step] = trained

    def write_event(self, kind, **event):
        self.metrics.append({"kind": kind, "time": self.wall, **event})

    def write_beat(self, process, phase):
        self.beat = {"pid": process.pid, "phase": phase, "time": self.wall}

    def runs(self):
        """Whether its keeper runs; one that is over still answers for a while."""
        tick = self.observer.tick
        over = self.over_at is not None and tick > self.over_at + LINGER
        return self.back_at is None and not self.gone and tick >= self.thaws_at and not over

    def is_asked(self):
        return STOP in self.disk or LEAVE in self.disk

    def is_hindered(self):
        return bool(self.unkillable_until or self.broken_until or self.full_until)

    def may_train_again(self):
        over = self.gone or self.is_asked() or (self.over_at is not None and not self.off_at)
        return not (over or self.own.public.state == states.FAILED or self.is_hindered())

    def boot(self):
        """Start a keeper."""
        with HERE.on(self):
            self.keeper = keeper.Keeper(RUN)
            self.keeper.begin()

    def next_own(self):
        """The state with which the next keeper would start."""
        with HERE.on(self):
            return keeper.Keeper(RUN).own

    def turn(self):
        with HERE.on(self):
            self.keeper.turn(0.0)

    def can_compute(self):
        """Whether its rank answers the others."""
        return not (self.unkillable or self.rank.stopped or self.hung_up())

    def hung_up(self):
        """Whether the keeper has closed its rank's connections."""
        return not (self.unkillable or self.rank.stopped) and HANG_UP % self.keeper.rank.number in self.disk


class Here:
    """Stands for the modules, with the machine of the host whose keeper runs now."""

    CLOCK_BOOTTIME = 0

    def __init__(self):
        self.host = None
        self.path = types.SimpleNamespace(
            join=os.path.join, basename=os.path.basename, exists=self.exists, lexists=self.exists
        )

    @contextlib.contextmanager
    def on(self, host):
        before, self.host = self.host, host
        yield
        self.host = before

    # -- time

    def monotonic(self):
        return self.host.clock

    def time(self):
        return float(self.host.wall)

    def clock_gettime(self, which):
        return self.host.clock + self.host.suspended

    # -- os and files

    @property
    def environ(self):
        return {RESTARTED_VARIABLE: "1"} if self.host.restarted else {}

    def getppid(self):
        return 1

    def exists(self, path):
        return path in self.host.disk

    def remove(self, path):
        self.host.disk.pop(path, None)

    def stat(self, path):
        return types.SimpleNamespace(st_size=len(self.host.metrics), st_mtime_ns=0)

    def walk(self, path):
        yield f"{path}/d1", [], [one.rpartition("/")[2] for one in self.host.saves if one.startswith(path + "/")]

    def makedirs(self, path, exist_ok=False):
        pass

    def replace(self, old, new):
        # A checkpoint that was set aside is no checkpoint of the run any more.
        self.host.saves.pop(old)

    def read_events(self, path, limit=0):
        return self.host.metrics[-20:]

    def read_object(self, path):
        if path == PLAN:
            return self.host.plan
        if "heartbeat" in path:
            return self.host.beat
        try:
            return json.loads(self.host.disk.get(path, "{}"))
        except ValueError:
            return {}

    def write_json(self, path, content, mode=0o644, durable=False):
        if self.host.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        self.host.disk[path] = json.dumps(content)

    def write_whole(self, path, content, mode):
        self.write_json(path, content.decode())

    def write(self, text):
        self.host.log.append("%8.1f  %s" % (self.host.clock, text.strip()))

    def flush(self):
        pass

    # -- processes

    def start(self, argv, **more):
        self.host.observer.checks.starts(self.host, argv[0])
        self.host.process = Process(self.host, argv[0])
        return self.host.process

    def members(self, session=None):
        process = self.host.process
        return {process.pid: process} if process is not None and (process.alive or process.code is None) else {}

    def send(self, target, number):
        if number == signal.SIGTERM:
            self.host.process.told = True
        elif not self.host.unkillable:
            self.host.crashes += 1
            self.host.process.end(1)

    def end(self, session, seconds, term=0.0):
        if self.host.unkillable:
            return self.members()
        for one in self.members().values():
            one.end(-signal.SIGKILL)
        return {}

    def process(self, pid):
        one = self.host.rank
        if one is None or one.pid != pid:
            return None
        return types.SimpleNamespace(state="T" if one.stopped else "S", marker=SESSION)

    def alive(self, pid, start):
        return bool(self.host.unkillable)


HERE = Here()


class Messenger:
    """The words that a keeper says and hears; the world carries them."""

    def __init__(self, me, others, secret, launch):
        self.received, self.silent, self.said = queue.Queue(), {}, (float("-inf"), None)

    def publish(self, public):
        self.said = (HERE.monotonic(), public)

    def start(self):
        pass

    close = start

    def public(self, now):
        """Its answer now, if any."""
        at, public = self.said
        return public if now - at <= talk.FRESH_SECONDS else None


class Attendance:
    """Whether the owner uses the machine."""

    def __init__(self, limits):
        pass

    def look(self, now, let_in):
        return "used by its owner" if HERE.host.is_used else ""


@contextlib.contextmanager
def simulated():
    """Within this, keepers and their ranks are on simulated hosts."""
    reaper = types.SimpleNamespace(
        SessionIdentity=rank.reaper.SessionIdentity, TERM_SECONDS=0.0, members=HERE.members, send=HERE.send, end=HERE.end,
        gentle_targets=lambda found: list(found.values()),
    )  # fmt: skip
    processes = types.SimpleNamespace(
        SESSION_VARIABLE="session", start_ticks=lambda pid: 0, process=HERE.process, alive=HERE.alive
    )
    machine = types.SimpleNamespace(
        path=HERE.path, getpid=lambda: 1, getuid=lambda: 0, environ={"session": SESSION}, remove=HERE.remove,
        stat=HERE.stat, walk=HERE.walk, makedirs=HERE.makedirs, replace=HERE.replace,
    )  # fmt: skip
    both: dict[str, Any] = {"time": HERE, "sys": types.SimpleNamespace(stdout=HERE)}
    of_keeper: dict[str, Any] = {
        "os": HERE, "files": HERE, "open": lambda *dummy, **more: io.StringIO(),
        "Attendance": Attendance, "rules_of": lambda plan: plan["rules"], "boot_id": lambda: HERE.host.boots,
    }  # fmt: skip
    of_rank: dict[str, Any] = {
        "os": machine, "reaper": reaper, "processes": processes, "subprocess": types.SimpleNamespace(Popen=HERE.start, DEVNULL=None),
        "read_object": HERE.read_object, "write_whole": HERE.write_whole, "exposure": lambda path, owned: "",
        "command": lambda plan, host, generation: ([generation], {}), "read_events": HERE.read_events,
        "stop_seconds": lambda *dummy: END_SECONDS, "rescue_seconds": lambda *dummy: END_SECONDS,
        "PreloadedTrainer": mock.Mock(side_effect=OSError),
    }  # fmt: skip
    with (
        mock.patch.object(talk, "Messenger", Messenger),
        mock.patch.multiple(keeper, create=True, **both, **of_keeper),
        mock.patch.multiple(rank, create=True, **both, **of_rank),
    ):
        yield
