# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder in which small playbooks are played on local nodes, with stand-ins for the trainers at work."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT

FLAKY = """
DOCUMENTATION = '''
name: flaky
short_description: local, unless a file says that the host is down
description: local, unless a file says that the host is down
extends_documentation_fragment: [connection_pipelining]
'''
import os
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local
class Connection(Local):
    transport = "flaky"
    def exec_command(self, *args, **kwargs):
        if os.path.exists(DOWN):
            raise AnsibleConnectionFailure("the cable is out")
        return super().exec_command(*args, **kwargs)
"""


class Stage:
    """A folder with an inventory of local nodes, in which playbooks are played."""

    def __init__(self, folder: Path, hosts: int = 2) -> None:
        self.folder = folder
        self.hosts: dict[str, dict[str, Any]] = {f"node{rank + 1}": {"rank": rank} for rank in range(hosts)}
        nodes = [
            {"host": name, "run_dir": str(self.run_dir(rank)), "rank": rank} for rank, name in enumerate(self.hosts)
        ]
        self.variables: dict[str, Any] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ddp_base_dir": f"{folder}/{{{{ inventory_hostname }}}}",
            "ddp_plan": {"run": "d4", "timeout_seconds": 60, "nodes": nodes, "trainer": {"source": "ours"}},
            "ddp_controller": {
                "watch": "{{ watch | default(true) }}",
                "results_dir": str(folder / "runs"),
                "fresh": False,
            },
            "ddp_node": {
                "run_dir": "{{ ddp_base_dir }}/runs/d4",
                "base_dir": "{{ ddp_base_dir }}",
                "rank": "{{ rank | int }}",
            },
        }

    def run_dir(self, rank: int) -> Path:
        return self.folder / f"node{rank + 1}" / "runs" / "d4"

    def role(self, name: str, tasks: list[dict[str, Any]]) -> None:
        path = self.folder / "roles" / name / "tasks"
        path.mkdir(parents=True)
        (path / "main.yml").write_text(yaml.safe_dump(tasks))

    def flaky(self, host: str, down: Path, more: str = "") -> dict[str, str]:
        """Connect to a host by a plugin that fails while a file exists; returns the environment in which Ansible finds it."""
        self.hosts[host]["ansible_connection"] = "flaky"
        return self.plugin("ANSIBLE_CONNECTION_PLUGINS", "flaky", FLAKY.replace("DOWN", repr(str(down))) + more)

    def plugin(self, setting: str, name: str, text: str) -> dict[str, str]:
        """Write a plugin; returns the setting by which Ansible finds it."""
        folder = self.folder / setting.lower()
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        return {setting: str(folder)}

    def argv(self, plays: list[dict[str, Any]] | str, *words: str) -> list[str]:
        (self.folder / "hosts.yml").write_text(
            yaml.safe_dump({"trainers": {"hosts": self.hosts, "vars": self.variables}})
        )
        book = plays
        if not isinstance(plays, str):
            book = str(self.folder / "play.yml")
            defaults = {"hosts": "trainers", "gather_facts": False}
            Path(book).write_text(yaml.safe_dump([{**defaults, **play} for play in plays]))
        return ["ansible-playbook", "-i", str(self.folder / "hosts.yml"), str(book), *words]

    def environment(self, **more: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_") and name != "NO_COLOR"
        }
        return {
            **kept,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "PWD": str(self.folder),
            "LC_ALL": "C.UTF-8",
            **more,
        }

    def play(self, plays: list[dict[str, Any]] | str, *words: str, code: int = 0, **more: str) -> str:
        """Without a terminal."""
        argv, environment = self.argv(plays, *words), self.environment(**more)
        # The collection is found from the checkout, results go to the folder.
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        self.errors = done.stderr
        return done.stdout

    def terminal(self, plays: list[dict[str, Any]] | str, *words: str, **more: str) -> str:
        """With one."""
        argv, environment = self.argv(plays, *words), self.environment(TERM="xterm", COLUMNS="100", LINES="30", **more)
        child, descriptor = pty.fork()
        if child == 0:
            os.chdir(ROOT)
            os.execvpe(argv[0], argv, environment)
        seen, deadline = b"", time.monotonic() + 120
        while time.monotonic() < deadline:
            if select.select([descriptor], [], [], 0.2)[0]:
                try:
                    data = os.read(descriptor, 65536)
                except OSError:
                    break
                if not data:
                    break
                seen += data
        os.close(descriptor)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, seen.decode()
        return seen.decode()


def start_ranks(stage: Stage, *words: str, steps: int = 6, of: Iterable[int] = (0, 1)) -> list[subprocess.Popen[bytes]]:
    """Stand-ins for the trainers, at work."""
    program = str(ROOT / "tests" / "integration" / "fake_run.py")
    started = []
    for rank in of:
        argv = [
            sys.executable,
            program,
            str(stage.run_dir(rank)),
            "--rank",
            str(rank),
            "--steps",
            str(steps),
            "--seconds",
            "0.4",
        ]
        started.append(subprocess.Popen([*argv, *words]))
    return started


WATCH: list[dict[str, Any]] = [{"roles": [{"role": "nanochat.ddp.watch", "watch_doctor": ""}]}]


def ansible_processes(stage: Stage) -> list[int]:
    """The processes of Ansible that play for this stage."""
    found = subprocess.run(
        ["pgrep", "-f", f"ansible-playbook.*{stage.folder}"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]
