# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs of the action agent: those that a host answers, and those that take the controller."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError

from ...module_utils._contract.findings import PlanError
from .carrier import HOST_VERBS, Call, decoded, read_sources

Answer = dict[str, Any]
# The verbs of the controller by the file with the functions of these names, which the first who asks imports: few playbooks need all.
FILES = {
    "_agent.verbs": ("host_info", "judge_reset", "purge", "root_access"),
    "_agent.watch": ("run_watch", "judge_watch"),
    "_agent.collect": ("run_files", "report"),
    "_agent.chat": ("run_models", "choose_model", "chat"),
    "_agent.launch": ("run_info", "judge_launch", "start_session", "take_back", "judge_stop", "stop_run"),
    "_agent.members": ("leave", "join"),
    "_agent.preflight": ("start_responder", "peer_check", "start_all_reduce", "measure_step", "keep_measured"),
    "_agent.trainer": ("check_trainer", "trainer_files", "trainer_venv", "start_tracker", "stop_tracker"),
    "_judgements.plan": ("read_questions", "make_plan"),
    "_judgements.preflight": ("judge_links", "judge_preflight"),
    "_judgements.doctor": ("deployed_plan", "doctor_info", "judge_verdict"),
}
FILE_OF = {verb: file for file, found in FILES.items() for verb in found}
read_sources()


def answer(call: Call, verb: str, params: Mapping[str, object]) -> Answer:
    """The answer to a verb, whoever gives it."""
    found = on_controller(verb)
    if found:
        try:
            return found(call, **params)
        except PlanError as error:
            return {"failed": True, "msg": str(error), "problems": error.findings}
    if verb not in HOST_VERBS:
        raise AnsibleActionFail(f"{verb} is no verb")
    return call.ask(verb, **params)


def on_controller(verb: str) -> Callable[..., Answer] | None:
    """The controller's side of a verb; None if it has none."""
    if verb not in FILE_OF:
        return None
    found: Callable[..., Answer] = getattr(importlib.import_module(f"..{FILE_OF[verb]}", __package__), verb)
    return found


# Nearly every playbook asks for it: imported once, before Ansible forks a process for each task and host.
on_controller("run_info")


def host_info(call: Call, asked: Mapping[str, object]) -> Answer:
    """The facts of a host that are asked for."""
    from ...module_utils._contract.probe import Probe

    return decoded(call.ask("host_info", **asked), {"probe": Probe}, call.host)


def judge_reset(call: Call) -> Answer:
    """Whether the options of a reset say what to delete; which run is the newest may differ between hosts, so none is guessed."""
    known = call.variables
    asked = known.get("ddp_purge") or ""
    everything = "everything that jobs keep below the base folder"
    how = f"-e ddp_purge=run -e ddp_run=NAME (or -e ddp_purge=all for {everything})"
    why = ""
    if asked not in ("", "run", "all"):
        why = f'ddp_purge is "{asked}"; it must be run (the run\'s folder goes too) or all ({everything})'
    elif "purge" in known:
        why = f"There is no variable purge; what reset removes is said by ddp_purge: {how}"
    elif asked == "run" and not known.get("ddp_run"):
        why = f"ddp_purge=run removes the folder of a run, so its name has to be said: {how}"
    return {"failed": True, "msg": f"{why}."} if why else {}


def purge(call: Call, **params: Any) -> Answer:
    """Remove what the run or all jobs keep on a host; see the verb on the host."""
    located = call.located(params)
    return call.ask("purge", **{**located, "run": located["run"] or ""})


def root_access(call: Call) -> Answer:
    """Whether the task's become settings give root (rights: password), or why a password that was given does not (refused).

    Any other task with become is `fatal` if sudo needs a password that nobody gave.
    """
    connection = call.action._connection
    given = bool(connection.become and connection.become.get_option("become_pass"))
    try:
        told = call.action._low_level_execute_command("id -u")
        said = told["stderr"] or told["stdout"]
        # A login shell may print something first.
        if told["rc"] == 0 and told["stdout"].split()[-1:] == ["0"]:
            return {"rights": "password", "refused": ""}
    except AnsibleConnectionFailure:
        raise  # the host is reported as unreachable
    except AnsibleError as why:
        said = str(why)
    if not given:
        return {"rights": "none", "refused": ""}
    # Of sudo's or Ansible's message the line that names the reason, without prompt, lecture and report.
    prompts = re.sub(r"\[\w+ via ansible, key=\w+\] password:", "\n", said)
    lines = [line.strip().rstrip(".") for line in prompts.splitlines() if line.strip() and "This incident" not in line]
    refused = lines[-1] if lines else "no reason was given"
    show = f"{call.host} goes on without root: the password that was given does not work there ({refused})."
    return {"rights": "none", "refused": refused, "show": show}
