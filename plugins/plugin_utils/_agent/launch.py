# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts and stops a host's share of a run. Every step is taken on all hosts before the next: a run starts on all of them or on none."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError

from ...module_utils._contract.document import Document, section
from ...module_utils._contract.plan import Node, Plan
from ...module_utils._contract.settings import convert
from ...module_utils._contract.settings_table import find
from ...module_utils._run.state import RUNNING, RunState
from ...module_utils._run.stopping import LONGEST_STOP
from .._runs import Answers, RunAnswer, why_no_answer
from .carrier import Call, decoded
from .watch import answered_within

Answer = dict[str, Any]
END_SECONDS = 60  # for processes that do not end by themselves


def run_info(call: Call, **params: Any) -> Answer:
    """The state of a host's share of a run; see the verb on the host."""
    return decoded(call.ask("run_info", **call.located(params)), {"run": RunState}, call.host)


def judge_launch(call: Call, plan: Plan, evidence: Answers, restart: bool = False, fresh: bool = False) -> Answer:
    """Whether to start the run, and why; `seconds`: how long stopping what runs may take."""
    answers = {node["host"]: (evidence.get(node["host"]) or {}).get("run") for node in plan["nodes"]}
    missing = [host for host, run in answers.items() if run is None]
    if missing:
        again = "run the play again without --limit and --start-at-task"
        raise AnsibleError(f"There is no evidence about the run from {missing[0]}; {again}.")
    runs = [run for run in answers.values() if run]
    decision, reason = _launch_action(runs, plan["digest"], restart, fresh)
    show = "" if decision == "start" else f"The run {plan['run']} is left alone: {reason}."
    return {"decision": decision, "reason": reason, "show": show, "seconds": stop_limit(runs)}


def _launch_action(
    runs: Sequence[Mapping[str, object]], plan_digest: str, restart: bool, fresh: bool
) -> tuple[str, str]:
    """From all hosts' states (from run_info), because a run lives or ends as a whole."""
    states = {str(run["state"]) for run in runs}
    if fresh:
        return "start", "you asked for a fresh start"
    if any(run.get("plan_digest") != plan_digest for run in runs):
        return "start", "the plan is new on at least one host"
    if "finished" in states and states <= {"finished", "away"}:
        # A host that was away at the end has nothing left to do either.
        return "keep", "it already finished with this plan; -e ddp_fresh=true trains it from scratch"
    if restart:
        return "start", "you asked for a restart"
    if states == {"running"}:
        return "keep", "it is already running with this plan"
    return "start", "it is " + " and ".join(sorted(states)) + " on its hosts"


def stop_limit(runs: Iterable[RunState]) -> int:
    """How many seconds a stop may take: those of the slowest rank."""
    stops = [float(seconds) for run in runs if (seconds := run["stop_seconds"]) and seconds <= LONGEST_STOP]
    return math.ceil(max(stops, default=60.0))


def start_session(
    call: Call, plan: Plan, node: Node, training: Document, secrets: Any, ready: bool, **run_folder: Any
) -> Answer:
    """Start node's session of plan; with `ready` only write its environment and see that nothing would refuse: an earlier run may go on.

    training and the other parameters are those of run_folder; secrets: the part of the environment that is in no plan.
    `show` tells which files of an earlier training were set aside.
    """
    env = {**node["env"], **convert(find("ddp_secret_env"), secrets)}
    session = {**session_of(plan, node), "at_boot": bool(section(plan, "keeper").get("survive_reboot"))}
    launched = {**training, "now": time.time()} if training else None
    folder = {**run_folder, "plan": plan, "path": node["run_dir"], "training": launched}
    answer: Answer = {"changed": False, "diff": []}
    for verb, params in (
        ("run_folder", {**folder, "state": "ready" if ready else "deployed"}),
        ("env_file", {"path": session["env_file"], "env": env, "secrets": node["env_secret"]}),
        ("tmux_session", {**session, "state": "ready" if ready else "restarted"}),
    ):
        if verb == "tmux_session" and ready and call.check:
            break  # on a bare host nothing to run exists yet
        told = call.ask(verb, **params)
        if told.get("failed"):
            return told
        diff = [*answer["diff"], *([told["diff"]] if told.get("diff") else [])]
        answer = {**answer, **told, "changed": answer["changed"] or told["changed"], "diff": diff}
    if ready:
        # In check mode the next pass finds the environment unwritten, and tells of it.
        return {} if call.check else {name: answer[name] for name in ("changed", "diff")}
    if answer.get("set_aside"):
        step = answer["checkpoint"]
        kept = "no checkpoint" if step is None else f"checkpoints up to step {step}"
        where = f"{'would go to' if call.check else 'is kept in'} {answer['place']}"
        answer["show"] = f"{call.host}: what the run had written before {where} ({kept})"
    return answer


