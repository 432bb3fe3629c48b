# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook plan with real ansible-playbook: what it prints, keeps and refuses, and that it touches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS
from ansible_collections.nanochat.ddp.tests.integration.local import ansible, free_port, one_line

INVENTORY = """
trainers:
  hosts:
    one: {{ddp_base_dir: "{folder}/one"}}
    two: {{ddp_base_dir: "{folder}/two"}}
  vars:
    ansible_connection: local
    ansible_python_interpreter: "{python}"
    ddp_port: {port}
"""


@pytest.fixture
def inventory(tmp_path):
    """Two nodes on this machine; `extra` is appended to the file."""

    def write(extra: str = "") -> Path:
        file = tmp_path / "hosts.yml"
        file.write_text(INVENTORY.format(folder=tmp_path, python=sys.executable, port=free_port()) + extra)
        return file

    return write


def plan(
    inventory: Path, *arguments: str, playbook: str = "playbooks/plan.yml", **environ: str
) -> subprocess.CompletedProcess[str]:
    return ansible(
        "ansible-playbook", playbook, "-i", inventory, *arguments, **{"ANSIBLE_STDOUT_CALLBACK": "default", **environ}
    )


def write_play(folder: Path, tasks: list[dict]) -> str:
    file = folder / "play.json"
    file.write_text(json.dumps([{"hosts": "trainers", "gather_facts": False, "tasks": tasks}]))
    return str(file)


def test_the_plan_for_people_and_as_json_is_the_same_twice_and_touches_nothing(inventory, tmp_path):
    hosts, kept = inventory(), tmp_path / "plan.json"
    first = plan(hosts, "-e", f"ddp_plan_file={kept}")
    assert first.returncode == 0, first.stdout + first.stderr
    before = json.loads(kept.read_text())
    document = before["plan"]
    assert [node["host"] for node in document["nodes"]] == ["one", "two"]
    assert f"Run d4 on 2 hosts (plan {document['digest']})" in first.stdout
    assert "7,340,162 parameters" in first.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.yml", "plan.json"]

    second = plan(hosts, "-e", f"ddp_plan_file={kept}", "-e", "ddp_json=true", "--check", "--diff")
    assert second.returncode == 0
    # The same document for programs, and nothing to write again, unless other processes of this machine gave another finding.
    told = json.JSONDecoder().raw_decode(second.stdout[second.stdout.index('{\n  "plan"') :])[0]
    assert told["plan"] == document
    assert ("changed=1" in second.stdout) == (told["findings"] != before["findings"])


def test_a_second_plan_goes_by_what_the_rehearsal_measured(inventory, tmp_path):
    """A busy host keeps no file of it, but this start still uses it; the facts of the hosts stay unchanged."""
    hosts, kept = inventory(), tmp_path / "plan.json"
    assert plan(hosts, "-e", f"ddp_plan_file={kept}").returncode == 0
    before = json.loads(kept.read_text())["plan"]
    assert before["training"]["sync"] == "exact"
    measured = {
        "tokens_per_second": 2000.0, "pass_seconds": 0.5, "adamw_seconds": 0.02, "muon_seconds": 0.1,
        "link": {"mbit": 3.0, "latency_ms": 0.3}, "model": before["model"], "device_batch": before["training"]["device_batch"],
    }  # fmt: skip
    said = "sync {{ ddp_plan.training.sync }}, probe {{ ddp_probe.measured | default('empty', true) }}"
    tasks: list[dict] = [
        {"import_role": {"name": "nanochat.ddp.plan"}},
        {"set_fact": {"__preflight_step": {"measured": measured, "is_new": True}}},
        {"include_role": {"name": "nanochat.ddp.preflight", "tasks_from": "by_measurements"}},
        {"debug": {"msg": said}},
    ]
    done = plan(hosts, playbook=write_play(tmp_path, tasks))
    assert f"sync {list(WAYS)[-1]}, probe empty" in done.stdout, done.stdout + done.stderr


def test_a_python_on_a_path_that_does_not_run_is_passed_over(inventory, tmp_path):
    """pyenv has such shims for every version that any of its environments has."""
    hosts, path = nameless(inventory()), shims(tmp_path)
    made = plan(hosts, PATH=path)
    assert made.returncode == 0 and "Run d4 on 2 hosts" in made.stdout, made.stdout + made.stderr
    # Looks and modules on the hosts do, too. Where Ansible is started, the Python of its folder is first: a host lacks it.
    tasks = [{"nanochat.ddp.agent": {"verb": "run_info", "base_dir": str(tmp_path)}}, {"ansible.builtin.ping": {}}]
    path = path.replace(str(Path(sys.executable).parent) + ":", "")
    done = plan(hosts, playbook=write_play(tmp_path, tasks), PATH=path, ANSIBLE_PIPELINING="true")
    assert done.returncode == 0 and done.stdout.count("ok=2 ") == 2, done.stdout + done.stderr


def nameless(hosts: Path) -> Path:
    """The inventory without ansible_python_interpreter."""
    named = [line for line in hosts.read_text().splitlines() if "ansible_python_interpreter" not in line]
    hosts.write_text("\n".join(named) + "\n")
    return hosts


def shims(folder: Path) -> str:
    """A PATH that begins with Pythons that do not run."""
    place = folder / "shims"
    place.mkdir()
    for name in ("python", *(f"python3.{minor}" for minor in range(7, 20))):
        (place / name).write_text(f"#!/bin/sh\necho 'pyenv: {name}: command not found' >&2\nexit 127\n")
        (place / name).chmod(0o755)
    return f"{place}:{os.environ['PATH']}"


WRONG = {
    "ddp_depth": "deep",
    "ddp_total_batch": "0",
    "ddp_port_range": "40000-40999",
    "ddp_run": "a b",
    "ddp_itrations": "5",
}


def test_wrong_values_are_refused_together_before_any_host_is_asked(inventory):
    told = plan(inventory(), *(word for name, value in WRONG.items() for word in ("-e", f"{name}='{value}'")))
    assert told.returncode != 0
    assert "Gather the facts of the host" not in told.stdout
    for name in WRONG:
        assert f"{name} " in told.stdout, name
    assert "did you mean ddp_iterations?" in told.stdout
    assert "Traceback" not in told.stdout + told.stderr


def test_a_host_that_does_not_answer_stops_everything_with_its_reason(inventory):
    # Nobody listens at port 9 of this machine.
    three = "{ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 9, ddp_base_dir: /tmp/three}"
    away = f"  children:\n    more:\n      hosts:\n        three: {three}\n"
    told = plan(inventory(away), "-e", "ddp_total_batch=3072")
    assert told.returncode != 0
    words = one_line(told.stdout)
    assert "three cannot be examined (ssh: connect to host 127.0.0.1 port 9: Connection refused); check" in words
    assert "Store the plan on every host" not in told.stdout
