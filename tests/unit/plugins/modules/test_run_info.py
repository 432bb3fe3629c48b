# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run_info, and what run_files offers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import files, polling
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import RunState
from ansible_collections.nanochat.ddp.plugins.modules import run_files, run_info
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import code_answer
from ansible_collections.nanochat.ddp.tests.integration import fake_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base folder with a finished run."""
    run = tmp_path / "runs" / "d4"
    begun = time.time() - 100
    fake_run.write_history(run, fake_run.history(1, 2, 10, begun), 1)
    fake_run.write_json(run / "session.json", fake_run.session_of(1, begun, ended=begun + 50, exit_code=0))
    return tmp_path


@pytest.mark.parametrize("check_mode", [False, True])
def test_it_reads_the_newest_run(run_module: Any, base: Path, check_mode: bool) -> None:
    told = run_module(run_info, check_mode, base_dir=str(base))
    assert told["changed"] is False
    assert (told["run"]["state"], told["run"]["run"], told["run"]["rank"]) == ("finished", "d4", 1)
    assert told["run"]["last_lines"][-1] == "step 00019"


def test_it_reads_the_run_that_is_asked_for(run_module: Any, base: Path) -> None:
    assert run_module(run_info, base_dir=str(base), run="other")["run"]["state"] == "absent"
    assert run_module(run_info, run_dir=str(base / "runs" / "d4"), lines=0)["run"]["last_lines"] == []
    assert run_module(run_info, base_dir=str(base / "nothing"))["run"]["run"] is None


def test_news_are_answered_at_once(run_module: Any, base: Path) -> None:
    begun = time.monotonic()
    run_module(run_info, base_dir=str(base), wait={"state": "running", "step": 4, "timeout": 60})
    assert time.monotonic() - begun < 5


def test_without_a_module_no_value_out_of_bounds_is_taken() -> None:
    action: Any = None
    assert code_answer(action, polling, {"lines": 10**6}, {}) is None


def test_every_key_is_one_of_the_contract(run_module: Any, base: Path) -> None:
    assert set(run_module(run_info, base_dir=str(base))["run"]) == RunState.__required_keys__


def test_the_folder_must_be_named(run_module: Any) -> None:
    told = run_module(run_info)
    assert told["failed"] is True
    assert "run_dir, base_dir" in told["msg"]


FILES = {"log/rank1.log", "metrics-rank1.jsonl", "session.json"}
NO_FILES = {"run": None, "pieces": [], "whole": [], "more": False}


def test_files_are_offered_from_the_run_folder(run_module: Any, base: Path) -> None:
    run = base / "runs" / "d4"
    (run / "base_checkpoints" / "d4").mkdir(parents=True)
    (run / "base_checkpoints" / "d4" / "model_000010.pt").write_text("weights")
    told = run_module(run_files, base_dir=str(base), dest="x")
    assert {part["path"] for part in told["pieces"]} == FILES
    assert (told["run"], told["run_dir"], told["more"]) == ("d4", str(run), False)
    # Weights only for whoever asks for them.
    assert told["whole"] == []
    (weights,) = run_module(run_files, base_dir=str(base), dest="x", checkpoints=True)["whole"]
    assert weights["path"] == "base_checkpoints/d4/model_000010.pt"


def test_where_there_is_no_such_run_no_files_are_offered(run_module: Any, base: Path) -> None:
    for which in ({"run": "other"}, {"run": None, "base_dir": str(base / "nothing")}):
        told = run_module(run_files, **{"base_dir": str(base), "dest": "x", **which})
        assert {key: told[key] for key in NO_FILES} == NO_FILES


def test_files_are_offered_without_a_module_too(base: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("HOME", str(base))
    params = {"run_dir": None, "base_dir": "~", "run": None, "have": {}, "checkpoints": False, "room": 4000000}
    files.say("mark:", params)
    told = capsys.readouterr().out
    assert told.startswith("mark:")
    assert {part["path"] for part in json.loads(told[len("mark:") :])["pieces"]} == FILES
