# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Talks to a checkpoint on the host that has it. Tasks have no terminal: the display opens the prompt at the end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display

from ...module_utils._contract.document import items
from ...module_utils._contract.validate import InvalidHostData, absolute_path
from ...module_utils._kit.printable import printable
from ...module_utils._run.state import RunState
from .._configuration import display_is_ours
from .._runs import command_on, is_local, newest_model
from .carrier import Call, decoded

display = Display()


def run_models(call: Call, run: str, stage: str) -> dict[str, Any]:
    """The host's share of a run and of its fine-tuning, which is a run of its own, NAME-sft; with stage base of the run alone."""
    base = run.removesuffix("-sft")
    names = [] if not base else [base] if stage == "base" else [f"{base}-sft", base]
    found = [call.ask("run_info", **call.which_run(name), plan=True) for name in names]
    return {"models": [decoded(one, {"run": RunState}, call.host) for one in found]}


def choose_model(call: Call, found: Mapping[str, Any]) -> dict[str, Any]:
    """Where the newest checkpoint of the newest training is, and how it is loaded there; found: what run_models returned by host."""
    model = newest_model(found)
    if not model:
        named = call.which_run()["run"]
        where = f" in the run {named}" if named else ""
        advice = "train one: ansible-playbook train.yml -i INVENTORY"
        raise AnsibleActionFail(f"No host has a checkpoint to talk to{where}; {advice}")
    host, run_dir = model["host"], model["run_dir"]
    deployed = [one.get("plan") for one in found[host]["models"] if (one.get("run") or {}).get("run_dir") == run_dir]
    nodes = [node for plan in deployed for node in items(plan or {}, "nodes")]
    # The inventory may have renamed it.
    node = next((one for one in nodes if one.get("host") == host), nodes[0] if nodes else {})
    try:
        trainer_dir = absolute_path(node.get("trainer_dir"))
        python = f"{absolute_path(node.get('venv_dir'))}/bin/python"
    except InvalidHostData:
        how = "it says how the trainer is started; train.yml writes it again"
        raise AnsibleActionFail(f"{host}: {run_dir}/plan.json is missing or damaged, and {how}.") from None
    return {
        **model,
        "trainer_dir": trainer_dir,
        "python": python,
        "show": f"Loading the model of {model['run']} on {host}; this takes a few seconds, on a slow machine up to a minute.",
    }


def program_of(model: Mapping[str, Any], flags: Mapping[str, Any], asks: bool = False) -> list[str]:
    """The program that chats, or (asks) answers a prompt on stdin. Login shells may be csh or fish: only sh sees more than plain words."""
    names = {"NANOCHAT_BASE_DIR": model["run_dir"], "PYTHONPATH": model["trainer_dir"], "CUDA_VISIBLE_DEVICES": ""}
    environment = ["env", *(f"{name}={value}" for name, value in names.items())]
    given = [f"--{name}={value}" for name, value in flags.items() if value not in (None, "")]
    script = 'cd "$0" && exec "$@"' + (' --prompt="$(cat)"' if asks else "")
    words = [model["trainer_dir"], *environment, model["python"], "-m", "scripts.chat_cli", *given]
    return ["/bin/sh", "-c", script, *words]


def chat(call: Call, model: Mapping[str, Any], flags: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    """Answer one prompt by a model (see choose_model), with the flags of scripts.chat_cli; without a prompt, build the command that chats.

    Then our display runs the command (`terminal`) when the playbook has ended, and filters what comes from another machine (`remote`).
    """
    if prompt:
        return {} if call.check else answer_to(call, str(prompt), program_of(model, flags, asks=True))
    known = call.variables["hostvars"][call.host]
    line = command_on(call.host, known, program_of(model, flags), terminal=True)
    if not display_is_ours():
        display.display(printable(f"Run this to chat with the model:\n{line}"))
    return {"terminal": shlex.split(line), "remote": not is_local(known), "line": line}


def answer_to(call: Call, prompt: str, program: Sequence[str]) -> dict[str, Any]:
    """The answer of the model."""
    told = call.action._low_level_execute_command(shlex.join(program), in_data=prompt.encode())
    if told["rc"]:
        why = (told["stderr"] or told["stdout"]).strip().splitlines()[-1:] or ["it says nothing"]
        raise AnsibleActionFail(f"{call.host}: the model could not be asked: {why[0]}")
    return {"show": told["stdout"]}
