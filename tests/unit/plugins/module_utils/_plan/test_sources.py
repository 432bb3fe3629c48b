# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders and repositories that the settings name, and what the plan reports about them before anything is changed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import run_folder
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import (
    controller_questions,
    questions,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import sources
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    laptop,
    planned,
    refusal,
)
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import fill


def facts(**changes: Any) -> dict[str, Any]:
    found = {"path": "/srv/x", "kind": "folder", "readable": True, "shards": 9, "tokenizer": True}
    return {**found, "trainer": True, **changes}


# Who is asked what


def test_only_the_host_that_has_the_data_is_asked_for_its_folders():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x"]}
    elsewhere = hosts({**run, "ddp_data_host": "laptop"})
    reordered = hosts(run, {"ddp_rank": 1}, {"ddp_rank": 0})
    for known, asked in ((hosts(run), "desktop"), (elsewhere, "laptop"), (reordered, "laptop")):
        folders = {name: one["folders"] for name, one in questions(known).items()}
        assert folders == {"desktop": [], "laptop": [], asked: ["/srv/x"]}


def test_the_controller_is_asked_for_what_lies_there_and_paths_are_meant_there():
    nothing = dict.fromkeys(("git", "conversations", "held_out"))
    assert controller_questions(hosts()) == {**nothing, "folders": [], "results": "runs"}
    run = {"ddp_data_source": "controller", "ddp_data_paths": ["~/x"], "ddp_trainer_source": "~/nanochat"}
    asked = controller_questions(hosts(run))
    assert asked["folders"] == ["~/x", "~/nanochat"]
    here = {"folders": {"~/x": facts(path="/home/me/x"), "~/nanochat": facts(path="/home/me/nanochat")}}
    plan = make_plan(hosts(run), here=here).plan
    assert (plan["data"]["paths"], plan["trainer"]["url"]) == (["/home/me/x"], "/home/me/nanochat")
    assert controller_questions(hosts({"ddp_trainer_source": "git@git.example.org:x/y"}))["git"]


# What is refused


def test_what_a_data_set_was_made_of_may_be_gone():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x"]}
    name = planned(run)["data"]["id"]
    gone = {"folders": {"/srv/x": facts(kind="absent")}}
    made = {**gone, "data": [{"id": name, "bytes": 1000}]}
    assert planned(run, made)["data"]["id"] == name
    assert refusal(hosts(run, gone))


@pytest.mark.parametrize("torch", ["2.13.0+cpu", None])
def test_foreign_environment_that_may_have_the_right_torch_will_do(torch):
    venv = {"exists": True, "kind": "foreign", "torch": torch, "disk": {"device": 2, "writable": False}}
    python = {**laptop()["python"], "venv": venv}
    assert make_plan(hosts({}, two={"python": python, "ddp_venv_dir": "/opt/venv"}))


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


def test_results_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")

    def here(folder: str) -> Any:
        return sources.look(controller_questions(hosts({"ddp_results_dir": folder})), {"PWD": str(tmp_path)})

    for folder in ("file", "file/below"):
        (problem,) = refusal(hosts({"ddp_results_dir": folder}), here=here(folder))
        said = f"ddp_results_dir is {folder}, which is not writable on the controller ({tmp_path}/{folder}); set"
        assert problem.startswith(said)
    assert here("a/b")["read_only"] == ""


def test_what_is_at_the_place_of_the_environment(tmp_path):
    files = {"ours": run_folder.VENV_STAMP, "half": run_folder.VENV_MARK, "foreign": "pyvenv.cfg", "other": "x"}
    for name, file in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    kinds = [run_folder.venv_kind(str(tmp_path / name)) for name in (*files, "none")]
    assert kinds == ["ours", "ours", "foreign", "occupied", "absent"]


# A repository


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repo.git"
    subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True)
    commit(folder)
    return f"file://{folder}"


def commit(folder: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", folder, *identity, "commit", "-q", "--allow-empty", "-m", "next"], check=True)
    told = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return told.stdout.strip()


def test_a_repository_that_cannot_be_cloned_is_told_before_a_start(repository, tmp_path, monkeypatch):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for part in ("", "#main", "#0123abcd"):
        assert sources.repository(repository + part, environment).problem == ""
    told = sources.repository(repository + "#nobranch", environment).problem
    assert told == "the repository has no branch or tag nobranch"
    nothing = f"file://{tmp_path}/nothing"
    assert sources.repository(nothing, environment).problem.startswith("git on the controller: fatal: ")
    # One that was cloned before is not asked.
    Path(sources.checkout_of(nothing, environment), ".git").mkdir(parents=True)
    assert sources.repository(nothing, environment).problem == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    environment["PATH"] = str(tmp_path)
    assert (
        sources.repository("https://git.example.org/x.git", environment).problem
        == "git is not installed on the controller"
    )


def test_which_commit_trains_is_told_and_that_there_is_a_newer_one(repository, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    work, bare = tmp_path / "repo.git", tmp_path / "bare.git"
    subprocess.run(["git", "clone", "-q", "--bare", work, bare], check=True)
    first = commit(work)
    subprocess.run(["git", "-C", work, "push", "-q", bare, "main"], check=True)
    for source in (f"file://{bare}", f"file://{bare}#main", f"file://{bare}#{first}"):
        assert sources.repository(source, environment).commits == {"used": "", "newest": ""}
        subprocess.run(["git", "clone", "-q", bare, sources.checkout_of(source, environment)], check=True)

    def told(source: str) -> list[tuple[str, str]]:
        here = {"commits": sources.repository(source, environment).commits}
        outcome = make_plan(hosts({"ddp_trainer_source": source}), here=here)
        return [(one["code"], one["seen"]) for one in outcome.findings if one["code"].startswith("trainer-")]

    (one,) = told(f"file://{bare}")
    assert one[0] == "trainer-commit" and one[1].endswith(f", at commit {first[:10]}")
    second = commit(work)
    subprocess.run(["git", "-C", work, "push", "-q", bare, "main"], check=True)
    for source in (f"file://{bare}", f"file://{bare}#main"):
        (one,) = told(source)
        assert one[0] == "trainer-commit" and first[:10] in one[1]
        assert one[1].endswith(f"the repository now has {second[:10]}")
    assert [code for code, dummy in told(f"file://{bare}#{first}")] == ["trainer-commit"]
    # A repository that is gone keeps nobody from training with what was cloned.
    bare.rename(tmp_path / "gone.git")
    assert [code for code, dummy in told(f"file://{bare}")] == ["trainer-commit"]
