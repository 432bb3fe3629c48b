# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run once for an until loop, tolerates broken connections, and judges all hosts' polls together."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.utils.display import Display

from ...filter.values import closing_table, of_hosts
from ...module_utils._kit.files import read_object, write_json
from ...module_utils._kit.printable import printable
from ...module_utils._preflight.predict import Outlook
from ...module_utils._run.health import STALLED, UNSEEN, Seen, StallLimits, without_cpu
from ...module_utils._run.state import AWAY, CRASHED, ENDED, FINISHED, STOPPED, RunState
from ...module_utils._run.watching import ORPHANED, STARTED, WatchVerdict, intervals, judge
from .. import _configuration
from .._display.progress import is_due, run_line
from .carrier import Call, decoded, drop_connection

display = Display()

RETRY_SECONDS = 5.0
ANSWER_SECONDS = 25
LOOK_SECONDS = 40.0  # the longest wait for news, plus time to connect
# Outcomes that need no action; AWAY: the others trained without this host (ddp_min_hosts).
WELL = (FINISHED, STOPPED, STARTED, AWAY)
TROUBLE = {CRASHED, STALLED, ORPHANED}


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


def seen_by(host: str, entry: WatchEntry, now: float) -> Seen:
    """A ledger entry as input of the judgement."""
    asked = now - entry.get("asked", now)
    return Seen(
        host,
        entry.get("run") or UNSEEN,
        age=now - entry.get("begun", now),
        looked=now - entry.get("seen", now),
        # A loop may still be waiting this long for a frozen host's answer.
        silent=now - entry["silent_since"] if entry.get("silent_since") else max(0.0, asked - LOOK_SECONDS),
        without_cpu=now - entry["worked"] if entry.get("worked") else math.inf,
        ended=now - entry["ended_since"] if entry.get("ended_since") else 0.0,
        verdict=entry.get("over"),
    )


class Ledger:
    """Files by which the processes of a playbook run share their hosts' state, in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: Mapping[str, Any]) -> None:
        """Write a host's entry atomically."""
        write_json(str(self.path(host)), entry)

    def read(self, host: str) -> WatchEntry:
        """A host's entry; empty if there is none."""
        return cast(WatchEntry, read_object(str(self.path(host))))

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, because inventory names may contain anything."""
        return self.folder / (host.encode().hex() + ".json")


def run_watch(call: Call, **options: Any) -> dict[str, Any]:
    """Poll a host's share of a run once, for an until loop, and decide whether watching it is over.

    plan: the run's; is_ours: whether this play started it. first_step: watching ends with it. stall_minimum: seconds without progress
    or CPU use after which a run may count as stalled; lost_after: those after which a silent host is given up.
    """
    watch = Watch(call, options)
    seen = watch.poll_and_judge()
    # Under a display that would call each attempt FAILED there is one attempt, with a line now and then.
    while not seen["over"] and not _configuration.shows_progress() and not abandoned():
        watch.tell()
        seen = watch.poll_and_judge()
    return seen


class Watch:
    """One process polls one host, and knows of the others what their processes leave in the ledger."""

    def __init__(self, call: Call, options: Mapping[str, Any], ledger: Ledger | None = None) -> None:
        self.call, self.options, self.host = call, options, call.host
        self.ledger = ledger or Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"run-watch-{call.action._task._uuid}")
        self.told = ("", 0.0)  # the last line about the run, and when it was printed

    def tell(self) -> None:
        """Print the run's progress, from the process of the first host that is not over."""
        now, hosts = time.monotonic(), [node["host"] for node in self.options["plan"]["nodes"]]
        if self.host == next((host for host in hosts if not self.ledger.read(host).get("over")), ""):
            entries = {host: self.ledger.read(host) for host in hosts}
            line = run_line([seen_by(host, entry, now) for host, entry in entries.items() if entry])
            if is_due(line, *self.told, begun=entries[self.host]["begun"]):
                self.told = (line, now)
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
        entry = self.ledger.read(self.host) or {"begun": time.monotonic()}
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
        hosts = {node["host"] for node in options["plan"]["nodes"]} | {self.host}
        seen = {name: seen_by(name, self.ledger.read(name), now) for name in hosts}
        limits = StallLimits(minimum=float(options["stall_minimum"]), timeout=float(options["plan"]["timeout_seconds"]))
        return judge(self.host, seen, limits, options["first_step"], float(options["lost_after"]))

    def poll(self, entry: WatchEntry) -> dict[str, Any] | None:
        """Update the entry from the host; returns a failed result if polling is impossible."""
        known = entry.get("run")
        plan = self.options["plan"]
        node = next(one for one in plan["nodes"] if one["host"] == self.host)
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
        if self.options["is_ours"] and run["plan_digest"] not in (None, plan["digest"]):
            # If two train.yml start at once, the later one's run wins; the earlier play must not report it as its own.
            other = f"goes by another plan now ({run['plan_digest']}; this play's is {plan['digest']})"
            again = "Play one at a time: train.yml with the settings that you want starts it again"
            why = f"{self.host}: the run {plan['run']} {other}: another train.yml started it meanwhile. {again}."
            return {"failed": True, "msg": why}
        entry.update({"run": run, "seen": now})
        entry.pop("silent_since", None)
        if without_cpu(run) == 0:
            entry["worked"] = now
        if Seen(self.host, run).state in ENDED:
            entry.setdefault("ended_since", now)
        else:
            entry.pop("ended_since", None)
        return None

    def ask(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """The host's answer; None, after a pause, if it is unreachable."""
        try:
            with answered_within(arguments.get("wait")):
                return decoded(self.call.ask_once("run_info", **arguments), {"run": RunState}, self.host)
        except AnsibleConnectionFailure:
            drop_connection(self.call.action)
            time.sleep(RETRY_SECONDS)
            return None


def judge_watch(call: Call, prediction: Outlook) -> dict[str, Any]:
    """The hosts' verdicts after a watch, whether all is well, whether the doctor should look at it, and the closing table."""
    seen = of_hosts(call.variables["ansible_play_hosts"], call.variables["hostvars"], "__watch_seen")
    verdicts = {host: one["verdict"] for host, one in seen.items()}
    return {
        "verdicts": verdicts,
        "well": set(verdicts.values()) <= set(WELL),
        "trouble": not TROUBLE.isdisjoint(verdicts.values()),
        "lines": closing_table(seen, prediction).splitlines(),
    }


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
