# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs of the action agent: those that a host answers, and those that take the controller."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError

from ...module_utils._kit.files import read_bytes, write_whole
from .carrier import HOST_VERBS, Call, decoded, read_sources

Answer = dict[str, Any]
# The judgements over all hosts, and the file with the function of that name.
JUDGEMENTS = {
    **dict.fromkeys(["read_settings", "read_questions", "make_plan"], "plan"),
    **dict.fromkeys(["judge_links", "judge_preflight"], "preflight"),
    **dict.fromkeys(["judge_launch", "judge_verdict"], "hosts"),
}
# Other verbs of the controller that have a file of their own.
FILES = {
    "run_watch": "watch",
    "run_files": "run_files",
    **dict.fromkeys(["run_models", "choose_model", "chat"], "chat"),
    **dict.fromkeys(["start_session", "restart_keeper", "take_back", "judge_stop", "stop_run"], "launch"),
    **dict.fromkeys(
        ["start_responder", "peer_check", "start_all_reduce", "measure_step", "keep_measured"], "preflight"
    ),
    **dict.fromkeys(["check_trainer", "trainer_files", "trainer_venv", "trainer_wheels"], "trainer"),
}
read_sources()


def answer(call: Call, verb: str) -> Answer:
    """The answer to a verb, whoever gives it."""
    found = on_controller(verb)
    if found:
        return found(call)
    if verb not in HOST_VERBS:
        raise AnsibleActionFail(f"{verb} is no verb")
    return call.ask(verb, **call.params)


@functools.cache
def on_controller(verb: str) -> Callable[[Call], Answer] | None:
    """The controller's side of a verb; it is imported by the first who asks, since few playbooks need all."""
    if verb in JUDGEMENTS:
        file = importlib.import_module(f".._judgements.{JUDGEMENTS[verb]}", __package__)
        return functools.partial(judged, judge=getattr(file, verb))
    if verb in FILES:
        found: Callable[[Call], Answer] = getattr(importlib.import_module(f".{FILES[verb]}", __package__), verb)
        return found
    return {
        "host_info": host_info,
        "run_info": run_info,
        "purge": purge,
        "root_access": root_access,
        "report": report,
    }.get(verb)


def judged(call: Call, judge: Callable[..., Answer]) -> Answer:
    """A judgement, which contacts no host."""
    from ...module_utils._contract.findings import PlanError

    try:
        return judge(call, **call.params)
    except PlanError as error:
        return {"failed": True, "msg": str(error), "problems": error.findings}


def host_info(call: Call) -> Answer:
    """The facts of a host that are asked for."""
    from ...module_utils._contract.probe import Probe

    return decoded(call.ask("host_info", **call.params["asked"]), {"probe": Probe}, call.host)


def run_info(call: Call) -> Answer:
    """The state of a host's share of a run; see the verb on the host."""
    from ...module_utils._run.state import RunState

    return decoded(call.ask("run_info", **call.located), {"run": RunState}, call.host)


def purge(call: Call) -> Answer:
    """Remove what the run or all jobs keep on a host; see the verb on the host."""
    return call.ask("purge", **{**call.located, "run": call.located["run"] or ""})


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


def report(call: Call) -> Answer:
    """Write the page about the first of the collected runs to dest, compared with the others; page: the folder of its parts."""
    from ...module_utils._preflight.predict import comparison_text
    from ...module_utils._run.collected import ReportError
    from ...module_utils._run.report import make_report

    runs, page, dest = (call.params[name] for name in ("runs", "page", "dest"))
    try:
        data = make_report(runs, page, comparison_text).encode("utf-8")
        changed = read_bytes(dest) != data
        if changed and not call.check:
            os.makedirs(os.path.dirname(dest) or ".", exist_ok=True)
            write_whole(dest, data)
    except (ReportError, OSError) as error:
        return {"failed": True, "msg": f"The report {dest} could not be made. {error}"}
    return {"changed": changed, "dest": dest, "bytes": len(data)}
