# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host that has everything, and each thing that it may lack; its base Python is played by the test."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.setup_look import setup_info
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import files as trainer_tree
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import venv
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import make_ready, parquet

LOCK = {"digest": "one", "pins": {"torch": ["2.13.0"]}}
SOURCES = {"scripts/base_train.py": b"print('training')\n", "run.sh": b"#!/bin/sh\n"}
DIGESTS = trainer_tree.digests_of(SOURCES)


class Host:
    """A folder with all that a run needs, and what its Python says of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base: list[Any] = [3, 11, "x86_64"]
        contents = {path: base64.b64encode(content).decode() for path, content in SOURCES.items()}
        trainer = str(folder / "trainer")
        trainer_tree.apply(trainer, DIGESTS, trainer_tree.compare(trainer, DIGESTS), contents)
        (folder / "venv/bin").mkdir(parents=True)
        (folder / "venv/bin/python").symlink_to("/bin/sh")
        (folder / "venv/lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)
        (folder / "venv" / venv.STAMP).write_text(json.dumps({"digest": "one", "python": "3.11"}))
        make_ready(str(folder / "data"), str(folder / "run"))

    def run(self, argv: list[str]) -> tuple[int, str, str]:
        assert venv.ASK_PYTHON in argv, "it only reads"
        return 0, json.dumps(self.base), ""


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setattr(venv, "run", made.run)
    return made


@pytest.fixture
def look(call, host):
    def run(**changes: Any) -> dict[str, Any]:
        given = {"dest": "trainer", "venv_dir": "venv", "data_dir": "data", "run_dir": "run"}
        given = {name: str(host.folder / value) for name, value in given.items()}
        options = {**LOCK, "host": "worker", "files": DIGESTS}
        return dict(call(setup_info, **{**given, **options, **changes}))

    return run


def ready(seen: dict[str, Any]) -> set[str]:
    return {name for name in ("files", "venv", "data") if seen[name]["ready"]}


def test_a_host_that_has_everything_is_told_by_what_it_has(look):
    seen = look()

    assert ready(seen) == {"files", "venv", "data"} and not seen["changed"]
    assert seen["files"]["digest"] == trainer_tree.digest_of(DIGESTS)
    assert seen["venv"]["packages"] == {"torch": "2.13.0+cpu"} and seen["venv"]["python_version"] == "3.11"
    assert len(seen["data"]["digest"]) == 16


def replaced(path: Path, content: bytes) -> None:
    """Another file of this name, as an editor leaves it."""
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("lacking", "change"),
    [
        ("files", lambda host: replaced(host.folder / "trainer/run.sh", b"#!/bin/bash\n")),
        ("venv", lambda host: (host.folder / "venv" / venv.STAMP).unlink()),
        ("venv", lambda host: next((host.folder / "venv").rglob("torch-*")).rmdir()),
        (
            "venv",
            lambda host: next((host.folder / "venv").rglob("torch-*")).rename(host.folder / "torch-2.12.0.dist-info"),
        ),
        ("venv", lambda host: (host.folder / "venv/bin/python").unlink()),
        ("venv", lambda host: host.base.__setitem__(1, 12)),
        ("venv", lambda host: host.base.__setitem__(1, 9)),
        ("data", lambda host: (host.folder / "data/shard_00001.parquet").unlink()),
        ("data", lambda host: replaced(host.folder / "data/shard_00001.parquet", parquet(9))),
        ("data", lambda host: (host.folder / "data/manifest.json").unlink()),
        (
            "data",
            lambda host: (host.folder / "data/manifest.json").write_text('{"format": 1, "shards": [{"name": 5}]}'),
        ),
        ("data", lambda host: (host.folder / "run/data/shard_00001.parquet").unlink()),
        ("data", lambda host: (host.folder / "run/data/shard_00009.parquet").write_bytes(b"of another run")),
    ],
)
def test_what_a_host_lacks_is_seen_and_the_rest_is_not_doubted(look, host, lacking: str, change: Callable[[Host], Any]):
    change(host)

    assert ready(look()) == {"files", "venv", "data"} - {lacking}


def test_what_is_asked_for_may_have_changed(look):
    assert ready(look(digest="two")) == {"files", "data"}
    assert ready(look(files={"run.sh": DIGESTS["run.sh"]})) == {"venv", "data"}  # one of ours is to go
    assert ready(look(files={})) == {"venv", "data"}