def session_of(plan: Plan, node: Node) -> dict[str, Any]:
    """The options of tmux_session for a host's share of a run."""
    return {
        "name": node["session"],
        "state_dir": node["run_dir"],
        "argv": node.get("session_argv") or node["argv"],
        "chdir": node["trainer_dir"],
        "env_file": f"{node['run_dir']}/env",
        "log": f"{node['run_dir']}/log/rank{node['rank']}.log",
        # For a stop from elsewhere, such as a shutdown.
        "stop_timeout": plan["timeout_seconds"],
        # A keeper that dies is started again.
        "revive": "session_argv" in node,
    }


def take_back(call: Call, node: Node, started: Answers) -> Answer:
    """Stop node's session again, and fail, if that of any host could not be started (started: what start_session returned by host)."""
    own = started[call.host] or {}
    failed = [host for host, result in started.items() if not (result or {}).get("session")]
    if not failed:
        return {}
    if own.get("session"):
        with contextlib.suppress(AnsibleConnectionFailure):
            call.ask("tmux_session", name=node["session"], state_dir=node["run_dir"], state="stopped", stop_timeout=5)
        return {"failed": True, "msg": f"{call.host}: stopped again, since {' and '.join(failed)} could not start"}
    why = own.get("msg") or "did not answer"
    if own.get("unreachable"):
        why = "could not be reached while its session was started; see that it is on and that ssh to it works as the inventory says"
    return {"failed": True, "msg": f"{call.host}: {why} (the other hosts were stopped again)"}


def judge_stop(call: Call, found: Answers) -> Answer:
    """How many seconds a stop of the run may take that was found (what run_info returned by host).

    Without a name, a run that is not the same on all hosts is refused.
    """
    runs = [run for result in found.values() if (run := (result or {}).get("run"))]
    names = sorted({run["run"] for run in runs if run["run"]})
    if len(names) > 1 and not call.which_run()["run"]:
        told = f"The newest run is not the same on all hosts ({', '.join(names)}), so say which one is meant"
        return {"failed": True, "msg": f"{told}: -e ddp_run=NAME. Nothing was stopped."}
    return {"seconds": stop_limit(runs)}


def stop_run(call: Call, found: RunAnswer, state: str, seconds: float) -> Answer:
    """Stop the host's share of the run that was found (what run_info returned), and see that nothing runs; `show` tells its state.

    state: stopped keeps the session to be read, absent removes it too.
    """
    run: RunState | None = found.get("run")
    if run is None:
        return {"failed": True, "msg": f"{call.host}: nothing was stopped there, since {why_no_answer(found)}"}
    stopped: Answer = {}
    # Of a run that is only prepared, an earlier start may have left what starts it after a reboot.
    if run["rank"] is not None and run["state"] not in (["absent"] if state == "absent" else ["absent", "prepared"]):
        session = {"name": f"nanochat-{run['run']}-rank{run['rank']}", "state_dir": run["run_dir"], "state": state}
        with answered_within(seconds + END_SECONDS):
            stopped = call.ask("tmux_session", **session, stop_timeout=seconds)
    with answered_within(0):
        left = stopped if stopped.get("failed") else run_info(call, **call.which_run(run["run"]))
    if left.get("failed"):
        return left
    if left["run"]["state"] == RUNNING and not call.check:
        why = f"still runs, {seconds} s after it was told to stop; nanochat.ddp.doctor says what it waits for"
        return {"failed": True, "msg": f"{call.host}: the run {run['run']} {why}"}
    return {**stopped, "show": f"{call.host}: {ending(run, left['run'], call.check)}"}


def ending(before: RunState, after: RunState, check: bool) -> str:
    """How a run ended that was told to stop."""
    if after["state"] == "absent":
        return "nothing was set up"
    stopped = f"{'would be' if check else 'was'} stopped"
    told = [
        f"run {before['run']} {stopped if before['state'] == RUNNING else 'does not run, it is ' + str(before['state'])}"
    ]
    if after["step"] is not None:
        told += [f"{after['done']}{' of %d' % after['steps'] if after['steps'] else ''} steps done"]
    saved = after["saved"]
    return ", ".join([*told, "no checkpoint" if saved is None else f"newest checkpoint: step {saved}"])
