# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders and repositories that the settings name, and what the plan reports about them before anything is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import run_folder
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan, questions, read
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import sources
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements.plan import seen_on_the_controller
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    planned,
    refusal,
)
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import fill


def facts(**changes: Any) -> dict[str, Any]:
    found = {"path": "/srv/x", "kind": "folder", "readable": True, "shards": 9, "tokenizer": True}
    return {**found, **changes}


# Who is asked what


def test_only_the_host_that_has_the_data_is_asked_for_its_folders():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x"]}
    elsewhere = hosts({**run, "ddp_data_host": "laptop"})
    reordered = hosts(run, {"ddp_rank": 1}, {"ddp_rank": 0})
    for known, asked in ((hosts(run), "desktop"), (elsewhere, "laptop"), (reordered, "laptop")):
        folders = {name: one["folders"] for name, one in questions(known).items()}
        assert folders == {"desktop": [], "laptop": [], asked: ["/srv/x"]}


def test_the_controller_is_asked_for_what_lies_there_and_paths_are_meant_there():
    assert seen_on_the_controller(read(hosts()).run) == {"folders": {}, "obstacles": []}
    run = {"ddp_data_source": "controller", "ddp_data_paths": ["~/x"]}
    assert list(seen_on_the_controller(read(hosts(run)).run)["folders"]) == ["~/x"]
    plan = make_plan(hosts(run), here={"folders": {"~/x": facts(path="/home/me/x")}}).plan
    assert plan["data"]["paths"] == ["/home/me/x"]


# What is refused


def test_what_a_data_set_was_made_of_may_be_gone():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x"]}
    name = planned(run)["data"]["id"]
    gone = {"folders": {"/srv/x": facts(kind="absent")}}
    made = {**gone, "data": [{"id": name, "bytes": 1000}]}
    assert planned(run, made)["data"]["id"] == name
    assert refusal(hosts(run, gone))


# What is looked at


def test_what_a_folder_holds(tmp_path):
    full = fill(tmp_path / "full", shards=3)
    (tmp_path / "empty/deep").mkdir(parents=True)
    (tmp_path / "empty/.hidden").write_text("x")
    (tmp_path / "one.txt").write_text("x")

    def of(path: Path) -> tuple[Any, ...]:
        found = sources.folder_facts(str(path))
        return found["kind"], found["shards"], found["tokenizer"], found["text_bytes"] != 0

    assert of(full) == ("folder", 3, False, True)
    assert of(full / "tokenizer") == ("folder", 0, True, True)
    assert of(tmp_path / "empty") == ("folder", 0, False, False)
    assert of(tmp_path / "one.txt") == ("file", 0, False, True)
    assert of(tmp_path / "none") == ("absent", 0, False, False)


def test_results_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)

    def here(folder: str) -> Any:
        return seen_on_the_controller(read(hosts({"ddp_results_dir": folder})).run)

    for folder in ("file", "file/below"):
        (problem,) = refusal(hosts({"ddp_results_dir": folder}), here=here(folder))
        said = f"ddp_results_dir is {folder}, which is not writable on the controller ({tmp_path}/{folder}); set"
        assert problem.startswith(said)
    assert here("a/b")["obstacles"] == []
    # As on a controller with macOS.
    monkeypatch.delattr(os, "ST_NOEXEC", raising=False)
    assert here("a/b")["obstacles"] == []


def test_what_is_at_the_place_of_the_environment(tmp_path):
    files = {"ours": run_folder.VENV_STAMP, "half": run_folder.VENV_MARK, "foreign": "pyvenv.cfg", "other": "x"}
    for name, file in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    kinds = [run_folder.venv_kind(str(tmp_path / name)) for name in (*files, "none")]
    assert kinds == ["ours", "ours", "foreign", "occupied", "absent"]
