# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role trainer with the real uv, and a small package in place of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.plugin_utils._wheels import bring_uv
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import make_ready

METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-thing\nVersion: {}\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def publish(folder: Path, version: str, text: str = "") -> Path:
    """A wheel of the small package."""
    name = f"tiny_thing-{version}"
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", text)
        record = ["tiny.py,,"]
        for file, content in METADATA.items():
            wheel.writestr(f"{name}.dist-info/{file}", content.format(version))
            record.append(f"{name}.dist-info/{file},,")
        wheel.writestr(f"{name}.dist-info/RECORD", "\n".join([*record, f"{name}.dist-info/RECORD,,"]) + "\n")
    return path


def write_lock(trainer: Path, *wheels: Path) -> None:
    """The lock of a trainer that needs the small package."""
    (trainer / "locks").mkdir(exist_ok=True)
    version = wheels[0].name.split("-")[1].removesuffix(".tar.gz")
    digests = [f"    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in wheels]
    lines = [f"tiny-thing=={version}", *digests]
    (trainer / "locks/trainer-default.txt").write_text("# Checked: tiny-thing\n" + " \\\n".join(lines) + "\n")


@pytest.fixture
def index(tmp_path):
    """A folder of wheels that serves as the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    publish(folder, "1.0")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The controller's cache, with uv in it: fetched once for all tests."""
    folder = tmp_path_factory.mktemp("cache")
    bring_uv(folder, os.uname().machine)
    return folder


@pytest.fixture
def play(tmp_path, index, cache):
    trainer = {"script": "scripts.base_train", "index": "default", "packages": ["trainer"]}
    ours = tmp_path / "trainer"
    (ours / "scripts").mkdir(parents=True)
    (ours / "scripts/base_train.py").write_text("raise SystemExit('not to be run by a check')\n")
    write_lock(ours, index / "tiny_thing-1.0-py3-none-any.whl")
    plan: dict[str, object] = {"run": "d4", "trainer": trainer, "data": {"id": "x", "source": "text", "paths": []}}
    plan.update(timeout_seconds=10)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/uv").symlink_to(cache / "uv")
    environment = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "NANOCHAT_DDP_HOME": str(tmp_path / "cache"),
    }
    made = Play(tmp_path, "ab", plan, environment)
    made.variables = {"trainer_src": str(ours)}
    return made


def test_under_a_training_no_host_is_changed(play):
    used = Path(play.hosts["a"]["trainer_dir"])
    used.mkdir(parents=True)
    marked = {"NANOCHAT_DDP_SESSION": "0a1b", "NANOCHAT_BASE_DIR": "/home/x/runs/d4"}
    training = subprocess.Popen(["sleep", "600"], cwd=used, env=marked)
    try:
        accounts = [play.run("trainer", *words) for words in (["--check"], [])]
    finally:
        training.kill()
        training.wait()

    why = (
        f"a: the files in {used} would have to change, but the run d4 uses them (process {training.pid}). Stop it first"
    )
    for account in accounts:
        (told,) = (one for one in messages(account) if one.startswith(why))
        assert "-e ddp_run=d4" in told
    assert not list(used.iterdir()) and not Path(play.hosts["b"]["trainer_dir"]).exists()


def test_hosts_get_the_trainer_and_one_look_is_enough_where_none_lacks_anything(play):
    for node in play.hosts.values():
        make_ready(node["data_dir"], node["run_dir"])
    checked = play.run("trainer", "--check")
    assert not Path(play.hosts["a"]["trainer_dir"]).exists()
    first = play.run("trainer")
    second = play.run("trainer+data")

    assert messages(checked) == messages(first) == messages(second) == []
    assert counts(checked, "changed") == counts(first, "changed") == {"a": 2, "b": 2}
    assert counts(second, "changed") == {"a": 0, "b": 0}
    assert results(first, "Create the trainer's environment")["b"]["packages"] == {"tiny-thing": "1.0"}
    ready = [results(one, "Check what is there, and that no training uses what will change") for one in (first, second)]
    assert [one["a"]["ready"] for one in ready] == [False, True]
    assert not results(second, "Copy the trainer's files") and not results(second, "Create the trainer's environment")
    assert all(one.get("skipped") for one in results(second, "Write the manifest of the data set").values())

    Path(play.hosts["b"]["trainer_dir"], "scripts/base_train.py").write_text("changed by hand")
    Path(play.hosts["b"]["data_dir"], "shard_00001.parquet").unlink()
    third = play.run("trainer+data")

    assert messages(third) == []
    assert results(third, "Copy the trainer's files")["b"]["written"] == ["scripts/base_train.py"]
    assert results(third, "Fetch what is missing or broken")["b"]["moved"] == ["shard_00001.parquet"]
    assert Path(play.hosts["b"]["data_dir"], "shard_00001.parquet").is_file()


