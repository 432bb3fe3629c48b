# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of several hosts: the run that a command means, who has its newest checkpoint, how each was seen, and how to get there."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from ..module_utils._contract.document import Document, number
from ..module_utils._kit.words import plain_reason
from ..module_utils._run.health import UNSEEN, Seen, without_cpu
from ..module_utils._run.state import RunState


class RunAnswer(TypedDict, total=False):
    """A host's result of a task about its share of a run, whatever happened to the task; of a loop or of run_models those of several."""

    run: RunState | None
    plan: Document | None
    verdict: str | None  # of the watcher
    newest_run: str | None  # the host's, which may be another one
    session: Document  # that was started
    results: list[RunAnswer | None]
    models: list[RunAnswer | None]
    msg: str
    timedout: Document | None
    reachable: bool
    unreachable: bool


Answers = Mapping[str, RunAnswer | None]  # by host


def why_no_answer(result: RunAnswer) -> str:
    """Why a task's result is missing, in one line."""
    if "timedout" in result:
        return f"it did not answer within {(result['timedout'] or {}).get('period', 'some')} s; check that it is on and not frozen"
    return plain_reason(str(result.get("msg") or "it did not answer")).splitlines()[0]


def seen_of(results: Answers) -> list[Seen]:
    """Several hosts as they were seen last, from their results, whatever happened to the task."""
    found = []
    for host, result in ((host, result or {}) for host, result in results.items()):
        run = result.get("run") or UNSEEN
        reachable = not result.get("unreachable") and result.get("reachable", True)
        problem = None if result.get("run") else why_no_answer(result)
        silent = 0.0 if reachable else math.inf
        more: dict[str, Any] = {name: result.get(name) for name in ("verdict", "newest_run")}
        found.append(Seen(str(host), run, silent=silent, without_cpu=without_cpu(run), problem=problem, **more))
    return found


def seen(results: Answers) -> Iterator[tuple[str, RunState]]:
    """Host and run of every answer of run_info that found one, also of a loop or of run_models, without silent hosts."""
    for host, result in results.items():
        told = result or {}
        for one in told.get("results") or told.get("models") or [told]:
            if one and (run := one.get("run")) and run.get("run"):
                yield str(host), run


def age(run: RunState) -> tuple[int, float]:
    """Sort key: the newest training last; within a training, the last start last."""
    return number(run.get("training"), "number"), run.get("started") or 0.0


def one_run(results: Answers) -> str:
    """The name of the run started last on any host, which a command means on all of them; empty if there is none."""
    found = (run for dummy, run in seen(results))
    newest = max(found, key=lambda run: run.get("started") or 0.0, default=None)
    return str(newest["run"]) if newest else ""


def newest_model(results: Answers) -> dict[str, str]:
    """The host with the newest checkpoint of the newest training, with run and folder; empty if there is none.

    A fine-tuned model comes before its base.
    """
    having = [
        (str(run["run"]).endswith("-sft"), age(run)[0], run["saved"], -(run["rank"] or 0), host, run)
        for host, run in seen(results)
        if run.get("saved") is not None
    ]
    if not having:
        return {}
    *dummy, host, run = max(having, key=lambda one: one[:4])
    return {"host": host, "run": str(run["run"]), "run_dir": str(run["run_dir"])}


def whole_path(path: str) -> str:
    """A path on the controller; a relative one begins where the playbook was called."""
    return os.path.realpath(os.path.expanduser(path))


def is_local(known: Mapping[str, object]) -> bool:
    """Whether a host with these variables is this machine."""
    return known.get("ansible_connection") in ("local", "ansible.builtin.local")


def command_on(host: str, known: Mapping[str, object], argv: Sequence[str] = (), forwarding: Sequence[str] = ()) -> str:
    """The command line for a person who runs a program on a host, logs in or forwards a port (ssh's options for that), by the variables
    with which Ansible reaches it."""
    if is_local(known):
        return shlex.join(argv)
    key = known.get("ansible_ssh_private_key_file") or known.get("ansible_private_key_file")
    port, user = known.get("ansible_port"), known.get("ansible_user")
    more = [str(known[name]) for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args") if known.get(name)]
    target = f"{user}@{known.get('ansible_host') or host}" if user else str(known.get("ansible_host") or host)
    options = [
        *forwarding,
        *(["-i", str(key)] if key else []),
        *(["-p", str(port)] if port else []),
        *shlex.split(" ".join(more)),
    ]
    return shlex.join(["ssh", *options, target, *([shlex.join(argv)] if argv else [])])
