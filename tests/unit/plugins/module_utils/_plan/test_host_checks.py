# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts that cannot take part, and remarks about those that can."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import PORT_CHECK
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.others import other_training, port_held
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    codes,
    desktop,
    findings_with,
    hosts,
    laptop,
    one_machine,
    planned,
    refusal,
)

DISK = laptop()["disk"]


def test_field_06_a_port_that_somebody_holds_is_refused_with_the_holder():
    holder = {"port": 29500, "pid": 4711, "user": "eve", "command": "python old.py", "session": None, "run": None}
    (problem,) = refusal(hosts(one={"ports": [{**holder, "pid": None, "command": None}]}))
    assert "by a process of eve, which this user may not inspect; choose another port" in problem
    (problem,) = refusal(hosts({"ddp_restarts": 3}, two={"ports": [{**holder, "port": 29501}]}))
    assert problem.startswith("ddp_keeper_port 29501 is taken on laptop by process 4711 of eve (python old.py)")
    # Without keepers only the master listens, and a run that goes on holds its own.
    assert planned(two={"ports": [holder]})["world"] == 2
    running = {"exists": True, "session": {"id": "abc"}, "checkpoints": []}
    assert planned(one={"ports": [{**holder, "session": "abc"}], "run": running})["world"] == 2


def test_a_checkout_is_not_joined_on_hosts_with_and_without_avx2():
    old = {"cpu": {**laptop()["cpu"], "flags": ["sse4_2", "avx"]}}
    (problem,) = refusal(hosts({"ddp_trainer_source": "/home/me/nanochat"}, two=old))
    assert "desktop is x86_64 but laptop is x86_64 without AVX2: they round differently" in problem
    assert not findings_with(make_plan(hosts({}, two=old)), "architecture-differs")


def test_data_and_checkpoints_that_are_there_need_no_room_again():
    little = {**DISK, "free": int(0.05 * GIGA)}
    plan = planned()
    there = {
        "data": [{"id": plan["data"]["id"], "shards": 3, "bytes": 75_000_000}],
        "run": {"exists": True, "session": None, "checkpoints": [5, 10, 15]},
        "python": {**laptop()["python"], "venv": {"exists": True}},
    }
    assert planned({}, {"data": there["data"]}, {"disk": little, **there})["digest"] == plan["digest"]


def test_two_nodes_in_one_folder_or_home_on_a_file_server_are_refused():
    known = one_machine()
    for host in known:
        host["probe"]["disk"]["real_path"] = "/home/lzw/same"
        host["probe"]["memory"] = {"total": 1_400_000_000, "available": 1_300_000_000}
    one, two, folder = refusal(known)
    assert "both nodes run on one machine" in folder + two and "{{ inventory_hostname }}" in folder + two
    # The memory of a machine is shared by its nodes.
    assert "but 2 nodes there need about 1." in one
    nfs = {"real_path": "/home/me/nanochat-ddp", "network": True, "source": "server:/home", "free": 900 * GIGA}
    known = hosts({}, {"disk": {**desktop()["disk"], **nfs}}, {"disk": {**DISK, **nfs}})
    (problem,) = refusal(known)
    assert "both see the same folder" in problem and "server:/home" in problem


def test_a_host_without_a_compiler_is_named_where_kernels_are_wanted() -> None:
    bare = {"cpu": {**laptop()["cpu"], "compiler": False}}
    assert ("no-compiler", "laptop") in codes(make_plan(hosts(two=bare)))
    assert ("no-compiler", "desktop, laptop") in codes(make_plan(hosts(one=bare, two=bare)))
    assert not findings_with(make_plan(hosts({"ddp_kernels": "torch"}, two=bare)), "no-compiler")


# Processes of others

PROCESS = {"port": 29500, "pid": 1480, "parent": 1, "user": "anna", "command": "python -m x", "session": None}


@pytest.mark.parametrize("run", [{"run": "books", "session": "s9"}, {"run": "books"}, {"session": "s9"}])
def test_a_port_of_a_run_of_ours_is_freed_by_stopping_that_run(run):
    found = port_held("alpha", "ddp_port", {**PROCESS, **run})
    assert "kill" not in found["remedy"] and "python -m x" not in found["seen"].replace("(python -m x)", "")
    assert f"nanochat.ddp.stop -i INVENTORY -e ddp_run={run.get('run', 'NAME')}" in found["remedy"]
    assert "-e ddp_port=29510" in found["remedy"]
    if "run" in run:
        assert found["seen"] == "ddp_port 29500 is taken on alpha: the run books of anna trains there (process 1480)"


@pytest.mark.parametrize("command", [PORT_CHECK, "/venv/bin/python -m scripts.gloo_check --timeout 20"])
def test_the_check_of_a_preflight_is_waited_for_and_not_killed(command):
    found = port_held("alpha", "ddp_port", {**PROCESS, "command": command})
    assert "a preflight check of anna (process 1480)" in found["seen"]
    assert "Try again" in found["remedy"] and "kill" not in found["remedy"]


def test_other_training_of_ours_is_stopped_by_its_playbook():
    ours = {**PROCESS, "run": "books"}
    found = other_training("alpha", [ours, {**ours, "pid": 1481, "parent": 1480}])
    assert found["seen"] == "the run books of anna trains there (process 1480)"
    assert "ddp_run=books" in found["remedy"] and "stops only what it started" not in found["remedy"]
    assert "stops only what it started itself" in other_training("alpha", [ours, {**PROCESS, "pid": 2}])["remedy"]
    # A stranger's process is named by a short command.
    found = port_held("alpha", "ddp_port", {**PROCESS, "command": "x" * 700})
    assert len(found["seen"]) < 170 and "kill 1480 if nobody needs it" in found["remedy"]
