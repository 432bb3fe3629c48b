# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import PORT_CHECK
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.others import other_training, port_held

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


def test_a_strangers_process_is_named_by_a_short_command():
    found = port_held("alpha", "ddp_port", {**PROCESS, "command": "x" * 700})
    assert len(found["seen"]) < 170 and "kill 1480 if nobody needs it" in found["remedy"]


def test_other_training_of_ours_is_stopped_by_its_playbook():
    ours = {**PROCESS, "run": "books"}
    found = other_training("alpha", [ours, {**ours, "pid": 1481, "parent": 1480}])
    assert found["seen"] == "the run books of anna trains there (process 1480)"
    assert "ddp_run=books" in found["remedy"] and "stops only what it started" not in found["remedy"]
    assert "stops only what it started itself" in other_training("alpha", [ours, {**PROCESS, "pid": 2}])["remedy"]
