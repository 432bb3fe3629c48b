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
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import chat
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import Call
from ansible_collections.nanochat.ddp.plugins.plugin_utils._display import terminal

MODEL = {"run_dir": "/srv/my runs/d4", "trainer_dir": "/srv/trainer", "python": "/srv/venv/bin/python"}
SSH = {"host": "192.168.1.11", "remote_user": "xiaoxin", "port": 2222, "password": "secret"}


def talk(monkeypatch: pytest.MonkeyPatch, connection: str, ours: bool = True, **options: Any) -> dict[str, Any]:
    monkeypatch.setattr(chat, "display_is_ours", lambda: ours)
    context = PlayContext()
    context.remote_addr = "laptop"
    made = connection_loader.get(connection, context, os.devnull)
    made.set_options(direct={**SSH, **options} if connection == "ssh" else None)
    action: Any = SimpleNamespace(_connection=made, _play_context=context, _task=SimpleNamespace(check_mode=False))
    return chat.chat(Call(action, {}), model=MODEL, prompt="", flags={"seed": 3, "step": ""})


def test_over_ssh_with_the_connections_own_options(monkeypatch):
    result = talk(monkeypatch, "ssh", ssh_extra_args="-o ServerAliveInterval=7")
    argv = result["terminal"]
    assert argv[0] == "ssh" and argv[-3:-1] == ["-tt", "192.168.1.11"]
    assert "ServerAliveInterval=7" in argv and "Port=2222" in argv and 'User="xiaoxin"' in argv
    assert shlex.split(result["line"]) == argv and result["remote"]
    assert "secret" not in result["line"] and "sshpass" not in result["line"]


def test_under_another_display_the_line_is_printed(monkeypatch):
    printed: list[str] = []
    monkeypatch.setattr(chat.display, "display", printed.append)
    result = talk(monkeypatch, "local", ours=False)
    assert printed == [f"Run this to chat with the model:\n{result['line']}"]


def test_on_the_controller_and_where_neither_leads(monkeypatch):
    assert talk(monkeypatch, "local")["terminal"][:2] == ["/bin/sh", "-c"]
    made: Any = SimpleNamespace(_connection=SimpleNamespace(ansible_name="containers.podman.podman"))
    with pytest.raises(AnsibleError, match=r"reached by containers\.podman\.podman; run there: exec"):
        chat.argv_of(made, "exec /bin/sh")


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh", "fish"])
def test_any_login_shell_starts_the_program_in_its_folder_with_its_environment(tmp_path, shell):
    """sshd gives the line to the user's own shell."""
    program = tmp_path / "it's a python!"
    program.write_text(
        '#!/bin/sh\npwd; printf "%s\\n" "$NANOCHAT_BASE_DIR" "$PYTHONPATH" "[$CUDA_VISIBLE_DEVICES]" "$@"\n'
    )
    program.chmod(0o755)
    model = {**MODEL, "trainer_dir": str(tmp_path), "python": str(program)}
    line = chat.remote_command(model, {"seed": 3, "step": ""}, asks=True)
    done = subprocess.run([shell, "-c", line], input="it's {{ 1 }}\n?", capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        *(str(tmp_path), "/srv/my runs/d4", str(tmp_path), "[]"),
        *("-m", "scripts.chat_cli", "--seed=3", "--prompt=it's {{ 1 }}", "?"),
    ], done.stderr


@pytest.mark.parametrize("remote", [False, True])
def test_a_program_has_the_terminal_and_ctrl_c_is_its_own(remote):
    asked = "trap 'echo stopped; exit 7' INT; test -t 0 && printf '\\033]52;c;ZXZpbA==\\007ready\\n'; read line; exit 8"
    pid, end = pty.fork()
    if pid == 0:
        code = 99
        try:
            os.set_inheritable(0, False)
            code = terminal.hand_over(["/bin/sh", "-c", asked], remote)
        finally:
            sys.stdout.flush()
            os._exit(code)
    said = b""
    while b"ready" not in said:
        said += os.read(end, 1000)
    done = (0, 0)
    # A shell that is just about to wait for a line sees its trap only at the next one.
    while not done[0]:
        os.write(end, b"\x03")
        time.sleep(0.2)
        done = os.waitpid(pid, os.WNOHANG)
    assert os.waitstatus_to_exitcode(done[1]) == 7
    # The clipboard is obeyed by the terminal that is given it; another machine's program does not give it one.
    assert (b"\x1b]52" in said) is not remote
    os.close(end)


PLAIN: Any = SimpleNamespace(
    _task=SimpleNamespace(delegate_to=None), _templar=SimpleNamespace(template=lambda one: one)
)


@pytest.mark.parametrize(
    ("asked", "stage", "looked"),
    [("d4", "", ["d4-sft", "d4"]), ("d4-sft", "", ["d4-sft", "d4"]), ("d4-sft", "base", ["d4"]), ("", "", [])],
)
def test_chat_looks_at_the_named_run_and_its_fine_tuning(monkeypatch, asked, stage, looked):
    monkeypatch.setattr(Call, "ask", lambda self, verb, run, **more: {"failed": True, "run": run})
    told = chat.run_models(Call(PLAIN, {"inventory_hostname": "a"}), asked, stage)
    assert [one["run"] for one in told["models"]] == looked


def test_without_a_checkpoint_or_its_plan_it_is_told_what_to_do():
    call = Call(PLAIN, {"ddp_run": "d4"})
    with pytest.raises(AnsibleActionFail, match="No host has a checkpoint to talk to in the run d4; train one"):
        chat.choose_model(call, {"a": {"models": [{"run": EMPTY}]}, "b": None})
    run = {**EMPTY, "run": "d4", "saved": 10, "run_dir": "/x/runs/d4"}
    with pytest.raises(AnsibleActionFail, match=r"a: /x/runs/d4/plan\.json is missing or damaged"):
        chat.choose_model(call, {"a": {"models": [{"run": run, "plan": {}}]}})
