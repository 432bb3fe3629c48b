# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run once for an until loop, tolerates broken connections, and judges all hosts' polls together."""

from __future__ import annotations

import contextlib
import fcntl
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from ansible import constants
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.utils.display import Display

from ...module_utils._contract.document import Document
from ...module_utils._kit.files import read_object, write_json
from ...module_utils._kit.printable import printable
from ...module_utils._run import polling
from ...module_utils._run.stalls import StallLimits, seconds_without_cpu, state_of
from ...module_utils._run.state import ENDED, RunState
from ...module_utils._run.watching import Observation, WatchVerdict, intervals, judge
from .. import _configuration
from .._display.progress import is_due, row_of, run_line
from .carrier import Call, decoded, drop_connection

display = Display()

RETRY_SECONDS = 5.0
ANSWER_SECONDS = 25
LOOK_SECONDS = 40.0  # the longest wait for news, plus time to connect
UNSEEN: Mapping[str, None] = {"state": None, "step": None}


class ProgressLine(TypedDict):
    """The last permanent line about the run, when it was printed, and since when there are lines."""

    line: str
    at: float
    begun: float


class WatchEntry(TypedDict, total=False):
    """State of a host's loop: the last answer, and the times of the last changes by a clock that stops while this machine sleeps."""

    begun: float
    asked: float
    seen: float
    run: RunState
    silent_since: float
    worked: float
    ended_since: float
    over: str


def observation(entry: WatchEntry, now: float) -> Observation:
    """A ledger entry as input of the judgement."""
    asked = now - entry.get("asked", now)
    return Observation(
        run=entry.get("run") or UNSEEN,
        age=now - entry.get("begun", now),
        # A loop may still be waiting this long for a frozen host's answer.
        silent=now - entry["silent_since"] if entry.get("silent_since") else max(0.0, asked - LOOK_SECONDS),
        without_cpu=now - entry["worked"] if entry.get("worked") else math.inf,
        ended=now - entry["ended_since"] if entry.get("ended_since") else 0.0,
        over=entry.get("over"),
    )


def entry_of(ledger: Ledger, host: str) -> WatchEntry:
    """A host's entry; empty if there is none."""
    return cast(WatchEntry, ledger.read(host))


