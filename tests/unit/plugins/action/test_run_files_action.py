# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collecting from a compromised host writes nothing but files of a run in the folder of that host."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule
from ansible_collections.nanochat.ddp.plugins.module_utils._run import files
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import MARK


def piece(path: Any, content: bytes = b"x", **more: Any) -> dict[str, Any]:
    return {**(files.piece("log/rank0.log", content, None, 9999) or {}), "path": path, **more}


class Host:
    """A host that answers what it likes."""

    has_pipelining = False

    def __init__(self, **answer: Any) -> None:
        self.answer = {"run": "d4", "run_dir": "/srv/runs/d4", "pieces": [], "whole": [], "more": False, **answer}
        self.fetched: list[str] = []

    def fetch_file(self, source: str, target: str) -> None:
        self.fetched.append(target)
        Path(target).write_bytes(b"evil")


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """`collect(host, **arguments)`; returns what the action says."""

    def run(host: Host, check: bool = False, **arguments: Any) -> dict[str, Any]:
        task = SimpleNamespace(
            args={"verb": "run_files", "dest": str(tmp_path / "runs"), "base_dir": "~/b", **arguments},
            async_val=0, check_mode=check, diff=False, environment=[], delegate_to=None,
        )  # fmt: skip
        context = SimpleNamespace(check_mode=check, become=False, remote_user="me", diff=False, no_log=False)
        host_shell = SimpleNamespace(tmpdir="unused")
        host._shell = host_shell  # type: ignore[attr-defined]
        made = ActionModule(task, host, context, None, None, None)
        monkeypatch.setattr(made, "_execute_module", lambda *dummy, **more: {"stdout": MARK + json.dumps(host.answer)})
        return made.run(task_vars={"inventory_hostname": "node1"})

    return run


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


OUTSIDE = [
    "../../../evil", "/etc/evil", "log/../../evil.log", "log/../evil.log", "metrics-rank0.jsonl/..", ".", "", "evil", "run.sh",
    "base_checkpoints/../../model_1.pt", "base_checkpoints/./model_000001.pt", "log/a\0.log", None, 7,
    ["log/a.log"], {"a": 1}, "log//x.log", "base_checkpoints/d4\n!touch evil\n/model_1.pt", "log/\x1b]0;t.log",
    "base_checkpoints/.ssh/model_1.pt",
]  # fmt: skip


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("kind", ["pieces", "whole"])
def test_a_host_writes_nothing_outside_its_folder(collect, tmp_path, kind, path, check):
    offered = piece(path) if kind == "pieces" else {"path": path, "size": 4, "mtime": 5}
    host = Host(**{kind: [offered]})
    told = collect(host, check)
    assert told["failed"] and "node1" in told["msg"] and "which is not a run file" in told["msg"]
    assert (written(tmp_path), host.fetched) == ([], [])


@pytest.mark.parametrize("run_dir", ["/srv\n!touch evil\n/d4", "srv", "/srv/../etc", None, 4, "/srv/\x1b[2J"])
def test_a_run_folder_that_would_be_another_command_of_sftp_is_refused(collect, tmp_path, run_dir):
    host = Host(run_dir=run_dir, whole=[{"path": "base_checkpoints/d4/model_000010.pt", "size": 4, "mtime": 5}])
    told = collect(host)
    assert told["failed"] and "an absolute path" in told["msg"] and "\n" not in told["msg"]
    assert (written(tmp_path), host.fetched) == ([], [])


@pytest.mark.parametrize("name", ["../..", "..", "/root", "a/b", ".ssh", 5, ["x"], "x" * 60, "d4\0"])
def test_the_name_of_a_run_that_a_host_makes_up_is_refused(collect, tmp_path, name):
    told = collect(Host(run=name, pieces=[piece("log/rank0.log")]))
    assert told["failed"] and "not a valid run name" in told["msg"]
    assert written(tmp_path) == []


def test_a_link_in_the_folder_leads_nowhere(collect, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "d4" / "node1").mkdir(parents=True)
    (tmp_path / "runs" / "d4" / "node1" / "log").symlink_to(tmp_path / "elsewhere")
    told = collect(Host(pieces=[piece("log/rank0.log")]))
    assert told["failed"] and "leads out of" in told["msg"]
    assert written(tmp_path) == []


def test_what_is_a_file_of_the_run_arrives(collect, tmp_path):
    checkpoint = "base_checkpoints/d4/model_000005.pt"
    host = Host(pieces=[piece("log/rank0.log", b"a\n")], whole=[{"path": checkpoint, "size": 4, "mtime": 5}])
    told = collect(host)
    assert (told["run"], told["files"]) == ("d4", [checkpoint, "log/rank0.log"])
    assert written(tmp_path) == [f"runs/d4/node1/{checkpoint}", "runs/d4/node1/log/rank0.log"]
    assert (tmp_path / "runs/d4/node1/log/rank0.log").read_bytes() == b"a\n"
    assert (tmp_path / "runs/d4/node1" / checkpoint).stat().st_mtime == 5


@pytest.mark.parametrize(
    "spoilt",
    [
        {"data": 5},
        {"data": "%%%"},
        {"sha256": "0" * 64},
        {"offset": "x"},
        {"offset": 10**30},
        {"data": None},
        {"sha256": None},
    ],
)
def test_a_spoilt_piece_is_a_sentence(collect, tmp_path, spoilt):
    told = collect(Host(pieces=[piece("log/rank0.log", **spoilt)]))
    assert told["failed"] and "log/rank0.log" in told["msg"]
    assert written(tmp_path) == []


def test_a_piece_that_unpacks_without_end_is_cut(collect, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_PIECE", 1000)
    data = b"\0" * 5000
    told = collect(Host(pieces=[piece("log/rank0.log", data, sha256=hashlib.sha256(data).hexdigest())]))
    assert told["failed"] and written(tmp_path) == []


def test_a_model_of_a_training_that_was_begun_anew_is_brought_once_and_is_the_newest(collect, tmp_path):
    """The host has set aside what had come further; the copies of that are set aside here, too."""
    place = tmp_path / "runs/d4/node1/base_checkpoints/d4"
    place.mkdir(parents=True)
    for name in ("model_000200.pt", "meta_000200.json", "model_000010.pt"):
        (place / name).write_bytes(b"old")
    new = [
        {"path": f"base_checkpoints/d4/{name}", "size": 4, "mtime": 5}
        for name in ("model_000050.pt", "meta_000050.json")
    ]
    assert collect(Host(whole=new))["changed"]
    assert files.newest_checkpoint(str(place.parents[1])) == [part["path"] for part in new]
    assert written(place) == ["meta_000050.json", "model_000010.pt", "model_000050.pt"]
    aside = place.parents[1] / "earlier/1"
    assert written(aside) == ["meta_000200.json", "model_000200.pt"]
    # What is there is told, so that it does not come again; a second time has a place of its own.
    assert files.known_copies(str(place.parents[1]))["base_checkpoints/d4/model_000050.pt"] == {
        "size": 4,
        "sha256": "",
        "mtime": 5.0,
    }
    assert collect(Host(whole=[{"path": "base_checkpoints/d4/model_000020.pt", "size": 4, "mtime": 5}]))["changed"]
    assert written(aside.parent / "2") == ["meta_000050.json", "model_000050.pt"]
