# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command by which a person talks to a checkpoint, and the terminal that it is given."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader
from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _handover
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import chat as action

OPTIONS = {
    "run_dir": "/srv/my runs/d4",
    "trainer_dir": "/srv/trainer",
    "python": "/srv/venv/bin/python",
    "flags": ["--seed=3"],
}


def act(monkeypatch: pytest.MonkeyPatch, connection: str, **options: Any) -> dict[str, Any]:
    monkeypatch.setattr(action, "display_is_ours", lambda: True)
    context = PlayContext()
    context.remote_addr = "laptop"
    made = connection_loader.get(connection, context, os.devnull)
    made.set_options(direct={"host": "192.168.1.11", "remote_user": "xiaoxin", "port": 2222, "password": "secret", **options}) \
        if connection == "ssh" else made.set_options()  # fmt: skip
    task = SimpleNamespace(args={"verb": "chat", **OPTIONS}, async_val=0, check_mode=False, diff=False)
    result: dict[str, Any] = ActionModule(task, made, context, None, None, None).run()
    return result


def test_over_ssh_with_the_connections_own_options(monkeypatch):
    result = act(monkeypatch, "ssh", ssh_extra_args="-o ServerAliveInterval=7")
    argv = result["terminal"]
    assert argv[0] == "ssh" and argv[-3:-1] == ["-tt", "192.168.1.11"]
    assert "ServerAliveInterval=7" in argv and "Port=2222" in argv and 'User="xiaoxin"' in argv
    assert shlex.split(result["line"]) == argv and result["remote"] and not result["changed"]
    assert "secret" not in result["line"] and "sshpass" not in result["line"]


def test_without_ansibles_own_command_its_documented_options_are_used(monkeypatch):
    monkeypatch.delattr(type(connection_loader.get("ssh", PlayContext(), os.devnull)), "_build_command")
    result = act(
        monkeypatch, "ssh", private_key_file="/keys/my key", ssh_common_args="-J lzw@gate", host_key_checking=False
    )
    argv = result["terminal"]
    assert argv[0] == "ssh" and argv[-3:-1] == ["-tt", "192.168.1.11"] and argv[-1].startswith("exec /bin/sh -c ")
    words = " ".join(argv[1:-3])
    assert "-p 2222 -l xiaoxin -i /keys/my key -o StrictHostKeyChecking=no -J lzw@gate" in words
    assert "secret" not in result["line"]


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh", "fish"])
def test_any_login_shell_starts_the_program_in_its_folder_with_its_environment(tmp_path, shell):
    """sshd gives the line to the user's own shell."""
    program = tmp_path / "it's a python!"
    program.write_text(
        '#!/bin/sh\npwd; printf "%s\\n" "$NANOCHAT_BASE_DIR" "$PYTHONPATH" "[$CUDA_VISIBLE_DEVICES]" "$@"\n'
    )
    program.chmod(0o755)
    line = action.remote_command({**OPTIONS, "trainer_dir": str(tmp_path), "python": str(program)})
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        *(str(tmp_path), "/srv/my runs/d4", str(tmp_path), "[]"),
        *("-m", "scripts.chat_cli", "--seed=3"),
    ], done.stderr


def test_on_the_controller(monkeypatch):
    assert act(monkeypatch, "local")["terminal"][:2] == ["/bin/sh", "-c"]


def test_over_another_connection_it_is_told_what_to_type(monkeypatch):
    with pytest.raises(AnsibleError, match=r"reached by containers\.podman\.podman; run there: exec"):
        made: Any = SimpleNamespace(_connection=SimpleNamespace(ansible_name="containers.podman.podman"))
        action.argv_of(made, "exec /bin/sh")


@pytest.mark.parametrize("remote", [False, True])
def test_a_program_has_the_terminal_and_ctrl_c_is_its_own(remote):
    assert not _handover.is_there()
    asked = "trap 'echo stopped; exit 7' INT; test -t 0 && printf '\\033]52;c;ZXZpbA==\\007ready\\n'; read line; exit 8"
    pid, end = pty.fork()
    if pid == 0:
        code = 99
        try:
            os.set_inheritable(0, False)
            code = _handover.hand_over(["/bin/sh", "-c", asked], remote)
        finally:
            sys.stdout.flush()
            os._exit(code)
    said = b""
    while b"ready" not in said:
        said += os.read(end, 1000)
    os.write(end, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    # The clipboard is obeyed by the terminal that is given it; another machine's program does not give it one.
    assert (b"\x1b]52" in said) is not remote
    os.close(end)