def node_of(host: str, nodes: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Where a host's share of the run is."""
    for node in nodes:
        if node.get("host") == host and node.get("run_dir"):
            return node
    raise AnsibleError(f"The node of {host} has no run_dir, so there is nothing to watch.")


class Ledger:
    """Files by which the processes of a playbook run share their hosts' state, in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: Mapping[str, Any]) -> None:
        """Write a host's entry atomically."""
        write_json(str(self.path(host)), entry)

    def read(self, host: str) -> Document:
        """A host's entry; empty if there is none."""
        return read_object(str(self.path(host)))

    @contextlib.contextmanager
    def claim(self, host: str) -> Iterator[bool]:
        """Whether this process alone has the host's entry until the end of the block."""
        with self.path(host).with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, because inventory names may contain anything."""
        return self.folder / (host.encode().hex() + ".json")


def run_watch(call: Call) -> dict[str, Any]:
    """Poll a host's share of a run once, for an until loop, and decide whether watching it is over.

    nodes: all hosts of the run, each with host, run_dir and rank. first_step: watching ends with it. stall_minimum: seconds without
    progress or CPU use after which a run may count as stalled; timeout: those for the start, and for a step of a rank that uses CPU;
    lost_after: those after which a silent host is given up.
    """
    watch = Watch(call)
    seen = watch.poll_and_judge()
    # Under a display that would call each attempt FAILED there is one attempt, with a line now and then.
    while not seen["over"] and not _configuration.shows_progress() and not abandoned():
        watch.tell()
        seen = watch.poll_and_judge()
    return seen


class Watch:
    """One process polls one host, and knows of the others what their processes leave in the ledger."""

    def __init__(self, call: Call, ledger: Ledger | None = None) -> None:
        self.call, self.options, self.host = call, call.params, call.host
        self.ledger = ledger or Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"run-watch-{call.action._task._uuid}")

    def tell(self) -> None:
        """Print the run's progress, from whichever process comes first."""
        with self.ledger.claim("") as claimed:
            if not claimed:
                return
            now = time.monotonic()
            before = cast(ProgressLine, self.ledger.read("")) or {"line": "", "at": 0.0, "begun": now}
            entries = {node["host"]: entry_of(self.ledger, node["host"]) for node in self.options["nodes"]}
            rows = [
                row_of(host, shown(entry, now), entry["begun"]) for host, entry in entries.items() if is_seen(entry)
            ]
            line = run_line(rows) if rows else ""
            if line and is_due(line, before["line"], before["at"], before["begun"]):
                self.ledger.write("", {**before, "line": line, "at": now})
                # Programs that read another display's output want nothing else in it.
                display.display(printable(line), stderr=True)

    def poll_and_judge(self) -> dict[str, Any]:
        """Poll the host, and decide whether watching it is over."""
        if abandoned():
            return {
                "failed": True,
                "over": True,
                "msg": "The playbook run that asked is gone, so nobody waits for this.",
            }
        entry = entry_of(self.ledger, self.host) or {"begun": time.monotonic()}
        problem = self.poll(entry)
        if problem:
            self.ledger.write(self.host, {**entry, "over": "failed"})
            return {**problem, "over": True, "run": entry.get("run") or UNSEEN}
        self.ledger.write(self.host, entry)
        verdict = self.judge()
        if verdict:
            self.ledger.write(self.host, {**entry, "over": verdict.verdict})
        return {
            "changed": False,
            "run": entry.get("run") or UNSEEN,
            "reachable": not entry.get("silent_since"),
            "over": verdict is not None,
            "verdict": verdict.verdict if verdict else None,
            "sentence": verdict.sentence if verdict else None,
        }

    def judge(self) -> WatchVerdict | None:
        """Judge with the results of the other hosts' loops."""
        now, options = time.monotonic(), self.options
        hosts = {node["host"] for node in options["nodes"]} | {self.host}
        seen = {name: observation(entry_of(self.ledger, name), now) for name in hosts}
        limits = StallLimits(minimum=float(options["stall_minimum"]), timeout=float(options["timeout"]))
        return judge(self.host, seen, limits, options["first_step"], float(options["lost_after"]))

    def poll(self, entry: WatchEntry) -> dict[str, Any] | None:
        """Update the entry from the host; returns a failed result if polling is impossible."""
        known = entry.get("run")
        node = node_of(self.host, self.options["nodes"])
        arguments = {"run_dir": node["run_dir"], "rank": node.get("rank"), "lines": 5}
        if known:
            pause = intervals(time.monotonic() - entry["begun"], self.options["first_step"])
            arguments["wait"] = {"state": known["state"], "step": known["step"], **pause}
        entry["asked"] = time.monotonic()
        self.ledger.write(self.host, entry)
        seen = self.ask(arguments)
        if seen is None:
            entry.setdefault("silent_since", entry["asked"])
            return None
        if seen.get("failed"):
            return seen
        now, run = time.monotonic(), cast(RunState, seen["run"])
        entry.update({"run": run, "seen": now})
        entry.pop("silent_since", None)
        if seconds_without_cpu(run) == 0:
            entry["worked"] = now
        if state_of(run) in ENDED:
            entry.setdefault("ended_since", now)
        else:
            entry.pop("ended_since", None)
        return None

    def ask(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """The host's answer; None, after a pause, if it is unreachable."""
        try:
            with answered_within(arguments.get("wait")):
                return decoded(self.call.ask_once(polling.run_info, **arguments), {"run": RunState}, self.host)
        except AnsibleConnectionFailure:
            drop_connection(self.call.action)
            time.sleep(RETRY_SECONDS)
            return None


def is_seen(entry: WatchEntry) -> bool:
    """Whether a host has been polled."""
    return bool(entry.get("run") or entry.get("silent_since"))


def shown(entry: WatchEntry, now: float) -> dict[str, Any]:
    """A ledger entry for the display."""
    reachable, age = not entry.get("silent_since"), now - entry.get("seen", now)
    return {"run": entry.get("run") or UNSEEN, "reachable": reachable, "verdict": entry.get("over"), "age": age}


@contextlib.contextmanager
def answered_within(wait: Mapping[str, Any] | None) -> Iterator[None]:
    """Drop the connection a while after its answer was due, because one to a frozen host never breaks."""
    seconds = int(wait["timeout"] if wait else 0) + ANSWER_SECONDS

    def give_up(number: int, frame: Any) -> None:
        raise AnsibleConnectionFailure(f"the host did not answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def abandoned() -> bool:
    """Whether the process that started this one is gone without ending it: a killed playbook run."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid
