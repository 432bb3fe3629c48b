# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plays playbooks, plays and roles against hosts that are folders of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.nanochat.ddp.tests.integration.local import LOCAL, ansible


class Stage:
    """A folder with an inventory, in which playbooks are played."""

    def __init__(self, folder: Path, hosts: Iterable[str], **variables: Any) -> None:
        self.folder = folder
        self.hosts: dict[str, dict[str, Any]] = {name: {} for name in hosts}  # the variables of each
        # Those of all: with pipelining, as the plays of the collection have it.
        self.usual = {**LOCAL, "ansible_pipelining": True, "ddp_base_dir": f"{folder}/{{{{ inventory_hostname }}}}"}
        self.variables: dict[str, Any] = variables
        self.environment: dict[str, str] = {}
        self.errors = ""  # what was written to stderr
        self.code = 0  # how the last play ended

    def known(self) -> dict[str, dict[str, Any]]:
        """The variables of each host."""
        return self.hosts

    def argv(self, book: str | list[dict[str, Any]], *words: object) -> list[str]:
        """The command line that plays a playbook, or some plays."""
        hosts, plays = self.folder / "hosts.json", self.folder / "play.yml"
        group = {"hosts": self.known(), "vars": {**self.usual, **self.variables}}
        hosts.write_text(json.dumps({"trainers": group}))
        if not isinstance(book, str):
            plays.write_text(yaml.safe_dump([{"hosts": "trainers", "gather_facts": False, **play} for play in book]))
        return ["ansible-playbook", "-i", str(hosts), book if isinstance(book, str) else str(plays), *map(str, words)]

    def play(self, book: str | list[dict[str, Any]], *words: object, code: int | None = 0, **environment: str) -> str:
        """Play it and return its output; fails if it ends with another code (None: any)."""
        done = ansible(*self.argv(book, *words), **{**self.environment, **environment})
        self.errors += done.stderr
        self.code = done.returncode
        if code is not None:
            assert done.returncode == code and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.stdout


class Play(Stage):
    """Hosts with a plan, and the roles that a test plays on them. Here the hosts are their parts of the plan."""

    def __init__(self, folder: Path, hosts: Iterable[str], plan: dict, environment: dict | None = None) -> None:
        super().__init__(folder, [])
        self.plan = plan
        self.hosts = {name: self._node(name) for name in hosts}
        self.environment = {
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        }
        self.environments: dict[str, dict] = {}  # of single hosts
        plan["nodes"] = list(self.hosts.values())

    def _node(self, name: str) -> dict:
        base = f"{self.folder}/{name}"
        return {
            "host": name,
            "address": "127.0.0.1",
            "data_ports": {"low": 32768, "high": 60999},
            "base_dir": base,
            "run_dir": f"{base}/runs/d4",
            "data_dir": f"{base}/data/{self.plan['data']['id']}",
            "trainer_dir": f"{base}/trainer",
            "venv_dir": f"{base}/venv",
            "flags": {},
            "argv": [f"{base}/venv/bin/python", "-m", "scripts.base_train"],
        }

    def known(self) -> dict[str, dict[str, Any]]:
        """The variables of each host."""
        own = {name: self.environments.get(name, {}) for name in self.hosts}
        return {
            name: {"ddp_node": node, "own": own[name], "ddp_plan": self.plan, "ddp_probe": {"data": self._data(node)}}
            for name, node in self.hosts.items()
        }

    def _data(self, node: dict[str, Any]) -> list[dict[str, str]]:
        """The data sets that a probe would find."""
        return [{"id": path.parent.name} for path in Path(node["base_dir"]).glob("data/*/manifest.json")]

    def run(self, role: str, *arguments: str) -> dict:
        """Plays a role (or several, joined by +), or one of its entry points as `role:tasks`; returns Ansible's account by task, with its
        counts below `stats`."""
        parts = [one.partition(":") for one in role.split("+")]
        included = [
            {"name": f"nanochat.ddp.{name}", **({"tasks_from": tasks} if tasks else {})} for name, dummy, tasks in parts
        ]
        tasks = [{"ansible.builtin.import_role": one} for one in included]
        play = {"any_errors_fatal": True, "environment": "{{ own }}", "tasks": tasks}
        told = self.play([play], *arguments, code=None)
        assert "{" in told, told + self.errors
        return json.loads(told[told.find("{") :])


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
