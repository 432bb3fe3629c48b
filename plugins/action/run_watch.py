# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a run for an until loop, patient with connections, and judged together with the other hosts' looks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._run_state import ENDED
from ansible_collections.nanochat.ddp.plugins.module_utils._watching import (
    Patience,
    Sight,
    intervals,
    judge,
)

RETRY_SECONDS = 5.0
UNSEEN: dict[str, Any] = {"state": None, "step": None}


class Ledger:
    """What each host's loop has seen, shared through files in this playbook run's own temporary folder.

    The loops of several hosts run in processes of their own, which know nothing of each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: dict[str, Any]) -> None:
        """Put a host's entry there, whole or not at all."""
        path = self.path(host)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(entry), encoding="utf-8")
        beside.replace(path)

    def read(self, host: str) -> dict[str, Any]:
        """A host's entry; empty while there is none."""
        try:
            found = json.loads(self.path(host).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, since an inventory name may hold anything."""
        return self.folder / (host.encode().hex() + ".json")


def sight_of(entry: dict[str, Any], now: float) -> Sight:
    """A ledger entry as the judgement wants it."""
    return Sight(
        run=entry.get("run") or UNSEEN,
        age=now - entry.get("begun", now),
        unreachable=now - entry["unreachable_since"] if entry.get("unreachable_since") else 0.0,
        ended=now - entry["ended_since"] if entry.get("ended_since") else 0.0,
    )


class ActionModule(ActionBase):
    """Look, remember, judge."""

    _supports_check_mode = True
    _supports_async = False
    _supports_diff = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """One attempt of the until loop."""
        variables = task_vars or {}
        result: dict[str, Any] = super().run(tmp, variables)
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
        host = variables["inventory_hostname"]
        ledger = Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"run-watch-{self._task._uuid}")
        entry = ledger.read(host) or {"begun": time.time()}
        problem = self._look(options, entry, variables)
        if problem:
            return {**result, **problem, "over": True, "run": entry.get("run") or UNSEEN}
        ledger.write(host, entry)
        now = time.time()
        sights = {name: sight_of(ledger.read(name), now) for name in {*options["hosts"], host}}
        patience = Patience(
            options["stall_factor"], options["stall_minimum"], options["timeout"], options["lost_after"]
        )
        verdict = judge(host, sights, patience, options["first_step"])
        result.update(
            changed=False,
            run=entry.get("run") or UNSEEN,
            reachable=not entry.get("unreachable_since"),
            over=verdict is not None,
            verdict=verdict.verdict if verdict else None,
            sentence=verdict.sentence if verdict else None,
        )
        return result

    def _look(self, options: dict[str, Any], entry: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any] | None:
        """Update the entry from the host; returns a failed module result if the look itself is impossible."""
        known = entry.get("run")
        arguments = {"run_dir": options["run_dir"], "rank": options["rank"], "lines": 5}
        if known:
            pause = intervals(time.time() - entry["begun"])
            arguments["wait"] = {"state": known["state"], "step": known["step"], **pause}
        try:
            seen = self._execute_module("nanochat.ddp.run_info", module_args=arguments, task_vars=variables)
        except AnsibleConnectionFailure:
            entry.setdefault("unreachable_since", time.time())
            self._connection.close()
            time.sleep(RETRY_SECONDS)
            return None
        if seen.get("failed") or "run" not in seen:
            return {"failed": True, "msg": seen.get("msg", "run_info gave no answer"), **seen}
        now = time.time()
        entry.update(run=seen["run"], seen=now)
        entry.pop("unreachable_since", None)
        if seen["run"]["state"] in ENDED:
            entry.setdefault("ended_since", now)
        return None
