# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a run once for an until loop, tolerates broken connections, and judges all hosts' polls together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, TypedDict, cast

from ansible.errors import AnsibleError
from ansible.utils.display import Display

from ..module_utils._kit.printable import printable
from ..module_utils._run import polling
from ..module_utils._run.health import UNSEEN, Seen, StallLimits, without_cpu
from ..module_utils._run.state import ENDED, RunState
from ..module_utils._run.watching import WatchVerdict, intervals, judge
from ..plugin_utils import _configuration
from ..plugin_utils._company import FollowingAction, Ledger, abandoned, ledger_of
from ..plugin_utils._display.progress import is_due, run_line, watched

display = Display()

LOOK_SECONDS = 40.0  # the longest wait for news, plus time to connect
OPTIONS: dict[str, dict[str, Any]] = {
    "nodes": {"type": "list", "elements": "dict", "required": True},
    "first_step": {"type": "bool", "default": False},
    "stall_minimum": {"type": "float", "default": 45.0},
    "timeout": {"type": "float", "default": 300.0},
    "lost_after": {"type": "float", "default": 600.0},
}


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


def seen_by(host: str, entry: WatchEntry, now: float) -> Seen:
    """A ledger entry as input of the judgement."""
    asked = now - entry.get("asked", now)
    return Seen(
        host,
        entry.get("run") or UNSEEN,
        age=now - entry.get("begun", now),
        # A loop may still be waiting this long for a frozen host's answer.
        silent=now - entry["silent_since"] if entry.get("silent_since") else max(0.0, asked - LOOK_SECONDS),
        without_cpu=now - entry["worked"] if entry.get("worked") else math.inf,
        ended=now - entry["ended_since"] if entry.get("ended_since") else 0.0,
        verdict=entry.get("over"),
    )


def seen_of(others: Iterable[str], ledger: Ledger, now: float) -> dict[str, dict[str, Any]]:
    """The hosts that the children follow, for the display; without those not polled yet."""
    entries = {name: entry_of(ledger, name) for name in others}
    return {
        name: {
            "run": entry.get("run") or UNSEEN,
            "reachable": not entry.get("silent_since"),
            "verdict": entry.get("over"),
            "age": now - entry.get("seen", now),
            "watched": now - entry["begun"],
        }
        for name, entry in entries.items()
        if entry.get("run") or entry.get("silent_since")
    }


def entry_of(ledger: Ledger, host: str) -> WatchEntry:
    """A host's entry; empty if there is none."""
    return cast(WatchEntry, ledger.read(host))


