# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Talks to a checkpoint on the host that has it. Tasks have no terminal: the display opens the prompt at the end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.module_utils.common.text.converters import to_text
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ...module_utils._contract.document import items
from ...module_utils._contract.validate import InvalidHostData, absolute_path
from ...module_utils._kit.printable import printable
from ...module_utils._run.state import RunState
from .._configuration import display_is_ours
from .._runs import Answers, newest_model
from .carrier import Call, decoded

display = Display()
LOCAL = ("local", "ansible.builtin.local")
SSH = ("ssh", "ansible.builtin.ssh")


def run_models(call: Call, run: str, stage: str) -> dict[str, Any]:
    """The host's share of a run and of its fine-tuning, which is a run of its own, NAME-sft; with stage base of the run alone."""
    base = run.removesuffix("-sft")
    names = [] if not base else [base] if stage == "base" else [f"{base}-sft", base]
    found = [call.ask("run_info", **call.which_run(name), plan=True) for name in names]
    return {"models": [decoded(one, {"run": RunState}, call.host) for one in found]}


def choose_model(call: Call, found: Answers) -> dict[str, str]:
    """Where the newest checkpoint of the newest training is, and how it is loaded there; found: what run_models returned by host."""
    model = newest_model(found)
    if not model:
        named = call.which_run()["run"]
        where = f" in the run {named}" if named else ""
        advice = "train one: ansible-playbook train.yml -i INVENTORY"
        raise AnsibleActionFail(f"No host has a checkpoint to talk to{where}; {advice}")
    host, run_dir = model["host"], model["run_dir"]
    models = [one for one in (found[host] or {}).get("models") or [] if one]
    deployed = [one.get("plan") for one in models if (run := one.get("run")) and run.get("run_dir") == run_dir]
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


def remote_command(model: Mapping[str, str], flags: Mapping[str, object], asks: bool = False) -> str:
    """The command for the host's login shell, which may be csh or fish: only sh sees more than plain words, or (asks) a prompt on stdin."""
    names = {"NANOCHAT_BASE_DIR": model["run_dir"], "PYTHONPATH": model["trainer_dir"], "CUDA_VISIBLE_DEVICES": ""}
    environment = ["env", *(f"{name}={value}" for name, value in names.items())]
    given = [f"--{name}={value}" for name, value in flags.items() if value not in (None, "")]
    words = [model["trainer_dir"], *environment, model["python"], "-m", "scripts.chat_cli", *given]
    prompt = ' --prompt="$(cat)"' if asks else ""
    return f'exec /bin/sh -c \'cd "$0" && exec "$@"{prompt}\' {shlex.join(words)}'


def chat(call: Call, model: Mapping[str, str], flags: Mapping[str, object], prompt: Any) -> dict[str, Any]:
    """Answer one prompt by a model (see choose_model), with the flags of scripts.chat_cli; without a prompt, build the command that chats.

    Then our display runs the command (`terminal`) when the playbook has ended, and filters what comes from another machine (`remote`).
    """
    if prompt and call.check:
        return {}
    if prompt:
        command = remote_command(model, flags, asks=True)
        told = call.action._low_level_execute_command(command, in_data=str(prompt).encode())
        if told["rc"]:
            why = (told["stderr"] or told["stdout"]).strip().splitlines()[-1:] or ["it says nothing"]
            raise AnsibleActionFail(f"{call.host}: the model could not be asked: {why[0]}")
        return {"show": told["stdout"]}
    argv = argv_of(call.action, remote_command(model, flags))
    line = shlex.join(argv)
    if not display_is_ours():
        display.display(printable(f"Run this to chat with the model:\n{line}"))
    return {"terminal": argv, "remote": call.action._connection.ansible_name in SSH, "line": line}


def argv_of(action: ActionBase, command: str) -> list[str]:
    """The command as the controller starts it: through the host's own connection if that is ssh."""
    connection = action._connection
    kind = connection.ansible_name
    if kind in LOCAL:
        return ["/bin/sh", "-c", command]
    if kind not in SSH:
        raise AnsibleError(f"A prompt needs ssh, but this host is reached by {kind}; run there: {command}")
    # Ansible's own way of calling ssh uses the connection that is open, and asks for no password again. The task's
    # password would be passed through a pipe that ends with this task; a person can type it.
    connection.host = connection.get_option("host")
    connection.set_option("password", None)
    action._play_context.password = None
    words = connection._build_command(connection.get_option("ssh_executable"), "ssh", "-tt", connection.host, command)
    return [to_text(word) for word in words]
