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
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import (
    controller_questions,
    questions,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host as host_facts
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import sources
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import venv as venv_utils
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    hosts,
    laptop,
    planned,
    refusal,
)
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import fill


def facts(**changes: Any) -> dict[str, Any]:
    found = {"path": "/srv/x", "kind": "folder", "readable": True, "shards": 9, "tokenizer": True, "files": True}
    return {**found, "trainer": True, **changes}


# Who is asked what


def test_only_the_host_that_has_the_data_is_asked_for_its_folders():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x"]}
    elsewhere = hosts({**run, "ddp_data_host": "laptop"})
    reordered = hosts(run, {"ddp_rank": 1}, {"ddp_rank": 0})
    for known, asked in ((hosts(run), "desktop"), (elsewhere, "laptop"), (reordered, "laptop")):
        folders = {name: one["folders"] for name, one in questions(known).items()}
        assert folders == {"desktop": [], "laptop": [], asked: ["/srv/x"]}


def test_the_controller_is_asked_for_what_lies_there():
    nothing = {
        "folders": [],
        "git": None,
        "trainer": None,
        "results": "runs",
        "conversations": None,
        "held_out": None,
    }
    assert controller_questions(hosts()) == nothing
    run = {"ddp_data_source": "controller", "ddp_data_paths": ["/a", "/b"], "ddp_trainer_source": "~/nanochat"}
    asked = controller_questions(hosts(run))
    assert asked["folders"] == ["/a", "/b", "~/nanochat"] and asked["trainer"] == "~/nanochat"
    assert controller_questions(hosts({"ddp_trainer_source": "git@git.example.org:x/y"}))["git"]


# What is planned


def test_shards_of_another_host_than_the_master():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["~/x"], "ddp_data_host": "laptop"}
    plan = planned(run)
    assert plan["master"]["host"] == "desktop"
    assert (plan["data"]["host"], plan["data"]["paths"]) == ("laptop", ["/home/xiaoxin/x"])


def test_paths_of_the_controller_are_meant_there():
    run = {"ddp_data_source": "controller", "ddp_data_paths": ["~/x"], "ddp_trainer_source": "nanochat"}
    here = {"folders": {"~/x": facts(path="/home/me/x"), "nanochat": facts(path="/home/me/nanochat")}}
    plan = make_plan(hosts(run), here=here).plan
    assert plan["data"]["paths"] == ["/home/me/x"]
    assert plan["trainer"]["url"] == "/home/me/nanochat"


# What is refused


@pytest.mark.parametrize(
    ("source", "seen", "sentence"),
    [
        ("text", {"kind": "absent"}, "names /srv/x, which does not exist on desktop; use a folder of text"),
        ("text", {"files": False}, "names /srv/x, which has no files on desktop"),
        ("text", {"readable": False}, "names /srv/x, which the login user on desktop"),
        ("host", {"kind": "file"}, "names /srv/x, which is not a folder on desktop; use a folder of *.parquet shards"),
        ("host", {"shards": 0}, "has no shards (*.parquet) on desktop, but ddp_data_shards is 3"),
        ("host", {"shards": 1}, "has 1 shard (*.parquet) on desktop, but ddp_data_shards is 3"),
        ("controller", {"kind": "absent"}, "names /srv/x, which does not exist on the controller"),
        ("controller", {"shards": 2}, "has 2 shards (*.parquet) on the controller, but ddp_data_shards is 3"),
    ],
)
def test_folders_of_data_that_will_not_do(source, seen, sentence):
    run = {"ddp_data_source": source, "ddp_data_paths": ["/srv/x"]}
    folders = {"/srv/x": facts(**seen)}
    known = hosts(run, {"folders": {} if source == "controller" else folders})
    (problem,) = refusal(known, here={"folders": folders if source == "controller" else {}})
    assert sentence in problem


def test_a_folder_without_a_tokenizer_where_one_is_named():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x", "/srv/tok"]}
    folders = {"/srv/x": facts(tokenizer=False), "/srv/tok": facts(shards=0, tokenizer=False)}
    (problem,) = refusal(hosts(run, {"folders": folders}))
    assert "names /srv/tok, which has no tokenizer (tokenizer.pkl and token_bytes.pt) on desktop" in problem


