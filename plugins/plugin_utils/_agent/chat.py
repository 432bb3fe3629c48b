# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds the command to chat with a checkpoint on a host. Tasks have no terminal: the display opens it at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.text.converters import to_text
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ...module_utils._kit.printable import printable
from .._configuration import display_is_ours
from .carrier import Call

display = Display()
LOCAL = ("local", "ansible.builtin.local")
SSH = ("ssh", "ansible.builtin.ssh")


def remote_command(options: Mapping[str, Any]) -> str:
    """The command for the host's login shell, which may be csh or fish: only sh sees more than plain words."""
    names = {"NANOCHAT_BASE_DIR": options["run_dir"], "PYTHONPATH": options["trainer_dir"], "CUDA_VISIBLE_DEVICES": ""}
    environment = ["env", *(f"{name}={value}" for name, value in names.items())]
    words = [options["trainer_dir"], *environment, options["python"], "-m", "scripts.chat_cli", *options["flags"]]
    return f'exec /bin/sh -c \'cd "$0" && exec "$@"\' {shlex.join(words)}'


def ssh_options(option: Callable[[str], Any]) -> list[str]:
    """The documented options of Ansible's ssh connection as words for ssh."""
    words = shlex.split(option("ssh_args") or "")
    flags = {"-p": "port", "-l": "remote_user", "-i": "private_key_file"}
    words += [word for flag, name in flags.items() if option(name) for word in (flag, str(option(name)))]
    words += [] if option("host_key_checking") else ["-o", "StrictHostKeyChecking=no"]
    return words + shlex.split(option("ssh_common_args") or "") + shlex.split(option("ssh_extra_args") or "")


def chat(call: Call) -> dict[str, Any]:
    """The command that chats with the newest checkpoint of a run_dir, with the trainer below trainer_dir, its python and flags.

    Our display runs it (`terminal`) when the playbook has ended, and filters what comes from another machine (`remote`).
    """
    argv = argv_of(call.action, remote_command(call.params))
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
    host, program = connection.get_option("host"), connection.get_option("ssh_executable")
    build = getattr(connection, "_build_command", None)
    if build is None:
        return [program, *ssh_options(connection.get_option), "-tt", host, command]
    # Ansible's own way of calling ssh uses the connection that is open, and asks for no password again. The task's
    # password would be passed through a pipe that ends with this task; a person can type it.
    connection.host = host
    connection.set_option("password", None)
    action._play_context.password = None
    return [to_text(word) for word in build(program, "ssh", "-tt", host, command)]
