# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a run for an until loop, patient with connections, and judged together with the other hosts' looks."""

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
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object, write_json
from ansible_collections.nanochat.ddp.plugins.module_utils._run.liveness import Limits, quiet_now, state_of
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import ENDED, RunState
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import (
    Observation,
    Verdict,
    intervals,
    judge,
)
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import quick_look

RUN_INFO = "nanochat.ddp.run_info"
RETRY_SECONDS = 5.0
ANSWER_SECONDS = 25
LOOK_SECONDS = 40.0  # the longest wait for news, and some time to connect
UNSEEN: Mapping[str, None] = {"state": None, "step": None}


@contextlib.contextmanager
def answered_within(wait: Any) -> Iterator[None]:
    """A connection to a host that froze carries nothing and never breaks; it is given up a while after its answer was due."""
    seconds = wait["timeout"] if isinstance(wait, dict) else wait
    seconds_to_wait = int(seconds or 0) + ANSWER_SECONDS

    def give_up(number: int, frame: Any) -> None:
        raise AnsibleConnectionFailure(f"the host gave no answer within {seconds_to_wait} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds_to_wait)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def abandoned() -> bool:
    """Whether the playbook run that this loop belongs to is gone without having ended its loops, as when it was killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


class Entry(TypedDict, total=False):
    """What a host's loop has seen: the last answer, and since when what is so."""

    begun: float
    asked: float
    seen: float
    run: RunState
    silent_since: float
    worked: float
    ended_since: float
    over: str


class Ledger:
    """What each host's loop has seen, shared through files in this playbook run's own temporary folder.

    The loops of several hosts run in processes of their own, which know nothing of each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: Entry) -> None:
        """Put a host's entry there, whole or not at all."""
        write_json(str(self.path(host)), entry)

    def read(self, host: str) -> Entry:
        """A host's entry; empty while there is none."""
        return cast(Entry, read_object(str(self.path(host))))

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, since an inventory name may hold anything."""
        return self.folder / (host.encode().hex() + ".json")


def observation(entry: Entry, now: float) -> Observation:
    """A ledger entry as the judgement wants it."""
    asked = now - entry.get("asked", now)
    return Observation(
        run=entry.get("run") or UNSEEN,
        age=now - entry.get("begun", now),
        # Where a loop still waits for the answer of a host that froze, this is how long.
        silent=now - entry["silent_since"] if entry.get("silent_since") else max(0.0, asked - LOOK_SECONDS),
        quiet=now - entry["worked"] if entry.get("worked") else math.inf,
        ended=now - entry["ended_since"] if entry.get("ended_since") else 0.0,
        over=entry.get("over"),
    )


class PatientAction(ActionBase):
    """An action of an until loop that outlives a broken connection."""

    _supports_check_mode = True
    _supports_async = False
    _supports_diff = False

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """Ends a loop for which nobody waits any more; it would go on asking the host."""
        result: dict[str, object] = super().run(tmp, task_vars)
        if abandoned():
            result.update(failed=True, over=True, msg="The playbook run that asked is gone, so nobody waits for this.")
        return result

    def ask(self, module: str, arguments: dict[str, object], variables: dict[str, object]) -> dict[str, object] | None:
        """A module's answer; None, after a pause, if the host cannot be reached."""
        answer: dict[str, object] | None = None
        try:
            with answered_within(arguments.get("wait")):
                if module == RUN_INFO:
                    answer = quick_look(self, arguments, variables)
                if answer is None:
                    answer = self._execute_module(module, module_args=arguments, task_vars=variables)
        except AnsibleConnectionFailure:
            self._begin_again()
            time.sleep(RETRY_SECONDS)
            return None
        return answer

    def cleanup(self, force: bool = False) -> None:
        """The connection may break here too, after the answer."""
        try:
            super().cleanup(force)
        except AnsibleConnectionFailure:
            self._begin_again()

    def _begin_again(self) -> None:
        """Forget the connection, and the temporary folder that can no longer be removed through it."""
        self._connection.close()
        with contextlib.suppress(AnsibleError, OSError):
            # One that is kept open for later tasks would seem to stand, however long the host is frozen.
            self._connection.reset()
        self._connection._shell.tmpdir = None


class ActionModule(PatientAction):
    """Look, remember, judge."""

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """One attempt of the until loop."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        if result.get("failed"):
            return result
        dummy, options = self.validate_argument_spec(
            argument_spec={
                "run_dir": {"type": "path", "required": True},
                "rank": {"type": "int"},
                "hosts": {"type": "list", "elements": "str", "required": True},
                "first_step": {"type": "bool", "default": False},
                "stall_factor": {"type": "float", "default": 5.0},
                "stall_minimum": {"type": "float", "default": 45.0},
                "timeout": {"type": "float", "default": 300.0},
                "lost_after": {"type": "float", "default": 600.0},
            }
        )
        host = str(variables["inventory_hostname"])
        ledger = Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"run-watch-{self._task._uuid}")
        entry = ledger.read(host) or {"begun": time.time()}
        problem = self._look(options, entry, variables, ledger)
        if problem:
            ledger.write(host, {**entry, "over": "failed"})
            return {**result, **problem, "over": True, "run": entry.get("run") or UNSEEN}
        ledger.write(host, entry)
        verdict = self._judge(host, ledger, options)
        if verdict:
            ledger.write(host, {**entry, "over": verdict.verdict})
        result.update(
            changed=False,
            run=entry.get("run") or UNSEEN,
            reachable=not entry.get("silent_since"),
            over=verdict is not None,
            verdict=verdict.verdict if verdict else None,
            sentence=verdict.sentence if verdict else None,
        )
        return result

    def _judge(self, host: str, ledger: Ledger, options: Mapping[str, Any]) -> Verdict | None:
        """With what the loops of the other hosts have seen."""
        now = time.time()
        seen = {name: observation(ledger.read(name), now) for name in {*options["hosts"], host}}
        limits = Limits(options["stall_factor"], options["stall_minimum"], options["timeout"])
        return judge(host, seen, limits, options["first_step"], options["lost_after"])

    def _look(
        self, options: Mapping[str, Any], entry: Entry, variables: dict[str, object], ledger: Ledger
    ) -> dict[str, object] | None:
        """Update the entry from the host; returns a failed module result if the look itself is impossible."""
        known = entry.get("run")
        arguments = {"run_dir": options["run_dir"], "rank": options["rank"], "lines": 5}
        if known:
            pause = intervals(time.time() - entry["begun"], options["first_step"])
            arguments["wait"] = {"state": known["state"], "step": known["step"], **pause}
        entry["asked"] = time.time()
        ledger.write(str(variables["inventory_hostname"]), entry)
        seen = self.ask(RUN_INFO, arguments, variables)
        if seen is None:
            entry.setdefault("silent_since", entry["asked"])
            return None
        if seen.get("failed") or "run" not in seen:
            return {"failed": True, "msg": seen.get("msg", "run_info gave no answer"), **seen}
        now, run = time.time(), cast(RunState, seen["run"])
        entry.update({"run": run, "seen": now})
        entry.pop("silent_since", None)
        if quiet_now(run) == 0:
            entry["worked"] = now
        if state_of(run) in ENDED:
            entry.setdefault("ended_since", now)
        else:
            entry.pop("ended_since", None)
        return None