def node_of(host: str, nodes: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Where a host's share of the run is."""
    for node in nodes:
        if node.get("host") == host and node.get("run_dir"):
            return node
    raise AnsibleError(f"The node of {host} has no run_dir, so there is nothing to watch.")


class ActionModule(FollowingAction):
    """Poll, remember, judge."""

    MODULE: ClassVar[str] = "nanochat.ddp.run_info"
    CODE: ClassVar[ModuleType] = polling
    ANSWER: ClassVar[Mapping[str, Any]] = {"run": RunState}
    # This host has ended, while accompanying ones have not.
    _ended: ClassVar[Mapping[str, Any] | None] = None

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """One attempt of the until loop; all of them under a display that would call each one FAILED, with a line now and then."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        while not result.get("over"):
            self._attempt(result, variables)
            if _configuration.shows_progress() or abandoned():
                break
            self._tell()
        return result

    def _attempt(self, result: dict[str, object], variables: Mapping[str, Any]) -> None:
        """A poll, and its line."""
        others = self.take_along(variables)
        own = self._ended or self._poll_and_judge(str(variables["inventory_hostname"]), variables)
        result.update(own)
        if own["over"]:
            type(self)._ended = own
            result["over"] = not self.accompanied()
        if not result["over"]:
            result["others"] = seen_of(others, self._ledger(), time.monotonic())

    def _tell(self) -> None:
        """Print the run's progress, from whichever process comes first."""
        ledger = ledger_of(self, "told")
        claim = ledger.claim("line", wait=False)
        if claim is None:
            return
        with claim:
            before = cast(ProgressLine, ledger.read("line")) or {"line": "", "at": 0.0, "begun": time.monotonic()}
            hosts = [node["host"] for node in self._options()["nodes"]]
            seen = seen_of(hosts, self._ledger(), time.monotonic())
            now = time.monotonic()
            line = run_line([watched(host, one, now - one["watched"]) for host, one in seen.items()]) if seen else ""
            if line and is_due(line, before["line"], before["at"], before["begun"]):
                ledger.write("line", {**before, "line": line, "at": now})
                # Programs that read another display's output want nothing else in it.
                display.display(printable(line), stderr=True)

    def follow(self, host: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Poll an accompanying host until watching it is over."""
        try:
            seen = self._poll_and_judge(host, variables)
            while not seen["over"] and not abandoned():
                seen = self._poll_and_judge(host, variables)
        except Exception:
            # Nobody polls it for now; the others would see a silent host.
            self._ledger().forget(host)
            raise
        return seen

    def _ledger(self) -> Ledger:
        return ledger_of(self, "run-watch")

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = self.validate_argument_spec(argument_spec=OPTIONS)[1]
        return options

    def _poll_and_judge(self, host: str, variables: Mapping[str, Any]) -> dict[str, object]:
        """Poll a host, and decide whether watching it is over."""
        options, ledger = self._options(), self._ledger()
        entry = entry_of(ledger, host) or {"begun": time.monotonic()}
        problem = self._poll(host, options, entry, variables)
        if problem:
            ledger.write(host, {**entry, "over": "failed"})
            return {**problem, "over": True, "run": entry.get("run") or UNSEEN}
        ledger.write(host, entry)
        verdict = self._judge(host, options)
        if verdict:
            ledger.write(host, {**entry, "over": verdict.verdict})
        return {
            "changed": False,
            "run": entry.get("run") or UNSEEN,
            "reachable": not entry.get("silent_since"),
            "over": verdict is not None,
            "verdict": verdict.verdict if verdict else None,
            "sentence": verdict.sentence if verdict else None,
        }

    def _judge(self, host: str, options: Mapping[str, Any]) -> WatchVerdict | None:
        """Judge with the results of the other hosts' loops."""
        now, ledger = time.monotonic(), self._ledger()
        hosts = {node["host"] for node in options["nodes"]} | {host}
        seen = {name: seen_by(name, entry_of(ledger, name), now) for name in hosts}
        limits = StallLimits(minimum=options["stall_minimum"], timeout=options["timeout"])
        return judge(host, seen, limits, options["first_step"], options["lost_after"])

    def _poll(
        self, host: str, options: Mapping[str, Any], entry: WatchEntry, variables: Mapping[str, Any]
    ) -> dict[str, object] | None:
        """Update the entry from the host; returns a failed module result if polling is impossible."""
        known = entry.get("run")
        node = node_of(host, options["nodes"])
        arguments = {"run_dir": node["run_dir"], "rank": node.get("rank"), "lines": 5}
        if known:
            pause = intervals(time.monotonic() - entry["begun"], options["first_step"])
            arguments["wait"] = {"state": known["state"], "step": known["step"], **pause}
        entry["asked"] = time.monotonic()
        self._ledger().write(host, entry)
        seen = self.ask(arguments, variables)
        if seen is None:
            entry.setdefault("silent_since", entry["asked"])
            return None
        if seen.get("failed"):
            return seen
        now, run = time.monotonic(), cast(RunState, seen["run"])
        entry.update({"run": run, "seen": now})
        entry.pop("silent_since", None)
        if without_cpu(run) == 0:
            entry["worked"] = now
        if Seen(host, run).state in ENDED:
            entry.setdefault("ended_since", now)
        else:
            entry.pop("ended_since", None)
        return None
