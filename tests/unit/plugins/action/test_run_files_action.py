# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collecting from a compromised host writes nothing but files of a run in the folder of that host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import find

FOUND = {"node1": {"run": {"run": "d4"}}}
LOG = "log/rank0.log"
MODEL = "base_checkpoints/d4/model_%06d.pt"


def offered(path: Any, size: Any = 4, mtime: Any = 5) -> dict[str, Any]:
    return {"path": path, "size": size, "mtime": mtime}


class Host:
    """A host that answers what it likes, and sends four bytes of each file."""

    has_pipelining = True

    def __init__(self, *offers: dict[str, Any], **answer: Any) -> None:
        self.answer = {"run": "d4", "run_dir": "/srv/runs/d4", "files": list(offers), **answer}
        self.fetched: list[str] = []

    def fetch_file(self, source: str, target: str) -> None:
        self.fetched.append(source)
        Path(target).write_bytes(b"evil")


@pytest.fixture
def collect(tmp_path, agent):
    """`collect(host, check)`; returns what the action says."""

    def run(host: Host, check: bool = False) -> dict[str, Any]:
        given = {"dest": str(tmp_path / "runs"), "base_dir": "~/b", "found": FOUND}
        variables = {"inventory_hostname": "node1"}
        return agent("run_files", variables, check, prints=host.answer, connection=host, **given)

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
def test_a_host_writes_nothing_outside_its_folder(collect, tmp_path, path, check):
    host = Host(offered(LOG), offered(path))
    told = collect(host, check)
    assert told["failed"] and "node1" in told["msg"] and "\n" not in told["msg"]
    assert (written(tmp_path), host.fetched) == ([], [])


@pytest.mark.parametrize("run_dir", ["/srv\n!touch evil\n/d4", "srv", "/srv/../etc", None, 4, "/srv/\x1b[2J"])
def test_a_run_folder_that_would_be_another_command_of_sftp_is_refused(collect, tmp_path, run_dir):
    host = Host(offered(MODEL % 10), run_dir=run_dir)
    told = collect(host)
    assert told["failed"] and "an absolute path" in told["msg"] and "\n" not in told["msg"]
    assert (written(tmp_path), host.fetched) == ([], [])


@pytest.mark.parametrize("name", ["../..", "..", "/root", "a/b", ".ssh", 5, ["x"], "x" * 60, "d4\0"])
def test_the_name_of_a_run_that_a_host_makes_up_is_refused(collect, tmp_path, name):
    told = collect(Host(offered(LOG), run=name))
    assert told["failed"] and "not a valid run name" in told["msg"]
    assert written(tmp_path) == []


def test_a_link_in_the_folder_leads_nowhere(collect, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "d4" / "node1").mkdir(parents=True)
    (tmp_path / "runs" / "d4" / "node1" / "log").symlink_to(tmp_path / "elsewhere")
    told = collect(Host(offered(LOG)))
    assert told["failed"] and "leads out of" in told["msg"]
    assert written(tmp_path) == []


@pytest.mark.parametrize("stamp", [{"size": "x"}, {"size": None}, {"mtime": 10**30}, {"mtime": -1}, {"mtime": None}])
def test_a_file_with_a_spoilt_stamp_is_refused(collect, tmp_path, stamp):
    told = collect(Host(offered(LOG, **stamp)))
    assert told["failed"] and "node1" in told["msg"]
    assert written(tmp_path) == []


def test_a_file_comes_when_it_is_new_or_has_changed(collect, tmp_path):
    folder = tmp_path / "runs/d4/node1"
    for log, comes in (
        (offered(LOG), [LOG, MODEL % 5]),
        (offered(LOG), []),
        (offered(LOG, 4, 6), [LOG]),
        (offered(LOG, 9, 6), [LOG]),
    ):
        host = Host(log, offered(MODEL % 5))
        assert (collect(host, check=True)["files"], host.fetched) == (sorted(comes), [])
        assert collect(host) == {"changed": bool(comes), "run": "d4", "folder": str(folder), "files": sorted(comes)}
        assert host.fetched == [f"/srv/runs/d4/{path}" for path in comes]
        assert (folder / LOG).read_bytes() == b"evil" and (folder / LOG).stat().st_mtime == log["mtime"]
    assert written(tmp_path) == [f"runs/d4/node1/{path}" for path in sorted([LOG, MODEL % 5])]


def test_a_checkpoint_that_comes_torn_is_refused(collect, tmp_path):
    told = collect(Host(offered(MODEL % 5, 9)))
    assert told["failed"] and "came with 4 of 9 bytes" in told["msg"] and written(tmp_path) == []


def test_a_model_of_a_training_that_was_begun_again_is_brought_once_and_is_the_newest(collect, tmp_path):
    """The host has set aside what had come further; the copies of that are set aside here, too."""
    place = tmp_path / "runs/d4/node1/base_checkpoints/d4"
    place.mkdir(parents=True)
    for name in ("model_000200.pt", "meta_000200.json", "model_000010.pt"):
        (place / name).write_bytes(b"old")
    new = [MODEL % 50, "base_checkpoints/d4/meta_000050.json"]
    assert collect(Host(*map(offered, new)))["changed"]
    assert find.newest_checkpoint(str(place.parents[1])) == new
    assert written(place) == ["meta_000050.json", "model_000010.pt", "model_000050.pt"]
    aside = place.parents[1] / "earlier/1"
    assert written(aside) == ["meta_000200.json", "model_000200.pt"]
    # A second time has a place of its own.
    assert collect(Host(offered(MODEL % 20)))["changed"]
    assert written(aside.parent / "2") == ["meta_000050.json", "model_000050.pt"]
