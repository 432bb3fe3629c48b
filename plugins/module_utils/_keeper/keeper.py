# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The keeper of a run on one host: listens to the others, decides, and starts and ends this host's rank.

The session runs it, and it exits with the run. membership.py makes all decisions; this
file provides a clock, a disk, the other keepers' messages and a process. Actions are logged, events go to
members.jsonl, and the current state to members.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import time
import traceback
from typing import Any, Dict, Optional, Set, cast

from .._contract import keeper_states as states
from .._contract import run_folder
from .._contract.document import whole
from .._contract.plan import Plan
from .._kit import files
from .._kit.processes import RESTARTED_VARIABLE, boot_id
from .._session.record import COME_BACK
from . import membership, memory, talk
from .presence import Attendance, follow
from .rank import LocalRank

TICK = 0.2
LINGER = 3.0  # for this long others can ask how it ended


def rules_of(plan: Plan) -> membership.Rules:
    """The rules of a plan."""
    keeper = plan["keeper"]
    hosts = tuple(node["host"] for node in plan["nodes"])
    return membership.Rules(
        hosts, keeper["min_hosts"], keeper["grace_seconds"], float(plan["timeout_seconds"]), keeper["restarts"]
    )


class Keeper:
    """One keeper from its start to the end of the run, or of this host's part in it."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir, self.folder = run_dir, os.path.join(run_dir, run_folder.KEEPER_FOLDER)
        settings = files.read_object(os.path.join(self.folder, run_folder.KEEPER_SETTINGS))
        plan = cast(Plan, files.read_object(os.path.join(run_dir, run_folder.PLAN)))
        self.host, self.launch = str(settings["host"]), str(settings["launch"])
        self.rules, self.rank = rules_of(plan), LocalRank(plan, self.host, run_dir)
        limits = next((node.get("guest") for node in plan["nodes"] if node["host"] == self.host), None)
        self.guest = Attendance(limits) if limits else None
        self.patience = float(plan["timeout_seconds"])
        peers = {n["host"]: talk.KeeperAddress(n["host"], str(n["address"]), n["keeper_port"]) for n in plan["nodes"]}
        me = peers.pop(self.host)
        self.talk = talk.Messenger(me, tuple(peers.values()), str(settings["secret"]), self.launch)
        self.received: Dict[str, membership.Received] = {}
        self.since: Optional[int] = None  # the step since which this host trains separately
        self.gave_way: Optional[membership.Generation] = None  # the last generation whose checkpoints were moved aside
        self.kept: Dict[str, Any] = {}  # the state on disk
        self.full_since = 0.0  # when writing first failed
        self.boot = boot_id()
        self.own = self._remembered()
        self.runner = os.getppid()
        self.signals: Set[int] = set()
        self.code = 0
        self.cause = ""  # of the generation being formed
        self.waits = ""  # the hosts that this one waits for, and why
        self.awake = time.clock_gettime(time.CLOCK_BOOTTIME)  # this clock runs while the machine is suspended
        self.woke = 0.0  # when it last resumed, by time.monotonic

    # -- persistent state

    def _remembered(self) -> membership.OwnState:
        """Load the promises of an earlier keeper of this start."""
        path, now, steps = os.path.join(self.folder, run_folder.KEEPER_MEMORY), time.monotonic(), self.rank.steps()
        kept = files.read_object(path)
        if not os.path.lexists(path) or kept.get("launch", self.launch) != self.launch:
            return membership.OwnState(membership.KeeperState(self.host, steps=steps), since=now)
        # If the runner restarted it, the host stayed up, and a stop would be on its disk.
        off = not os.environ.get(RESTARTED_VARIABLE)
        try:
            own = memory.awake(self.host, kept, now, steps, returned=off, same_boot=kept.get("boot") == self.boot)
            self.kept, self.since = kept, whole(kept, "since")
            return own
        except (ArithmeticError, LookupError, TypeError, ValueError):  # somebody damaged the file
            return memory.forgetful(self.host, now, time.time(), steps)

    def _remember(self, own: membership.OwnState) -> bool:
        """Save what must outlive this keeper. False if a promise could not be saved and so must not be made, until it can write."""
        kept = {"launch": self.launch, "boot": self.boot, **memory.to_remember(own), "since": self.since}
        if kept == self.kept and not self.full_since:
            return True
        try:
            files.write_json(os.path.join(self.folder, run_folder.KEEPER_MEMORY), kept, mode=0o600, durable=True)
        except OSError as error:
            if not self.full_since:
                self.full_since = time.monotonic()
                self._tell("cannot write", "%s: %s; tried again until it can" % (error.filename, error.strerror))
            promised = [self.kept.get("promised", 0), (self.kept.get("last") or [0])[0]]
            return promised == [own.public.promised, own.public.started] and own.public.state not in states.BEFORE
        if self.full_since:
            self._tell("can write", "again after %.0f s" % (time.monotonic() - self.full_since))
            self.full_since = 0.0
        self.kept = kept
        return True

    # -- the main loop

    def run(self) -> int:
        """Run until the run is over for this host; returns the session's exit code."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda number, dummy: self.signals.add(number))
        self.begin()
        while not self.over():
            self.turn(TICK)
        self.rank.close()
        # Keep answering questions about the end, unless all others know.
        until, others = time.monotonic() + LINGER, len(self.rules.hosts) - 1
        while time.monotonic() < until and others > sum(
            one.public.state in states.OVER for one in self.received.values()
        ):
            self._receive(TICK)
        self.talk.close()
        codes = {states.FAILED: self.code, states.AWAY: COME_BACK}
        return codes.get(self.own.public.state, 0)

    def begin(self) -> None:
        self._remember(self.own)
        self._tell("keeper started", "")
        self.talk.publish(self.own.public)
        self.talk.start()
        self.rank.prepare()

    def over(self) -> bool:
        return self.own.public.state in states.OVER and self.rank.process is None

    def _receive(self, seconds: float) -> None:
        """Receive messages, waiting up to this long for the first."""
        with contextlib.suppress(queue.Empty):
            other = self.talk.received.get(timeout=seconds)
            while True:
                before, now = self.received.get(other.host), time.monotonic()
                since = before.since if before is not None and now - before.at <= self.rules.lost else now
                self.received[other.host] = membership.Received(other, now, since)
                other = self.talk.received.get_nowait()

    def turn(self, seconds: float) -> None:
        """Wait up to this long for a message, check all events, then decide, act, and publish the state."""
        self._receive(seconds)
        before, now = self.own, time.monotonic()
        # Before the rank: a rank ended by a signal must not look as if somebody else stopped it.
        order = self._asked(now)
        self._see_rank(now)
        order = order or self._mind_the_owner(now)
        self._notice_suspend()
        self._give_way()
        decided = self.own
        if not order:
            decided, order = membership.decide(self.rules, self.own, self.received, now)
        # Save before publishing; until that is possible, the others continue without this host.
        if self._remember(decided):
            self.own = decided
            if order == membership.START and self.own.public.generation is not None:
                self.rank.start(self.own.public.generation)
            elif order:
                # A user who stops the run for good sets the time limit himself.
                least = self.patience if self.own.after_ending in states.OVER else 0.0
                self.rank.end(order, least, self.own.public.why)
            self.talk.publish(self.own.public)
        else:
            self.talk.publish(
                self.own.public._replace(state=states.STUCK, why="%s cannot write to its disk" % self.host)
            )
        self._report(before)

    def _see_rank(self, now: float) -> None:
        """The state of this host's rank, or how it ended."""
        ended = self.rank.ended()
        if ended is not None:
            self.code = int(ended == states.FAILED)
            self._note_apart_since()
            error = self.rank.lasting_error() if self.code else ""
            failure, steps = self.rank.own_failure() if self.code else None, self.rank.steps()
            self.own = membership.rank_ended(self.rules, self.own, now, steps, ended, error, failure)
        elif self.rank.stuck:
            # It survived even SIGKILL: nobody waits for this host until it has ended.
            pids = ", ".join(map(str, self.rank.stuck))
            why = "the rank of %s (pid %s) cannot be killed: it hangs in the kernel" % (self.host, pids)
            if self.own.public.state != states.STUCK:
                self.own = membership.change(self.own, now, states.STUCK, why=why)
        elif self.rank.process is not None:
            self.own = self.own.with_fields(steps=self.rank.steps())
            self._note_apart_since()

    def _note_apart_since(self) -> None:
        """Record the step since which this host trains separately."""
        mine = self.own.public.generation
        if mine is None:
            return
        if set(mine.members) >= set(membership.wanted(self.rules, self.own.public.left)):
            self.since = None
        elif self.since is None:
            self.since = self.rank.resumed_from

    def _give_way(self) -> None:
        """Move the separately made checkpoints aside, because another part of the run has more steps."""
        last = self.own.public.last
        if not self.own.public.apart or last is None or last == self.gave_way or self.rank.process is not None:
            return
        self.gave_way = last
        try:
            place = self.rank.set_apart(last.number, self.since) if self.since is not None else ""
            why = "its checkpoints since step %d are kept in %s" % (self.since or 0, place) if place else ""
            self._tell(states.GAVE_WAY, why)
        except OSError as error:
            self._tell(states.GAVE_WAY, "its checkpoints could not be put aside: %s" % error)
        self.since = None

    def _asked(self, now: float) -> str:
        """Whether a user stops the run or removes this host, or the host shuts down."""
        if self.own.public.state in states.OVER:
            return ""
        if signal.SIGINT in self.signals or os.path.exists(
            os.path.join(self.run_dir, run_folder.SESSION_FILES, "stop")
        ):
            state, why = states.STOPPED, "it was stopped"
        elif os.path.exists(os.path.join(self.folder, run_folder.KEEPER_LEAVE)):
            state, why = states.LEFT, "it was taken out"
        elif self.signals:
            # No user's stop does this: the host leaves for now, and the others continue at once.
            state, why = states.AWAY, "%s goes down" % self.host
        elif os.getppid() != self.runner:
            state, why = states.AWAY, "the session of %s was killed" % self.host
        else:
            return ""
        # The user's stop also counts for a host that is just leaving; nothing else changes how it ends.
        stops_leaving = state == states.STOPPED and self.own.after_ending == states.LEFT
        if self.own.after_ending in states.OVER and not stops_leaving:
            return ""
        self.own, order = membership.asked_to_end(self.own, now, state, why)
        return order

    def _mind_the_owner(self, now: float) -> str:
        """Leave a machine that is needed otherwise, and come back to it."""
        if self.guest is None:
            return ""
        mark, before = os.path.join(self.folder, run_folder.KEEPER_JOIN), self.own.public
        let_in = os.path.exists(mark)
        if let_in:
            with contextlib.suppress(OSError):
                os.remove(mark)
        self.own, order = follow(self.own, now, self.guest.look(now, let_in))
        if self.own.public.state == states.RESTING:
            self.rank.close()  # PyTorch takes memory, which is the owner's now
        elif before.state == states.RESTING:
            self.rank.prepare()
        if self.own.public.why != before.why and before.state == self.own.public.state == states.RESTING:
            self._tell(states.RESTING, self.own.public.why)
        return order

    def _notice_suspend(self) -> None:
        """Trust no memory that the others may have outlived: while this machine was suspended the run may have been stopped."""
        now, before = time.clock_gettime(time.CLOCK_BOOTTIME), self.awake
        self.awake = now
        if now - before > self.rules.lost + self.rules.grace:
            # An answer to a question from before may still come.
            self.woke = time.monotonic() + talk.LATE_SECONDS
            self.own = memory.slept(self.own, time.monotonic(), now - before)
            self._tell("awake", "after %.0f s" % (now - before))
        self.own = memory.woken(self.own, self.received, self.woke)

    # -- output for people and programs

    def _report(self, before: membership.OwnState) -> None:
        public, was = self.own.public, before.public
        waits = self._waiting_for()
        if waits != self.waits:
            self.waits = waits
            self._tell("waits" if waits else "waits no more", waits)
        if public.state == states.TRAINING and public.steps > was.steps:
            # Again, if it was killed: not while the ranks load what they need themselves.
            self.rank.prepare()
        if (public.state, public.generation) != (was.state, was.generation):
            # Why a guest was away is no reason for its return.
            self.cause = public.why or ("" if was.state == states.RESTING else self.cause)
            self._tell(public.state, self.cause)
            if public.state == states.TRAINING:
                self.cause = ""
        for host in sorted(set(was.hears) - set(public.hears)):
            self._tell(states.LOST, "%s is not heard any more" % host, about=host)
        for host in sorted(set(public.hears) - set(was.hears)):
            self._tell(states.HEARD, "%s is heard" % host, about=host)

    def _waiting_for(self) -> str:
        """The hosts that have been silent for longer than a message takes, and why."""
        silent, public = dict(self.talk.silent), self.own.public
        reasons = [silent[self.host]] if self.host in silent else []
        if public.state in (states.IDLE, states.ASKING) and time.monotonic() - self.own.since > self.rules.lost:
            missing = membership.awaited(self.rules, public, (self.host, *public.hears))
            reasons += [silent.get(host, "%s is not heard" % host) for host in sorted(missing)]
            deaf = [host for host in public.hears if self.host not in self.received[host].public.hears]
            reasons += ["%s does not hear this host" % host for host in deaf]
            others = [self.received[host].public for host in public.hears]
            reasons += ["%s: %s" % (one.host, one.why) for one in others if one.state in (states.RESTING, states.STUCK)]
        return "; ".join(dict.fromkeys(reasons))

    def _tell(self, what: str, why: str, about: str = "") -> None:
        """Record an event: a log line, a line of members.jsonl, and members.json."""
        public, mine = self.own.public, self.own.public.generation
        number = mine.number if mine else 0
        event = {
            "time": time.time(), "host": about or self.host, "what": what, "why": why, "generation": number,
            "members": list(mine.members) if mine else [], "steps": public.steps, "rank": self.rank.number,
        }  # fmt: skip
        members = " of generation %d: %s" % (number, ", ".join(mine.members)) if mine else ""
        with contextlib.suppress(OSError):  # of an ended session
            sys.stdout.write("keeper: %s%s%s\n" % (what, members if not about else "", " (%s)" % why if why else ""))
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            with open(os.path.join(self.run_dir, run_folder.MEMBER_EVENTS), "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
            files.write_json(
                os.path.join(self.run_dir, run_folder.MEMBERS),
                {**event, "state": public.state, "hears": public.hears, "since": time.time(), "waits": self.waits},
            )


def main(run_dir: str) -> None:
    """The session's program; the session restarts it if its exit code is COME_BACK."""
    try:
        code = Keeper(run_dir).run()
    except OSError as error:
        sys.stdout.write("keeper: ended (%s)\n" % error)
        code = COME_BACK
    except Exception:  # pylint: disable=broad-except
        traceback.print_exc(file=sys.stdout)
        code = COME_BACK
    raise SystemExit(code)
