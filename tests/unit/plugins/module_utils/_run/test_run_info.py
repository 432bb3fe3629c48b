# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run_info, and the files that run_files offers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import run_files
from ansible_collections.nanochat.ddp.plugins.module_utils._run.polling import run_info
from ansible_collections.nanochat.ddp.tests.integration import fake_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base folder with a finished run."""
    run = tmp_path / "runs" / "d4"
    begun = time.time() - 100
    fake_run.write_history(run, fake_run.history(1, 2, 10, begun), 1)
    fake_run.write_json(run / "session.json", fake_run.session_of(1, begun, ended=begun + 50, exit_code=0))
    return tmp_path


def test_it_reads_the_newest_run(call: Any, base: Path) -> None:
    told = call(run_info, base_dir=str(base))
    assert (told["run"]["state"], told["run"]["run"], told["run"]["rank"]) == ("finished", "d4", 1)
    assert told["run"]["last_lines"][-1] == "step 00019"


def test_it_reads_the_run_that_is_asked_for(call: Any, base: Path) -> None:
    assert call(run_info, base_dir=str(base), run="other")["run"]["state"] == "absent"
    assert call(run_info, run_dir=str(base / "runs" / "d4"), lines=0)["run"]["last_lines"] == []
    assert call(run_info, base_dir=str(base / "nothing"))["run"]["run"] is None


def test_what_tells_of_the_run_is_offered_and_nothing_else(call: Any, base: Path) -> None:
    run = base / "runs" / "d4"
    newest = [f"base_checkpoints/d4/{name}" for name in ("model_000010.pt", "meta_000010.json")]
    (run / newest[0]).parent.mkdir(parents=True)
    for path in newest:
        (run / path).write_text("{}")
    (run / "env").write_text("SECRET=1")
    files = ["log/rank1.log", "metrics-rank1.jsonl", "session.json"]
    for more, checkpoint in (({}, []), ({"checkpoints": True}, newest)):
        told = call(run_files, base_dir=str(base), **more)
        assert (told["run"], told["run_dir"]) == ("d4", str(run))
        assert [one["path"] for one in told["files"]] == [*files, *checkpoint]


def test_where_there_is_no_such_run_no_files_are_offered(call: Any, base: Path) -> None:
    for which in ({"base_dir": str(base), "run": "other"}, {"base_dir": str(base / "nothing")}):
        told = call(run_files, **which)
        assert (told["run"], told["files"]) == (None, [])
