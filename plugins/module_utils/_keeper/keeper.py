# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The keeper of a run on one host: hears the others, decides, and starts and ends this host's rank.

It is what the session runs in the place of torchrun, and ends with the run. All decisions are those of membership.py; here
is only what they need: a clock, a disk, the other keepers' words and a process. What it does is told in the log and in
members.jsonl, and how it is in members.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import time
from typing import Any, Dict, List, Optional, Tuple, TypedDict, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership, talk
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.plausible import is_plausible
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.rank import Rank, limits
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import files

TICK = 0.2
LINGER = 3.0  # so long whoever asks is told how it ended
FOLDER, SETTINGS, STATE, LEAVE = ".keeper", "keeper.json", "state.json", "leave"
NOW, EVENTS = "members.json", "members.jsonl"


class Remembered(TypedDict):
    """What a keeper writes down of itself, for the one after it."""

    launch: str
    promised: int
    started: int
    last: Optional[Tuple[int, List[str]]]
    clean: bool
    deaths: List[Tuple[float, int]]


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
        self.run_dir, self.folder = run_dir, os.path.join(run_dir, FOLDER)
        settings = files.read_object(os.path.join(self.folder, SETTINGS))
        plan = cast(Plan, files.read_object(os.path.join(run_dir, "plan.json")))
        self.host, self.launch = str(settings["host"]), str(settings["launch"])
        self.rules, self.rank = rules_of(plan), Rank(plan, self.host, run_dir)
        self.finish_seconds, self.save_seconds = limits(plan, self.host)
        self.patience = float(plan["timeout_seconds"])
        peers = {n["host"]: talk.Peer(n["host"], str(n["address"]), n["keeper_port"]) for n in plan["nodes"]}
        me = peers.pop(self.host)
        self.talk = talk.Talk(me, tuple(peers.values()), str(settings["secret"]))
        self.heard: Dict[str, membership.Heard] = {}
        self.own = self._remembered()
        self.terms = 0
        self.code = 0
        self.cause = ""  # of the generation that is being made

    # -- what survives this process

    def _remembered(self) -> membership.Own:
        """What an earlier keeper of this start of the run has promised; it returns, if it was not started by a user."""
        fresh, now = membership.Own(membership.Word(self.host), time.monotonic()), time.monotonic()
        kept = cast(Remembered, files.read_object(os.path.join(self.folder, STATE)))
        try:
            own = self._returned(fresh, kept) if kept.get("launch") == self.launch else None
        except (ArithmeticError, LookupError, TypeError, ValueError):  # somebody has spoilt the file
            own = None
        if own is None:
            return fresh._replace(word=fresh.word._replace(steps=self.rank.steps()))
        return membership.awake(own, now, returned=True)

    def _returned(self, fresh: membership.Own, kept: Remembered) -> membership.Own:
        last = kept["last"] and membership.Generation(kept["last"][0], tuple(kept["last"][1]))
        word = fresh.word._replace(
            promised=int(kept["promised"]), started=int(kept["started"]), steps=self.rank.steps()
        )
        deaths = tuple((float(when), int(step)) for when, step in kept["deaths"])
        return fresh._replace(word=word, last=last, clean=bool(kept["clean"]), deaths=deaths)

    def _remember(self) -> None:
        own, word = self.own, self.own.word
        files.write_json(
            os.path.join(self.folder, STATE),
            {
                "launch": self.launch, "promised": word.promised, "started": word.started, "last": own.last,
                "clean": own.clean, "deaths": own.deaths,
            },
            mode=0o600,
            durable=True,
        )  # fmt: skip

    # -- one look after another

    def run(self) -> int:
        """Until the run is over for this host; the exit code of the session."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._terminated)
        self._remember()
        self._tell("keeper started", "")
        self.talk.say(self.own.word)
        self.talk.start()
        while self.own.word.state not in membership.OVER or self.rank.process is not None:
            self._hear(TICK)
            self._look()
        self._linger()
        self.talk.close()
        return self.code if self.own.word.state == membership.FAILED else 0

    def _terminated(self, number: int, frame: Any) -> None:
        self.terms += 1

    def _hear(self, seconds: float) -> None:
        """Take in the words that have come, waiting so long for the first."""
        with contextlib.suppress(queue.Empty):
            word = self.talk.heard.get(timeout=seconds)
            while True:
                if is_plausible(word, self.rules.hosts):
                    before = self.heard.get(word.host)
                    self.heard[word.host] = membership.hear(before, word, time.monotonic(), self.rules.lost)
                word = self.talk.heard.get_nowait()

    def _look(self) -> None:
        """Everything that can have happened, then the decision, what it orders, and the word about it."""
        before, now = self.own, time.monotonic()
        ended = self.rank.ended()
        if ended is not None:
            self.code = 1 if ended == membership.FAILED else 0
            self._give_way()
            error = self.rank.lasting_error() if ended == membership.FAILED else ""
            self.own = membership.rank_ended(self.own, now, self.rank.steps(), ended, error)
        elif self.rank.process is not None:
            self.own = self.own._replace(word=self.own.word._replace(steps=self.rank.steps()))
        order = self._asked(now)
        if not order:
            self.own, order = membership.decide(self.rules, self.own, self.heard, now)
        if self._lasting(self.own) != self._lasting(before):
            # On the disk before anybody hears of it.
            self._remember()
        if order == membership.START and self.own.word.generation is not None:
            self.rank.start(self.own.word.generation)
        elif order:
            seconds = self.finish_seconds if order == membership.FINISH_STEP else self.save_seconds
            # Whoever stops the run for good says himself how long that may take.
            self.rank.end(order, self.patience if self.own.then in membership.OVER else seconds)
        self.talk.say(self.own.word)
        self._report(before)

    def _give_way(self) -> None:
        """Another part of the run has more steps: what was made apart from it must not be taken for the same training."""
        mine = self.own.word.generation
        if not self.own.apart or mine is None:
            return
        self.own = self.own._replace(apart=False)
        try:
            moved = self.rank.set_apart(membership.ordinal(self.rules, mine.number))
            self._tell("gave way", "%d files of checkpoints are kept in the folder apart" % len(moved))
        except OSError as error:
            self._tell("gave way", "its checkpoints could not be put aside: %s" % error)

    def _asked(self, now: float) -> str:
        """What a user has asked for: to stop the run, or to take this host out of it."""
        if self.own.word.state in membership.OVER or self.own.then in membership.OVER:
            return ""
        order = ""
        if self.terms or os.path.exists(os.path.join(self.run_dir, ".session", "stop")):
            self.own, order = membership.asked_to_end(self.own, now, membership.STOPPED, "it was stopped")
        elif os.path.exists(os.path.join(self.folder, LEAVE)):
            self.own, order = membership.asked_to_end(self.own, now, membership.LEFT, "it was taken out")
        return order

    @staticmethod
    def _lasting(own: membership.Own) -> Any:
        return own.word.promised, own.word.started, own.last, own.clean, own.deaths

    def _linger(self) -> None:
        """Whoever asks why is told, unless all know how it is."""
        until = time.monotonic() + LINGER
        while time.monotonic() < until and not self._all_over():
            self._hear(TICK)

    def _all_over(self) -> bool:
        told = [self.heard[host].word.state for host in self.rules.hosts if host in self.heard]
        return len(told) == len(self.rules.hosts) - 1 and all(state in membership.OVER for state in told)

    # -- what people and programs see

    def _report(self, before: membership.Own) -> None:
        word, was = self.own.word, before.word
        if (word.state, word.generation, word.hears) == (was.state, was.generation, was.hears):
            return
        if (word.state, word.generation) != (was.state, was.generation):
            self.cause = word.why or self.cause
            self._tell(word.state, self.cause)
            if word.state == membership.TRAINING:
                self.cause = ""
        for host in sorted(set(was.hears) - set(word.hears)):
            self._tell("lost", "%s is not heard any more" % host, about=host)
        for host in sorted(set(word.hears) - set(was.hears)):
            self._tell("heard", "%s is heard" % host, about=host)

    def _tell(self, what: str, why: str, about: str = "") -> None:
        """One event: a line of the log, a line of members.jsonl, and members.json."""
        word, mine = self.own.word, self.own.word.generation
        number = membership.ordinal(self.rules, mine.number) if mine else 0
        event = {
            "time": time.time(), "host": about or self.host, "what": what, "why": why, "generation": number,
            "members": list(mine.members) if mine else [], "steps": word.steps, "rank": self.rank.number,
        }  # fmt: skip
        members = " of generation %d: %s" % (number, ", ".join(mine.members)) if mine else ""
        sys.stdout.write("keeper: %s%s%s\n" % (what, members if not about else "", " (%s)" % why if why else ""))
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            with open(os.path.join(self.run_dir, EVENTS), "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
            files.write_json(
                os.path.join(self.run_dir, NOW),
                {**event, "state": word.state, "hears": word.hears, "since": time.time()},
            )


def main(run_dir: str) -> None:
    """What the session runs."""
    raise SystemExit(Keeper(run_dir).run())
