# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a checkout can be driven, as its sources tell."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.filter.values import checkout_problems
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import checkout

STAND_IN = Path(__file__).resolve().parents[4] / "stand_in"
FLAGS = ["--run", "--model-tag", "--depth", "--device-batch-size", "--core-metric-every", "--window-pattern"]


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(STAND_IN, tmp_path / "checkout"))


def edit(folder, name, before, after):
    path = folder / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_one_that_fits(folder):
    assert checkout.problems(str(folder), FLAGS) == {"script": [], "join": []}
    assert checkout_problems(str(folder), {"depth": 4}, "scripts.base_train") == {"script": [], "join": []}


def test_a_script_that_follows_the_base_model(folder):
    flags = {"model-tag": "d4", "chatcore-every": -1}
    assert checkout_problems(str(folder), flags, "scripts.chat_sft") == {"script": [], "join": []}
    found = checkout_problems(str(folder), {**flags, "depth": 4}, "scripts.chat_sft")
    assert found["script"] == ["has a scripts/chat_sft.py without --depth"]
    assert checkout.problems(str(folder), [], "scripts.mid_train")["script"] == ["has no readable scripts/mid_train.py"]


def test_a_flag_that_the_script_does_not_know(folder):
    found = checkout_problems(str(folder), {"depth": 4, "twist": 3, "dept": 4}, "scripts.base_train")
    assert found["script"] == ["has a scripts/base_train.py without --twist, --dept"]


def test_functions_that_differ(folder):
    name = "nanochat/checkpoint_manager.py"
    edit(folder, name, "checkpoint_dir: str, step: int, model_data: Any", "where: str, step: int, model_data: Any")
    edit(folder, name, "def load_checkpoint(", "def load(")
    assert checkout.problems(str(folder), FLAGS)["join"] == [
        "has a save_checkpoint(where, step, model_data, optimizer_data, meta_data, rank) in nanochat/checkpoint_manager.py, where "
        "save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data) is expected",
        "has no load_checkpoint in nanochat/checkpoint_manager.py",
    ]
    (folder / name).write_text("def")
    assert "that is not valid Python" in checkout.problems(str(folder), FLAGS)["join"][0]
    (folder / name).unlink()
    assert checkout.problems(str(folder), FLAGS)["join"] == ["has no readable nanochat/checkpoint_manager.py"]


def test_scripts_that_are_none(folder):
    script = folder / "scripts/base_train.py"
    script.write_text("if")
    assert "that is not valid Python" in checkout.problems(str(folder), FLAGS)["script"][0]
    script.unlink()
    assert checkout.problems(str(folder), FLAGS) == {
        "script": ["has no readable scripts/base_train.py"],
        "join": [],
    }
