# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import base64
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import files as trainer_tree
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.files import trainer_files


@pytest.fixture
def src(tmp_path):
    folder = tmp_path / "src"
    (folder / "scripts/__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("not a source")
    (folder / "scripts/base_train.py").write_text("print('training')\n")
    (folder / "scripts/__pycache__/base_train.pyc").write_bytes(b"not a source")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    return folder


@pytest.fixture
def deploy(call, src, tmp_path):
    """Runs the module with what the controller's side would send it."""

    def run(_check_mode=False, contents=True):
        tree = trainer_tree.read_tree(str(src))
        sent = {path: base64.b64encode(content).decode() for path, content in tree.items()} if contents else None
        return call(
            trainer_files,
            _check_mode=_check_mode,
            dest=str(tmp_path / "dest"),
            host="worker",
            files=trainer_tree.digests_of(tree),
            contents=sent,
        )

    return run


def test_brings_the_sources_and_nothing_else(deploy, tmp_path):
    checked, dest = deploy(_check_mode=True), tmp_path / "dest"
    assert not dest.exists()
    result = deploy()

    assert checked == result and result["changed"]
    assert result["written"] == ["run.sh", "scripts/base_train.py"]
    assert sorted(str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file()) == [
        ".deployed.json",
        "run.sh",
        "scripts/base_train.py",
    ]
    assert os.access(dest / "run.sh", os.X_OK)
    assert [line.split()[0] for line in result["diff"]["after"].splitlines()] == result["written"]


def test_only_what_differs_is_asked_for(deploy, src):
    first, second = deploy(), deploy()
    assert first["changed"] and not second["changed"]
    assert (second["written"], second["removed"], second["diff"]["after"]) == ([], [], "")
    (src / "run.sh").write_text("#!/bin/bash\n")

    asked = deploy(contents=False)
    assert asked["written"] == ["run.sh"] and deploy()["diff"] == asked["diff"]
    assert asked["diff"]["before"].startswith("run.sh ") and asked["diff"]["before"] != asked["diff"]["after"]


def test_stale_files_go_with_their_folder_and_other_peoples_stay(deploy, src, tmp_path):
    (src / "lib").mkdir()
    (src / "lib/old.py").write_text("")
    deploy()
    dest = tmp_path / "dest"
    (dest / "lib/__pycache__").mkdir()
    (dest / "lib/__pycache__/old.pyc").write_bytes(b"")
    (src / "lib/old.py").unlink()
    (dest / "scripts/mine.py").write_text("kept")
    (src / "run.sh").unlink()

    result = deploy()

    assert result["removed"] == ["lib/old.py", "run.sh"]
    assert not (dest / "run.sh").exists() and not (dest / "lib").exists()
    assert (dest / "scripts/mine.py").exists()


def test_a_record_that_leads_out_removes_nothing_there(deploy, tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest/.deployed.json").write_text('{"files": ["../mine", 5]}')
    assert deploy()["removed"] == [] and (tmp_path / "mine").exists()


def test_folder_that_cannot_be_written_is_named(deploy, tmp_path):
    (tmp_path / "dest").write_text("a file in the way")

    result = deploy()

    assert result["failed"] and result["msg"].startswith(f"worker: {tmp_path}/dest")