def test_what_a_data_set_was_made_of_may_be_gone():
    run = {"ddp_data_source": "host", "ddp_data_paths": ["/srv/x"]}
    name = planned(run)["data"]["id"]
    gone = {"folders": {"/srv/x": facts(kind="absent")}}
    made = {**gone, "data": [{"id": name, "shards": 3, "bytes": 1000}]}
    assert planned(run, made)["data"]["id"] == name
    assert refusal(hosts(run, gone))


@pytest.mark.parametrize(
    ("source", "here", "sentence"),
    [
        ("/srv/x", {"folders": {"/srv/x": facts(kind="absent")}}, "/srv/x is not a folder on the controller"),
        ("/srv/x", {"folders": {"/srv/x": facts(trainer=False)}}, "on the controller has no scripts/base_train.py"),
        ("https://git.example.org/x.git", {"git": "git is not installed on the controller"}, "but git is not installed on"),
        ("ours", {"results": {"path": "/proc/x", "writable": False}}, "which is not writable on the controller"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_the_controller(source, here, sentence):
    (problem,) = refusal(hosts({"ddp_trainer_source": source}), here=here)
    assert sentence in problem


@pytest.mark.parametrize(
    ("venv", "sentence"),
    [
        ({"kind": "occupied"}, "which exists and is not a virtual environment"),
        ({"kind": "foreign", "exists": True, "torch": "2.9.0+cpu"}, "it has torch 2.9.0+cpu instead of 2.13.0"),
        ({"disk": {"device": 2, "writable": False, "parent": "/opt", "free": GIGA}}, "xiaoxin cannot write to /opt"),
        ({"disk": {"device": 2, "writable": True, "parent": "/opt", "free": GIGA}}, "with 1.0 GB free"),
        (
            {"exists": True, "disk": {"exposed": "every user may write to /opt: chmod go-w /opt"}},
            "but every user may write to /opt",
        ),
    ],
)
def test_environment_that_cannot_be_made_where_it_is_wanted(venv, sentence):
    known = {"exists": False, "kind": "absent", "torch": None, **venv}
    seen = laptop()
    python = {**seen["python"], "venv": known}
    (problem,) = refusal(hosts({}, two={"python": python, "venv_dir": "/opt/venv", "ddp_venv_dir": "/opt/venv"}))
    assert problem.startswith("ddp_venv_dir is /opt/venv on laptop")
    assert sentence in problem


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
        return found["kind"], found["shards"], found["tokenizer"], found["files"]

    assert of(full) == ("folder", 3, False, True)
    assert of(full / "tokenizer") == ("folder", 0, True, True)
    assert of(tmp_path / "empty") == ("folder", 0, False, False)
    assert of(tmp_path / "one.txt") == ("file", 0, False, True)
    assert of(tmp_path / "none") == ("absent", 0, False, False)


def test_where_something_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert sources.is_writable(str(tmp_path / "a/b"))
    assert not sources.is_writable(str(tmp_path / "file"))
    assert not sources.is_writable(str(tmp_path / "file/below"))


def test_what_is_at_the_place_of_the_environment(tmp_path):
    files = {"ours": venv_utils.STAMP, "half": venv_utils.MARK, "foreign": "pyvenv.cfg", "other": "x"}
    for name, file in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    kinds = [host_facts.venv_kind(str(tmp_path / name)) for name in (*files, "none")]
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


def problem_of(source: str, tmp_path: Path, **environment: str) -> str:
    return sources.repository(source, {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}).problem


def test_repository_that_can_be_cloned(repository, tmp_path):
    assert problem_of(repository, tmp_path) == ""
    assert problem_of(repository + "#main", tmp_path) == ""
    assert problem_of(repository + "#0123abcd", tmp_path) == ""
    assert problem_of(repository + "#nobranch", tmp_path) == "the repository has no branch or tag nobranch"


def test_repository_that_is_not_there(tmp_path):
    told = problem_of(f"file://{tmp_path}/nothing", tmp_path)
    assert told.startswith("git on the controller: fatal: ") and "nothing" in told


def test_repository_that_was_cloned_before_is_not_asked(tmp_path):
    source = f"file://{tmp_path}/nothing"
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    Path(sources.checkout_of(source, environment), ".git").mkdir(parents=True)
    assert problem_of(source, tmp_path) == ""


def test_git_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert problem_of("https://git.example.org/x.git", tmp_path) == "git is not installed on the controller"


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
