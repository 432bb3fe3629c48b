# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run, tolerates broken connections, and judges all hosts' polls together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.utils.display import Display

from ...module_utils._kit.printable import printable
from ...module_utils._preflight.predict import Outlook, comparison_text
from ...module_utils._run import table
from ...module_utils._run.health import STALLED, UNSEEN, USUAL, Seen, StallLimits, without_cpu
from ...module_utils._run.live_line import regrouped
from ...module_utils._run.state import AWAY, CRASHED, ENDED, FINISHED, STOPPED, RunState
from ...module_utils._run.watching import ORPHANED, STARTED, WatchVerdict, intervals, judge
from .. import _configuration
from .._display.progress import Ledger, WatchEntry, is_due, ledger_of, run_line, seen_by
from .._display.terminal import width
from .._runs import seen_of
from .carrier import Call, decoded, drop_connection

display = Display()

RETRY_SECONDS = 5.0
ANSWER_SECONDS = 25
# Outcomes that need no action; AWAY: the others trained without this host (ddp_min_hosts).
WELL = (FINISHED, STOPPED, STARTED, AWAY)
TROUBLE = {CRASHED, STALLED, ORPHANED}


def run_watch(call: Call, **options: Any) -> dict[str, Any]:
    """Poll a host's share of a run until watching it is over, and tell of its progress.

    plan: the run's; is_ours: whether this play started it. first_step: watching ends with it. patience: how many times the usual time
    without progress or CPU use a run gets before it counts as stalled.
    """
    watch = Watch(call, options)
    seen = watch.poll_and_judge()
    while not seen["over"]:
        watch.tell()
        seen = watch.poll_and_judge()
    return seen


class Watch:
    """One process polls one host, and knows of the others what their processes leave in the ledger."""

    def __init__(self, call: Call, options: Mapping[str, Any], ledger: Ledger | None = None) -> None:
        self.call, self.options, self.host = call, options, call.host
        self.ledger = ledger or ledger_of(call.action._task)
        self.told = ("", 0.0)  # the last line about the run, and when it was printed
        self.generation = 1  # the newest one; the first is no news

    def tell(self) -> None:
        """Print the run's news, and where there is no live line its progress, from the process of the first host that is not over."""
        seen, ours = self.ledger.seen(), _configuration.shows_progress()
        self.generation, news = regrouped(seen, self.generation)
        watched = [one.host for one in seen if one.verdict is None]
        told = [news] if news else []
        line = "" if ours and width() else run_line(seen)
        if line and is_due(line, *self.told, begun=self.ledger.read(self.host)["begun"]):
            self.told = (line, time.monotonic())
            told.append(line)
        # Programs that read the output want nothing else in it.
        quiet = boolean(self.call.variables.get("ddp_json") or False, strict=False)
        for text in told if watched[:1] == [self.host] else []:
            display.display(printable(text), stderr=quiet or not ours)

    def poll_and_judge(self) -> dict[str, Any]:
        """Poll the host, and decide whether watching it is over."""
        if abandoned():
            why = "The playbook run that asked is gone, so nobody waits for this."
            return {"failed": True, "over": True, "msg": why}
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
        minimum = int(options["patience"]) * USUAL.minimum
        limits = StallLimits(minimum, timeout=float(options["plan"]["timeout_seconds"]))
        return judge(self.host, seen, limits, options["first_step"])

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
            with answered_within(arguments.get("wait", {}).get("timeout", 0)):
                return decoded(self.call.ask_once("run_info", **arguments), {"run": RunState}, self.host)
        except AnsibleConnectionFailure:
            drop_connection(self.call.action)
            time.sleep(RETRY_SECONDS)
            return None


def judge_watch(call: Call, prediction: Outlook) -> dict[str, Any]:
    """The hosts' verdicts after a watch, where the run failed, whether the doctor should look at it, and the closing table."""
    known = call.variables["hostvars"]
    seen = {host: known[host]["__watch_seen"] for host in call.variables["ansible_play_hosts"]}
    verdicts = {host: one["verdict"] for host, one in seen.items()}
    return {
        "verdicts": verdicts,
        "failed_on": [host for host, verdict in verdicts.items() if verdict not in WELL],
        "trouble": not TROUBLE.isdisjoint(verdicts.values()),
        "lines": closing_table(seen, prediction).splitlines(),
    }


def closing_table(results: Any, prediction: Outlook | None = None) -> str:
    """The closing table, followed by the prediction compared with the result."""
    seen = seen_of(results)
    beside = comparison_text(prediction, {one.host: one.run for one in seen}) if prediction else ""
    return printable("\n".join([table.status_screen(seen, width()), *([beside] if beside else [])]))


@contextlib.contextmanager
def answered_within(due: float) -> Iterator[None]:
    """Drop the connection a while after its answer was due, because one to a frozen host never breaks."""
    seconds = int(due) + ANSWER_SECONDS

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
