# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules for all playbooks and roles, checked on their files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]


def plays():
    """Every play of every playbook that has hosts of its own."""
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        for play in yaml.safe_load(path.read_text()):
            if "hosts" in play:
                yield path.name, play


def tasks():
    """Every task of every role, those of blocks as well."""
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        waiting = list(yaml.safe_load(path.read_text()))
        while waiting:
            task = waiting.pop()
            for part in ("block", "rescue", "always"):
                waiting += task.get(part, [])
            yield str(path.relative_to(ROOT)), task


def test_every_play_takes_the_hosts_that_are_asked_for_and_an_empty_target_for_none():
    assert {play["hosts"] for dummy, play in plays()} == {"{{ target | default('trainers', true) }}"}


def test_field_41_looks_at_hosts_that_may_be_frozen_have_a_limit():
    """Those of status, stop and doctor, which are played when something is wrong, and the probe, with which all else begins."""
    wanted = ("run_info", "doctor_info", "host_info")
    looks = [
        (path, task)
        for path, task in tasks()
        if path.startswith("roles/doctor/")
        or path.endswith(("find_run/tasks/main.yml", "launch/tasks/stop.yml", "plan/tasks/probe.yml"))
    ]
    looks = [(path, task) for path, task in looks if task.get("nanochat.ddp.agent", {}).get("verb") in wanted]
    assert {path.split("/")[-1] for path, dummy in looks} >= {"main.yml", "stop.yml", "probe.yml"}
    assert [(path, task["name"]) for path, task in looks if "timeout" not in task] == []


def test_no_ansible_cfg_can_make_hosts_run_ahead_of_each_other():
    """With `strategy = free` a play reads other hosts' results before they exist, and stops or removes before all are asked."""
    assert {name for name, play in plays() if play.get("strategy") != "ansible.builtin.linear"} == set()


def test_no_play_makes_everything_root():
    assert {name for name, play in plays() if play["vars"]["ansible_become"] is not False} == set()


def test_a_task_that_needs_root_says_so_by_the_variable_that_wins():
    """`become: true` of a task is beaten by the play's variable."""
    assert [(path, task["name"]) for path, task in tasks() if task.get("become")] == []
    root = {path.split("/")[1] for path, task in tasks() if "ansible_become" in task.get("vars", {})}
    assert root == {"network", "plan"}


def test_field_42_what_all_hosts_say_is_worked_out_once_and_not_by_every_host():
    """A condition is evaluated for each host, so one over all ways between them would cost the third power of their number."""
    verbs = [(task.get("nanochat.ddp.agent", {}).get("verb", ""), task) for dummy, task in tasks()]
    judgements = [task for verb, task in verbs if verb.startswith("judge_")]
    assert len(judgements) > 3 and all(task["run_once"] for task in judgements)


def test_an_inventory_that_cannot_be_read_stops_everything(tmp_path):
    """YAML reads the name `off` as false; without care Ansible would go on with the hosts before it."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("trainers:\n  hosts:\n    desk: {}\n    off: {}\n")
    done = subprocess.run(
        ["ansible-inventory", "-i", str(inventory), "--list"],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "desk" not in done.stdout


def test_packages_and_python_that_are_missing_are_named_in_one_sentence():
    """A user without sudo has to ask the administrator only once."""
    nothing_there = "find_python() { return 1; }; dpkg-query() { return 1; }; apt-get() { :; }"
    no_root = "id() { echo 1000; }; sudo() { return 1; }"
    script = f". tools/bootstrap.sh; {nothing_there}; {no_root}; need_packages tmux iproute2"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "These packages are missing: tmux iproute2 python3 python3-venv. "
        "Install them with: sudo apt-get install tmux iproute2 python3 python3-venv"
    ]


def steps() -> list[dict[str, Any]]:
    """The roles of the story, in their order."""
    [train] = [play for name, play in plays() if name == "train.yml"]
    [block] = train["tasks"]
    return [step for step in block["block"] if "ansible.builtin.import_role" in step]


def test_whatever_is_left_out_the_plan_is_not():
    """--skip-tags of any step leaves the one from which all others know the hosts and what to do on them."""
    always = [step["ansible.builtin.import_role"]["name"] for step in steps() if "always" in step["tags"]]
    assert always == ["nanochat.ddp.plan"]


def test_tags_by_which_more_than_a_step_would_be_skipped_are_refused():
    """Ansible leaves out whatever has a tag that is to be skipped, and a step has the tags of those that need it."""
    [train] = [play for name, play in plays() if name == "train.yml"]
    tags = [tag for step in steps() for tag in step["tags"]]
    assert set(train["vars"]["train_shared"]) == {tag for tag in tags if tags.count(tag) > 1}


def test_whatever_moves_packets_between_hosts_opens_the_ports_first():
    """Rules that nobody saved are gone after a reboot."""
    [network] = [step for step in steps() if step["ansible.builtin.import_role"]["name"].endswith("network")]
    assert {"network", "data", "rehearse", "launch", "restart"} <= set(network["tags"])


def test_no_template_reads_json_that_may_be_torn():
    """Such an error ends a play, whatever failed_when says; modules read what lies on a host. The one that is left has a rescue."""
    files = [path for folder in ("roles", "playbooks") for path in (ROOT / folder).rglob("*.yml")]
    reading = [path.relative_to(ROOT).as_posix() for path in files if "b64decode | from_json" in path.read_text()]
    assert reading == ["roles/collect/tasks/tracker.yml"]
