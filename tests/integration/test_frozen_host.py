# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The screens of playbooks when one host of a run gives no answer, and none that it is away."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import signed
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, ansible

PLAYBOOKS = ("status", "doctor", "stop", "collect")
PATIENCE = {f"{role}_patience": 3 for role in ("doctor", "find_run", "launch", "plan")}


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of each playbook; all at the same time, since each waits for the frozen host."""
    folder = tmp_path_factory.mktemp("frozen")
    begun = time.time() - 100
    runs = [folder / name / "runs" / "d4" for name in ("node1", "node2")]
    plan = signed({**fake_run.plan_for(runs, 20), "data_ports": {"low": 32768, "high": 60999}})
    for rank, run in enumerate(runs):
        fake_run.write_history(run, fake_run.history(rank, 2, 20, begun), rank)
        fake_run.write_json(run / "session.json", fake_run.session_of(rank, begun, ended=time.time(), exit_code=0))
        fake_run.write_json(run / "plan.json", plan)
    frozen = folder / "frozen-python"
    frozen.write_text("#!/bin/sh\nexec sleep 60\n")
    frozen.chmod(0o755)
    hosts = {
        "node1": {"ansible_python_interpreter": sys.executable},
        "node2": {"ansible_python_interpreter": str(frozen)},
    }
    own = {
        "ansible_connection": "local",
        "ddp_base_dir": f"{folder}/{{{{ inventory_hostname }}}}",
        "ddp_results_dir": str(folder),
    }
    inventory = folder / "hosts.json"
    inventory.write_text(json.dumps({"trainers": {"hosts": hosts, "vars": {**own, **PATIENCE}}}))

    def play(name: str) -> str:
        done = ansible(
            "ansible-playbook", f"nanochat.ddp.{name}", "-i", inventory, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg")
        )
        return done.stdout + done.stderr

    with ThreadPoolExecutor() as pool:
        return dict(zip(PLAYBOOKS, pool.map(play, PLAYBOOKS), strict=True))


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_it_is_named_with_the_reason_and_nothing_of_ansible_is_on_the_screen(
    screens: dict[str, str], name: str
) -> None:
    screen = screens[name]
    # Two set their own.
    seconds = {"status": 10, "stop": 25}.get(name, 3)
    assert "node2" in screen and f"did not answer within {seconds} s" in screen, screen
    for noise in ("DEPRECATION", "deprecat", "WARNING", "Traceback", "Origin:"):
        assert noise not in screen, screen
