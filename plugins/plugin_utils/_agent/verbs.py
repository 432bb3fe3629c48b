# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs of the action agent: those that a host answers, and those that take the controller."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ...module_utils._contract.findings import PlanError
from ...module_utils._contract.probe import Probe
from ...module_utils._doctor import gather
from ...module_utils._keeper import deployment
from ...module_utils._kit import env_state
from ...module_utils._kit.files import read_bytes, write_whole
from ...module_utils._preflight import all_reduce, peer_check, peer_responder, setup_look
from ...module_utils._probe import host
from ...module_utils._run import files, polling
from ...module_utils._run.collected import ReportError
from ...module_utils._run.report import make_report
from ...module_utils._run.state import RunState
from ...module_utils._session import boot, wanted
from ...module_utils._trainer import environment
from ...module_utils._trainer import files as trainer_files
from .._judgements import hosts, plan, preflight, verdict
from .._judgements.evidence import OF_PLAN, JudgeTask, Options
from . import trainer
from .carrier import Call, Verb, decoded, read_sources
from .chat import chat
from .run_files import run_files
from .watch import run_watch

# What hosts answer to the same parameters.
ON_HOSTS: Mapping[str, Verb] = {
    "run_info": polling.run_info,
    "run_folder": deployment.run_folder,
    "purge": deployment.purge,
    "env_file": env_state.env_file,
    "tmux_session": wanted.tmux_session,
    "session_boot": boot.session_boot,
    "doctor_info": gather.doctor_info,
    "peer_check": peer_check.peer_check,
    "start_responder": peer_responder.start_responder,
    "stop_responder": peer_responder.stop_responder,
    "start_all_reduce": all_reduce.start_all_reduce,
    "end_all_reduce": all_reduce.end_all_reduce,
}
# What the controller's verbs ask hosts.
BEHIND: Mapping[str, Verb] = {
    "host_info": host.host_info,
    "setup_info": setup_look.setup_info,
    "run_files": files.run_files,
    "trainer_files": trainer_files.trainer_files,
    "trainer_venv": environment.trainer_venv,
}
# The types of documents in answers.
ANSWERS: Mapping[str, Mapping[str, Any]] = {"run_info": {"run": RunState}}
# The judgements over all hosts, with their options.
JUDGEMENTS: Mapping[str, tuple[Options, Callable[[JudgeTask], dict[str, object]]]] = {
    "read_settings": (plan.HOSTS, plan.judge_settings),
    "read_questions": (plan.TOLERANT, plan.judge_questions),
    "make_plan": (plan.OPTIONS, plan.judge_plan),
    "judge_setup": (OF_PLAN, hosts.judge_setup),
    "judge_sameness": (hosts.SAMENESS, hosts.judge_sameness),
    "judge_launch": (hosts.LAUNCH, hosts.judge_launch),
    "judge_preflight": (preflight.OPTIONS, preflight.judge_preflight),
    "judge_verdict": (verdict.OPTIONS, verdict.judge_verdict),
}
read_sources({**ON_HOSTS, **BEHIND})


def answer(call: Call, verb: str) -> dict[str, Any]:
    """The answer to a verb, whoever gives it."""
    if verb in ON_HOSTS:
        return decoded(call.ask(ON_HOSTS[verb], **call.params), ANSWERS.get(verb, {}), call.host)
    if verb in JUDGEMENTS:
        return judged(call, *JUDGEMENTS[verb])
    return ON_CONTROLLER[verb](call)


def judged(call: Call, options: Options, judge: Callable[[JudgeTask], dict[str, object]]) -> dict[str, Any]:
    """A judgement, which contacts no host."""
    read = ArgumentSpecValidator(options).validate(call.params)
    if read.error_messages:
        raise AnsibleActionFail("; ".join(read.error_messages))
    try:
        return judge(JudgeTask(read.validated_parameters, call.variables, call.check))
    except PlanError as error:
        return {"failed": True, "msg": str(error), "problems": error.findings}


def host_info(call: Call) -> dict[str, Any]:
    """The facts of a host that are asked for; Ansible's own folder there is known from the inventory or Ansible's settings."""
    remote_tmp = call.action.get_shell_option("remote_tmp", default="~/.ansible/tmp")
    asked = call.params["asked"]
    return decoded(call.ask(host.host_info, remote_tmp=remote_tmp, **asked), {"probe": Probe}, call.host)


def root_access(call: Call) -> dict[str, Any]:
    """Whether the task's become settings give root; any other task with become is `fatal` if sudo needs a missing password."""
    connection = call.action._connection
    given = bool(connection.become and connection.become.get_option("become_pass"))
    try:
        told = call.action._low_level_execute_command("id -u")
    except AnsibleConnectionFailure:
        raise  # the host is reported as unreachable
    except AnsibleError as why:
        return access(False, given, str(why))
    # A login shell may print something first.
    is_root = told["rc"] == 0 and told["stdout"].split()[-1:] == ["0"]
    return access(is_root, given, told["stderr"] or told["stdout"])


def access(is_root: bool, given: bool, said: str) -> dict[str, Any]:
    """The result; of sudo's or Ansible's message the line that names the reason, without prompt, lecture and report."""
    prompts = re.sub(r"\[\w+ via ansible, key=\w+\] password:", "\n", said)
    lines = [line.strip().rstrip(".") for line in prompts.splitlines() if line.strip() and "This incident" not in line]
    return {"root": is_root, "given": given, "why": "" if is_root or not lines else lines[-1]}


def report(call: Call) -> dict[str, Any]:
    """Write the page about the first of the collected runs to dest, compared with the others; page: the folder of its parts."""
    runs, page, dest = (call.params[name] for name in ("runs", "page", "dest"))
    try:
        data = make_report(runs, page).encode("utf-8")
        changed = read_bytes(dest) != data
        if changed and not call.check:
            os.makedirs(os.path.dirname(dest) or ".", exist_ok=True)
            write_whole(dest, data)
    except (ReportError, OSError) as error:
        return {"failed": True, "msg": f"The report {dest} could not be made. {error}"}
    return {"changed": changed, "dest": dest, "bytes": len(data)}


ON_CONTROLLER: Mapping[str, Callable[[Call], dict[str, Any]]] = {
    "host_info": host_info,
    "root_access": root_access,
    "run_watch": run_watch,
    "run_files": run_files,
    "report": report,
    "chat": chat,
    "setup_info": trainer.setup_info,
    "check_trainer": trainer.check_trainer,
    "trainer_files": trainer.trainer_files,
    "trainer_venv": trainer.trainer_venv,
    "trainer_wheels": trainer.trainer_wheels,
}
