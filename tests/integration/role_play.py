# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plays roles of this collection against hosts that are folders of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, ansible


def played(folder: Path, play: dict, *words: str) -> str:
    """Ansible's output of one play on this machine; fails if the play does."""
    file = folder / "play.json"
    file.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, **play}]))
    named = f"ansible_python_interpreter={sys.executable}"
    argv = ["-i", "localhost,", "-c", "local", file, "-e", named, *words]
    done = ansible("ansible-playbook", *argv, ANSIBLE_STDOUT_CALLBACK="default")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Play:
    """One inventory of local hosts, one plan, and the roles that a test plays."""

    def __init__(self, folder: Path, hosts: str, plan: dict, environment: dict | None = None) -> None:
        self.folder = folder
        self.plan = plan
        self.hosts = {name: self._node(name) for name in hosts}
        self.environment = environment or {}
        self.environments: dict[str, dict] = {}  # of single hosts
        self.variables: dict = {}
        plan["nodes"] = list(self.hosts.values())

    def _node(self, name: str) -> dict:
        base = f"{self.folder}/{name}"
        return {
            "host": name,
            "address": "127.0.0.1",
            "data_ports": {"low": 32768, "high": 60999},
            "device": "cpu",
            "base_dir": base,
            "run_dir": f"{base}/runs/d4",
            "data_dir": f"{base}/data/{self.plan['data']['id']}",
            "trainer_dir": f"{base}/trainer",
            "tools_dir": f"{base}/trainer",
            "venv_dir": f"{base}/venv",
            "flags": {},
            "argv": [f"{base}/venv/bin/python", "-m", "scripts.base_train"],
        }

    def run(self, role: str, *arguments: str) -> dict:
        """Plays a role (or several, joined by +), or one of its entry points as `role:tasks`; returns Ansible's account by task, with its
        counts below `stats`."""
        inventory = {
            "all": {
                "hosts": {
                    name: {"ddp_node": node, "own": self.environments.get(name, {})}
                    for name, node in self.hosts.items()
                }
            }
        }
        inventory["all"]["vars"] = {
            "ansible_connection": "local",
            "ansible_pipelining": True,  # as the plays of the collection have it
            "ansible_python_interpreter": sys.executable,
            "ddp_plan": self.plan,
            **self.variables,
        }
        parts = [one.partition(":") for one in role.split("+")]
        included = [
            {"name": f"nanochat.ddp.{name}", **({"tasks_from": tasks} if tasks else {})} for name, dummy, tasks in parts
        ]
        play = {
            "hosts": "all",
            "gather_facts": False,
            "any_errors_fatal": True,
            "tasks": [{"ansible.builtin.import_role": one} for one in included],
        }
        play["environment"] = "{{ own }}"
        (self.folder / "inventory.json").write_text(json.dumps(inventory))
        (self.folder / "play.json").write_text(json.dumps([play]))
        (self.folder / "ansible.cfg").write_text("[defaults]\n")
        environment = {
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "ANSIBLE_COLLECTIONS_PATH": f"{ROOT}/.ansible/collections",
            "ANSIBLE_CONFIG": str(self.folder / "ansible.cfg"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }
        argv = ["-i", self.folder / "inventory.json", self.folder / "play.json", *arguments]
        done = ansible("ansible-playbook", *argv, cwd=self.folder, **environment)
        begin = done.stdout.find("{")
        assert begin >= 0, done.stdout + done.stderr
        return json.loads(done.stdout[begin:])


def counts(account: dict, what: str) -> dict[str, int]:
    """Such as `changed`, by host."""
    return {name: stats[what] for name, stats in account["stats"].items()}


def results(account: dict, task: str) -> dict[str, dict]:
    """The hosts' results of the task of that name."""
    found: dict[str, dict] = {}
    for entry in account["plays"][0]["tasks"]:
        if entry["task"]["name"].endswith(task):
            found.update(entry["hosts"])
    return found


def messages(account: dict) -> list[str]:
    """The messages of the failed hosts."""
    return [
        result["msg"]
        for entry in account["plays"][0]["tasks"]
        for result in entry["hosts"].values()
        if result.get("failed")
    ]
