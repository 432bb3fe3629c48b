# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Takes a host out of a run that has keepers, and lets it take part again."""

from __future__ import annotations

import time
from typing import Any

from ...module_utils._contract.document import items
from ...module_utils._run.state import RUNNING, RunState
from .. import _runs
from .carrier import Call
from .launch import run_info, session_of

Answer = dict[str, Any]


def leave(call: Call) -> Answer:
    """Take the host out of its run, which goes on without it, and wait until it has left."""
    left = run_info(call)
    if left.get("failed"):
        return left
    run: RunState = left["run"]
    if run["membership"] is None:
        alone = (
            f"the run {run['run']} has no keeper here, so the others could not go on without this host; "
            "set ddp_restarts and start it again, or stop it with nanochat.ddp.stop"
        )
        why = alone if run["state"] == RUNNING else f"nothing runs here, it is {run['state']}"
        return {"failed": True, "msg": f"{call.host}: {why}."}
    asked = call.ask("keeper_request", run_dir=run["run_dir"], leave=True)
    # It finishes its step and saves first; the others may wait for it until the run's timeout.
    seconds = int((run["timeout_seconds"] or 300) + (run["stop_seconds"] or 0))
    end = time.monotonic() + seconds
    while not asked.get("failed") and not call.check and left["run"]["state"] == RUNNING:
        if time.monotonic() > end:
            why = f"after {seconds} s, the longest that a step and a checkpoint may take; it goes on trying to leave"
            doctor = "nanochat.ddp.doctor says what it waits for"
            return {"failed": True, "msg": f"{call.host} is still in the run {run['run']} {why}. {doctor}."}
        time.sleep(2)
        seen = run_info(call, run_dir=run["run_dir"], lines=0)
        left = left if seen.get("failed") else seen
    gone = "would leave" if call.check else "has left"
    show = f"{call.host} {gone} the run {run['run']}; the playbook nanochat.ddp.join lets it in again."
    return {**asked, "show": show}


def join(call: Call, others: _runs.RunAnswer) -> Answer:
    """Let the host take part again in the run that it left; others: what run_info returned on the other hosts."""
    found = run_info(call, plan=True)
    if found.get("failed"):
        return found
    run, plan = found["run"], found["plan"]
    node: Any = next((one for one in items(plan, "nodes") if one.get("host") == call.host), {})
    meant = _runs.one_run({"others": others, call.host: {"run": run}})
    why = ""
    if meant not in ("", run["run"]):
        why = f"its newest run is {run['run'] or 'none'}, but on the other hosts it is {meant}; say which one is meant: -e ddp_run=NAME"
    elif _runs.age(run)[0] < max((_runs.age(one)[0] for dummy, one in _runs.seen({"others": others})), default=0):
        older = "is older than that of the other hosts; train.yml with all hosts lets it take part"
        why = f"its training of the run {meant} {older}"
    elif "session_argv" not in node:
        damaged = f"{run['run_dir']}/plan.json is missing or damaged"
        lacks = damaged if not plan else f"the run {run['run']} was started without keepers"
        why = f"{'nothing was set up here' if run['state'] == 'absent' else lacks}; start it with ddp_restarts by train.yml"
    if why:
        return {"failed": True, "msg": f"{call.host}: {why}."}
    asked = call.ask("keeper_request", run_dir=run["run_dir"], leave=False, join="guest" in node)
    if asked.get("failed"):
        return asked
    state = "started" if run["state"] == RUNNING else "restarted"
    told = call.ask("tmux_session", **session_of(plan, node), state=state)
    show = f"{call.host} asks to be let in; the playbook nanochat.ddp.status shows when it is."
    return {**told, "changed": asked["changed"] or told.get("changed"), "show": show}
