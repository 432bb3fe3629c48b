# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run that finished without a host that is off: watching it ends well, and the results of those who are there are collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.role_play import ROOT, Play, counts, messages, results

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
OFF = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_timeout": 5}


@pytest.fixture
def stage(tmp_path: Path) -> Play:
    """Two hosts of which the second is off, and the run that the first one has finished."""
    plan = {
        "run": "d4", "world": 2, "timeout_seconds": 60, "data": {"id": "none"}, "training": {}, "data_ports": {"low": 32768, "high": 60999},
        "master": {"host": "desktop", "address": "127.0.0.1", "port": 29500},
    }  # fmt: skip
    play = Play(tmp_path, ["desktop", "laptop"], plan)
    play.variables = {
        "ddp_controller": {
            "watch": True,
            "stall_factor": 5.0,
            "collect_checkpoints": True,
            "results_dir": str(tmp_path / "results"),
        },
        "watch_doctor": "",
    }
    for rank, node in enumerate(play.hosts.values()):
        node["rank"] = rank
    plan["digest"] = digest_of(plan)
    run = Path(play.hosts["desktop"]["run_dir"])
    began = time.time() - 60
    fake_run.write_history(run, fake_run.history(0, 1, 40, began, 0.5, "d4"), 0)
    fake_run.write_json(run / "session.json", fake_run.session_of(0, began, "d4", ended=began + 50, exit_code=0))
    fake_run.write_json(run / "plan.json", plan)
    word = {
        "time": began + 20,
        "what": "training",
        "state": "finished",
        "generation": 2,
        "members": ["desktop"],
        "hears": [],
        "why": "",
    }
    fake_run.write_json(run / "members.json", {**word, "since": began + 49})
    return play


def test_field_35_a_run_that_finished_without_a_host_is_collected(stage: Play) -> None:
    stage.own_variables = {"laptop": OFF}
    account = stage.run("watch+collect")
    assert counts(account, "failures") == {"desktop": 0, "laptop": 0}, messages(account)
    assert counts(account, "unreachable") == {"desktop": 0, "laptop": 0}
    seen = results(account, "Watch the run")
    assert [seen[host]["verdict"] for host in ("desktop", "laptop")] == ["finished", "away"]
    assert (stage.folder / "results/d4/report.html").exists()
    assert (stage.folder / "results/d4/desktop/metrics-rank0.jsonl").exists()


def test_field_35_watch_does_not_refuse_while_a_host_is_off(stage: Play) -> None:
    inventory = {"trainers": {"hosts": {"desktop": LOCAL, "laptop": OFF}}}
    settings = {
        "ddp_base_dir": f"{stage.folder}/desktop",
        "ddp_run": "d4",
        "ddp_results_dir": f"{stage.folder}/results",
    }
    (stage.folder / "hosts.json").write_text(json.dumps(inventory))
    done = subprocess.run(
        ["ansible-playbook", "-i", stage.folder / "hosts.json", ROOT / "train.yml", "--tags", "watch", "-e", json.dumps(settings)],
        cwd=ROOT, env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "away" in done.stdout and "finished" in done.stdout


def test_ansibles_own_display_shows_the_status_and_the_verdict_in_lines(stage: Play) -> None:
    (stage.folder / "hosts.json").write_text(json.dumps({"trainers": {"hosts": {"desktop": LOCAL, "laptop": OFF}}}))
    settings = {
        "ddp_base_dir": f"{stage.folder}/desktop",
        "ddp_run": "d4",
        "ddp_results_dir": f"{stage.folder}/results",
    }
    told = ""
    for book in ("status", "doctor"):
        told += subprocess.run(
            ["ansible-playbook", "-i", stage.folder / "hosts.json", ROOT / f"playbooks/{book}.yml", "-e", json.dumps(settings)],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ANSIBLE_STDOUT_CALLBACK": "default",
                 "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        ).stdout  # fmt: skip
    lines = [line.strip() for line in told.splitlines()]
    assert any(line.startswith('"run d4, took ') for line in lines), told
    assert any(line.startswith('"not-running: No rank runs: rank 0 (desktop) finished') for line in lines), told
    assert "\\n" not in told