def test_packages_come_from_the_controller_and_what_lies_there_is_not_believed(play, index):
    play.plan["trainer"]["offline"] = True

    first = play.run("trainer")
    second = play.run("trainer")

    assert messages(first) == messages(second) == []
    assert results(first, "Create the trainer's environment")["b"]["packages"] == {"tiny-thing": "1.0"}
    assert counts(second, "changed") == {"a": 0, "b": 0}

    # Somebody put another wheel into the folder.
    (there,) = Path(play.hosts["b"]["base_dir"]).glob("wheels/*/tiny_thing-*.whl")
    shutil.copy(publish(play.folder, "1.0", "import evil"), there)
    shutil.rmtree(play.hosts["b"]["venv_dir"])
    assert messages(play.run("trainer")) == []
    (module,) = Path(play.hosts["b"]["venv_dir"]).glob("lib/*/site-packages/tiny.py")
    assert module.read_text() == ""

    # The packages that b got before belong to another lock.
    newer = publish(index, "1.1")
    write_lock(Path(play.variables["trainer_src"]), newer)
    third = play.run("trainer")
    assert messages(third) == []
    assert results(third, "Create the trainer's environment")["b"]["packages"] == {"tiny-thing": "1.1"}
    assert [one.name for one in Path(play.hosts["b"]["base_dir"]).glob("wheels/*/*")] == [newer.name]


def test_host_without_a_network_gets_the_packages_from_the_controller(play, index):
    """The index of host b answers nobody."""
    play.environments = {"b": {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:1/simple"}}

    account = play.run("trainer")

    assert messages(account) == []
    assert counts(account, "changed") == {"a": 2, "b": 2}
    assert [len(list(Path(node["base_dir"]).glob("wheels/*/*.whl"))) for node in play.hosts.values()] == [0, 1]


@pytest.mark.parametrize("offline", [False, True])
def test_a_package_that_differs_from_the_lock_is_never_installed(play, index, offline):
    """Such as another file of the same version at an index that somebody took over."""
    play.plan["trainer"]["offline"] = offline
    publish(index, "1.0", "import evil")

    told = messages(play.run("trainer"))

    assert told and all("tiny-thing" in one for one in told)
    assert all(("DO NOT MATCH THE HASHES" if offline else "Hash mismatch") in one for one in told)
    assert not list(Path(play.hosts["b"]["base_dir"]).rglob("tiny.py"))


def test_sources_are_never_built(play, index):
    """A file of sources runs code of its own when it is installed."""
    wheel = index / "tiny_thing-1.0-py3-none-any.whl"
    sources = index / "tiny_thing-1.0.tar.gz"
    wheel.rename(sources)
    write_lock(Path(play.variables["trainer_src"]), sources)
    assert "tiny-thing==1.0" in messages(play.run("trainer"))[0]
    play.plan["trainer"]["offline"] = True
    (told,) = set(messages(play.run("trainer")))
    assert told.startswith("the controller could not fetch for Python 3.") and "tiny-thing 1.0" in told


def test_packages_that_cannot_be_imported_are_told_where_they_are_installed(play, index):
    write_lock(Path(play.variables["trainer_src"]), publish(index, "1.0", "raise ImportError('no libx.so')"))
    told = messages(play.run("trainer"))
    assert told and all("would not start with" in one and "ImportError: no libx.so" in one for one in told)
    assert not Path(play.hosts["a"]["venv_dir"], ".nanochat-ddp.json").exists()
