# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run that finished while one host was off: watching it succeeds, and the results of the other hosts are collected."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import LOCAL, OFF, ROOT, ansible
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results


@pytest.fixture
def stage(tmp_path: Path) -> Play:
    """Two hosts; the first has finished the run, the second is off."""
    plan = {
        "run": "d4", "world": 2, "timeout_seconds": 60, "data": {"id": "none"}, "training": {}, "data_ports": {"low": 32768, "high": 60999},
        "master": {"host": "desktop", "address": "127.0.0.1", "port": 29500},
    }  # fmt: skip
    play = Play(tmp_path, ["desktop", "laptop"], plan)
    play.variables = {"ddp_controller": {"watch": True, "results_dir": str(tmp_path / "results")}, "watch_doctor": ""}
    for rank, node in enumerate(play.hosts.values()):
        node["rank"] = rank
    plan["digest"] = digest_of(plan)
    run = Path(play.hosts["desktop"]["run_dir"])
    began = time.time() - 60
    fake_run.write_history(run, fake_run.history(0, 1, 40, began, 0.5, "d4"), 0)
    fake_run.write_json(run / "session.json", fake_run.session_of(0, began, "d4", ended=began + 50, exit_code=0))
    fake_run.write_json(run / "plan.json", plan)
    word = {
        "time": began + 20, "since": began + 49, "what": "training", "state": "finished", "generation": 2, "members": ["desktop"],
        "hears": [], "why": "",
    }  # fmt: skip
    fake_run.write_json(run / "members.json", word)
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


def play(stage: Play, book: str, *words: str, **environment: str) -> str:
    """The output of a playbook of the collection on the same two hosts."""
    inventory = stage.folder / "hosts.json"
    inventory.write_text(json.dumps({"trainers": {"hosts": {"desktop": LOCAL, "laptop": OFF}}}))
    folder = stage.folder
    settings = {"ddp_base_dir": f"{folder}/desktop", "ddp_run": "d4", "ddp_results_dir": f"{folder}/results"}
    given = ["-i", inventory, ROOT / book, "-e", json.dumps(settings)]
    return ansible("ansible-playbook", *given, *words, **environment).stdout


def test_field_35_watch_does_not_refuse_while_a_host_is_off(stage: Play) -> None:
    told = play(stage, "train.yml", "--tags", "watch")
    assert "away" in told and "finished" in told and "FAILED" not in told


def test_ansibles_own_display_shows_the_status_and_the_verdict_in_lines(stage: Play) -> None:
    own = {"ANSIBLE_STDOUT_CALLBACK": "default", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    told = "".join(play(stage, f"playbooks/{book}.yml", **own) for book in ("status", "doctor"))
    lines = [line.strip() for line in told.splitlines()]
    assert any(line.startswith('"run d4, took ') for line in lines), told
    assert any(line.startswith('"not-running: No rank runs: rank 0 (desktop) finished') for line in lines), told
    assert "\\n" not in told
