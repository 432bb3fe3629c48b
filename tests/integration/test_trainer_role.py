# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role trainer with the real venv and pip, and a small package in place of torch."""

from __future__ import annotations

import ensurepip
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    apply_links,
    entries,
    plan_links,
    save_manifest,
)
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import describe, fill

METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-thing\nVersion: {}\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def publish(folder: Path, version: str) -> None:
    """A wheel of the small package."""
    name = f"tiny_thing-{version}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_thing.py", "")
        record = ["tiny_thing.py,,"]
        for file, text in METADATA.items():
            wheel.writestr(f"{name}.dist-info/{file}", text.format(version))
            record.append(f"{name}.dist-info/{file},,")
        wheel.writestr(f"{name}.dist-info/RECORD", "\n".join([*record, f"{name}.dist-info/RECORD,,"]) + "\n")


@pytest.fixture
def index(tmp_path):
    """A folder of wheels, pip's own among them, that serves as the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    publish(folder, "1.0")
    for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"):
        shutil.copy(wheel, folder)
    return folder


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/base_train.py").write_text("raise SystemExit('not to be run by a check')\n")
    return folder


@pytest.fixture
def play(tmp_path, index, sources):
    trainer = {
        "source": "path",
        "script": "scripts.base_train",
        "url": str(sources),
        "index": "default",
        "requirements": ["tiny-thing==1.0"],
    }
    plan: dict[str, object] = {"run": "d4", "trainer": trainer, "data": {"id": "x", "source": "text", "paths": []}}
    plan.update(timeout_seconds=10)
    environment = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    made = Play(tmp_path, "ab", plan, environment)
    trainer["tracker_requirements"] = []
    return made


def test_hosts_have_the_trainer_and_play_again_changes_nothing(play):
    checked = play.run("trainer", "--check")
    assert not Path(play.hosts["a"]["trainer_dir"]).exists()
    first = play.run("trainer")
    second = play.run("trainer")

    assert messages(checked) == messages(first) == messages(second) == []
    assert counts(checked, "changed") == counts(first, "changed") == {"a": 2, "b": 2}
    assert counts(second, "changed") == {"a": 0, "b": 0}
    assert results(first, "Create the trainer's environment")["b"]["packages"] == {"tiny-thing": "1.0"}
    assert Path(play.hosts["b"]["trainer_dir"], "scripts/base_train.py").is_file()


def test_under_a_training_no_host_is_changed(play):
    used = Path(play.hosts["a"]["trainer_dir"])
    used.mkdir(parents=True)
    marked = {"NANOCHAT_DDP_SESSION": "0a1b", "NANOCHAT_BASE_DIR": "/home/x/runs/d4"}
    training = subprocess.Popen(["sleep", "600"], cwd=used, env=marked)
    try:
        account = play.run("trainer")
    finally:
        training.kill()
        training.wait()

    assert any(
        f"a: the files in {used} would have to change, but the run d4 uses them" in one for one in messages(account)
    )
    assert not list(used.iterdir()) and not Path(play.hosts["b"]["trainer_dir"]).exists()


def test_one_look_is_enough_where_no_host_lacks_anything(play, sources):
    play.plan["trainer"].update(source="ours")
    play.variables = {"trainer_src": str(sources)}
    for node in play.hosts.values():
        manifest = describe(fill(Path(node["data_dir"])))
        save_manifest(node["data_dir"], manifest)
        apply_links(node["data_dir"], node["run_dir"], plan_links(node["data_dir"], node["run_dir"], entries(manifest)))
    first = play.run("trainer")
    second = play.run("trainer+data")

    assert messages(first) == messages(second) == []
    assert results(first, "Check whether anything must be copied")["a"]["trainer"] is False
    found = results(second, "Check whether anything must be copied")["a"]
    assert (found["trainer"], found["data"]) == (True, True)
    assert not results(second, "Copy the trainer's files") and not results(second, "Create the trainer's environment")
    assert not results(second, "Check whether the data set is complete")

    Path(play.hosts["b"]["trainer_dir"], "scripts/base_train.py").write_text("changed by hand")
    Path(play.hosts["b"]["data_dir"], "shard_00001.parquet").unlink()
    third = play.run("trainer+data")

    assert messages(third) == []
    assert results(third, "Copy the trainer's files")["b"]["written"] == ["scripts/base_train.py"]
    assert results(third, "Fetch what is missing or broken")["b"]["moved"] == ["shard_00001.parquet"]
    assert Path(play.hosts["b"]["data_dir"], "shard_00001.parquet").is_file()


def test_nodes_of_one_machine_share_an_environment(play):
    play.hosts["b"]["venv_dir"] = play.hosts["a"]["venv_dir"]

    account = play.run("trainer")

    made = results(account, "Create the trainer's environment")
    assert messages(account) == []
    assert sorted(made[name]["changed"] for name in "ab") == [False, True]
    assert made["a"]["packages"] == made["b"]["packages"] == {"tiny-thing": "1.0"}


def test_whose_packages_could_not_be_fetched_is_told(play):
    play.plan["trainer"].update(offline=True, requirements=["tiny-thing==9.9"])
    (told,) = {one for one in messages(play.run("trainer")) if "fetched" in one}
    assert told.startswith("packages for a and b (Python 3.") and ", fetched by the controller: " in told


def test_packages_come_through_the_controller_where_no_host_reaches_an_index(play, index):
    play.plan["trainer"]["offline"] = True

    first = play.run("trainer")
    second = play.run("trainer")

    assert messages(first) == messages(second) == []
    assert results(first, "Create the trainer's environment from them")["b"]["packages"] == {"tiny-thing": "1.0"}
    assert results(first, "Fetch what is missing or broken")["b"]["from"].keys() == {"a"}
    assert counts(second, "changed") == {"a": 0, "b": 0}

    # The packages that b got before belong to other requirements.
    publish(index, "1.1")
    play.environments = {"b": {"PIP_FIND_LINKS": str(index / "nothing")}}
    play.plan["trainer"]["requirements"] = ["tiny-thing==1.1"]
    third = play.run("trainer")
    assert messages(third) == []
    assert results(third, "Create the trainer's environment")["b"]["reason"] == "wheels"
    assert results(third, "Create the trainer's environment from them")["b"]["packages"] == {"tiny-thing": "1.1"}


def test_host_without_a_network_gets_the_packages_from_its_peer(play, index):
    """The index of host b answers nobody; host a has one."""
    play.environment = {"PIP_CONFIG_FILE": "/dev/null"}
    away = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple"}
    here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    play.environments = {"a": here, "b": away}

    account = play.run("trainer")

    assert messages(account) == []
    assert results(account, "Create the trainer's environment")["b"]["reason"] == "network"
    assert results(account, "Fetch what is missing or broken")["b"]["from"].keys() == {"a"}
    assert results(account, "Create the trainer's environment from them")["b"]["changed"]


def test_a_host_that_hands_on_other_packages_than_the_index_has_is_refused(play, index):
    play.environment = {"PIP_CONFIG_FILE": "/dev/null"}
    here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    play.environments = {"a": here, "b": {"PIP_INDEX_URL": "http://127.0.0.1:1/simple"}}
    assert messages(play.run("trainer")) == []
    (fetched,) = Path(play.hosts["a"]["base_dir"]).glob("wheels/*/tiny_thing-*.whl")
    # Host a turns hostile, and b is set up again.
    with zipfile.ZipFile(fetched, "a") as wheel:
        wheel.writestr("tiny_thing_evil.pth", "import evil\n")
    shutil.rmtree(play.hosts["b"]["base_dir"])

    account = play.run("trainer")

    (told,) = messages(account)
    assert "a fetched packages for b" in told and "1 of them (tiny_thing-1.0-py3-none-any.whl)" in told
    assert not list(Path(play.hosts["b"]["base_dir"]).rglob("*.whl"))


def test_sources_come_from_a_repository(play, sources, tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", sources, "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    play.plan["trainer"].update(source="git", url=f"file://{sources}")

    account = play.run("trainer", "--check")

    assert messages(account) == []
    assert results(account, "Copy the trainer's files")["b"]["written"] == ["scripts/base_train.py"]
