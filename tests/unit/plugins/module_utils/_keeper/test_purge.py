# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""purge: takes what is ours, leaves what is not, and refuses while anything lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import deployment
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.deployment import purge
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import run_files
from ansible_collections.nanochat.ddp.plugins.module_utils._run.polling import run_info
from ansible_collections.nanochat.ddp.plugins.module_utils._session.boot import UNIT
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.venv import uv_beside


def put(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def take(call, base):
    """`take(what, run, check=...)` purges the base folder."""
    return lambda what="all", run="", check=False, **more: call(
        purge, check, host="desktop", base_dir=str(base), what=what, run=run, **more
    )


def left(base: Path) -> list[str]:
    return sorted(
        str(path.relative_to(base))
        for path in base.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Everything that jobs leave below a base folder."""
    base = tmp_path / "base"
    for run in ("d4", "solo"):
        put(base / "runs" / run / "plan.json", json.dumps({"format": 1, "run": run, "nodes": []}))
        put(base / "runs" / run / "base_checkpoints" / run / "model_000010.pt")
        put(base / "runs" / run / "previous" / "1" / "plan.json")
    put(base / "data" / "text-1a2b3c4d" / "manifest.json", '{"format": 1, "shards": []}')
    put(base / "data" / "url-1a2b3c4d" / ".shard_00000.parquet.part")
    shard, half = put(base / "data" / "text-1a2b3c4d" / "shard_00000.parquet"), base / "runs" / "half"
    for part in ("data", "tokenizer", "log"):
        (half / part).mkdir(parents=True)
    os.link(shard, half / "data" / "shard_00000.parquet")
    (half / "tokenizer" / "tokenizer.pkl").symlink_to(put(shard.parent / "tokenizer" / "tokenizer.pkl"))
    (half / "base_data").symlink_to("data")
    put(base / "wheels" / "3.11-x86_64" / "manifest.json", '{"format": 1, "files": []}')
    put(base / "wheels" / "3.13-x86_64.part" / "torch.whl")
    put(base / "trainer" / ".deployed.json", '{"digest": "x", "files": ["scripts/base_train.py", "nanochat/model.py"]}')
    put(base / "trainer" / "scripts" / "base_train.py")
    put(base / "trainer" / "nanochat" / "model.py")
    put(base / "trainer" / "nanochat" / "__pycache__" / "model.cpython-311.pyc")
    put(base / "tracker" / "env", "# Written by nanochat.ddp.env_file. Read it with: ...\n")
    put(base / "tracker" / "mlflow.db")
    put(base / "python" / ".made.json", '{"made_by": "uv"}')
    put(base / "python" / "cpython-3.12.9" / "bin" / "python3")
    put(base / "measured.json", '{"tokens_per_second": 4}')
    return base


def session(folder: Path, **told: Any) -> None:
    put(
        folder / "session.json",
        json.dumps({"session": f"nanochat-{folder.name}-rank0", "boot_id": processes.boot_id(), **told}),
    )


@pytest.fixture
def sleeper() -> Iterator[Any]:
    """Starts a process that carries a session's mark."""
    started: list[subprocess.Popen[bytes]] = []

    def start(marker: str) -> int:
        environment = {**os.environ, processes.SESSION_VARIABLE: marker}
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment))
        deadline = time.monotonic() + 20
        while getattr(processes.process(started[-1].pid), "marker", None) != marker:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return started[-1].pid

    yield start
    for one in started:
        one.kill()
        one.wait()


def test_everything_that_is_ours_goes(take, base):
    would = take(check=True)
    assert (base / "runs" / "d4" / "plan.json").exists()
    done = take()
    assert (would["changed"], would["diff"]) == (True, done["diff"])
    assert str(base / "runs" / "d4") in done["diff"]["before"]
    assert "left alone" not in str(done["said"])
    assert not base.exists()
    brief = f"in {base}: runs/d4, runs/half, runs/solo, data/text-1a2b3c4d, data/url-1a2b3c4d, wheels/"
    assert done["said"][0].startswith(f"desktop: removed: {brief}")
    assert done["said"][0].endswith("tracker, python, measured.json, 3 copied files")
    assert take()["changed"] is False


def test_what_starts_a_run_after_a_reboot_goes_with_its_folder(take, base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (base / "runs/solo/.session").mkdir()
    units = {name: base / "runs" / name for name in ("solo", "elsewhere")}
    for name, folder in units.items():
        put(
            tmp_path / f".config/systemd/user/nanochat-{name}-rank0.service",
            UNIT % (name, f'"{folder}/.session" "boot"'),
        )
    take(check=True)
    assert len(list(tmp_path.rglob("*.service"))) == 2
    take()
    assert [one.name for one in tmp_path.rglob("*.service")] == ["nanochat-elsewhere-rank0.service"]


def test_the_trainers_environment_goes_with_everything_if_it_is_ours(take, base):
    venv = base / "venv"
    put(venv / ".nanochat-ddp.json", json.dumps({"digest": "one", "packages": {"torch": "2.13.0"}}))
    assert take("run", "d4")["changed"] and venv.exists()
    assert f"desktop: would be removed: the trainer's Python environment {venv}" in take(check=True)["said"]
    assert venv.exists()
    assert f"desktop: removed: the trainer's Python environment {venv}" in take()["said"] and not base.exists()
    again = take()
    assert (again["changed"], again["said"]) == (False, ["desktop: nothing of it is there"])
    # A removal that was interrupted, and a first try that found no room.
    for rest in ("venv.trash/pyvenv.cfg", uv_beside("venv")):
        put(base / rest)
        assert take(check=True)["changed"] and (base / rest).exists()
        assert take()["said"] == [f"desktop: removed: the trainer's Python environment {venv}"] and not base.exists()


def test_an_environment_outside_the_base_folder_or_of_somebody_else_stays(take, base, tmp_path):
    outside = put(tmp_path / "other/venv" / ".nanochat-ddp.json").parent
    put(base / "venv" / "pyvenv.cfg")
    told = take(venv_dir=str(outside))
    assert outside.exists() and f"other inventories may use it: {outside} (ddp_venv_dir)" in told["said"][0]
    assert not take()["changed"] and (base / "venv").exists()


OTHERS = [
    *("notes.txt", "tools/my_notes.txt", "trainer/mine.py", "data/photos/1.jpg", "data/url-deadbeef/notes.txt"),
    *("runs/exp1/log/today.txt", "runs/x/data/shard_00000.parquet", "runs/marathon/2026.gpx", "wheels/bicycle.txt"),
    "src/main.c",
]


def test_field_28_what_others_have_there_stays(take, base):
    for name in OTHERS:
        put(base / name)
    (base / "runs" / "linked").symlink_to(base / "src")
    assert take("run", "marathon")["said"][-1].endswith(f" make it: {base}/runs/marathon"), "it is no run"
    told = take()
    assert left(base) == sorted([*OTHERS, "runs/linked"])
    stayed = "data/photos data/url-deadbeef runs/exp1 runs/x runs/marathon runs/linked wheels/bicycle.txt tools trainer"
    for name in stayed.split():
        assert str(base / name) in told["said"][-1]


def test_one_run_goes_alone(take, base):
    told = take("run", "d4")
    assert told["diff"]["before"].split() == [str(base / "runs" / "d4")]
    assert not (base / "runs" / "d4").exists()
    assert (base / "runs" / "solo" / "plan.json").exists() and (base / "measured.json").exists()
    assert take("run", "d4")["changed"] is False


@pytest.mark.parametrize("name", ["/etc", "..", ".", "../data", "d4/..", "", "a b", "d4\0", "é", "x" * 49])
def test_field_28_a_run_is_a_plain_name_wherever_it_is_read(call, take, base, name):
    before = left(base)
    told = take("run", name)
    assert told["failed"] and "for example d4-trial" in told["msg"]
    assert left(base) == before
    for reader in (run_info, run_files):
        told = call(reader, base_dir=str(base), run=name)
        if name:
            assert told["failed"] and "for example d4-trial" in told["msg"], reader.__name__


@pytest.mark.parametrize("kind", ["session", "rest of a session", "session file gone", "by hand"])
def test_field_28_nothing_goes_while_another_run_lives(take, base, sleeper, kind):
    solo = base / "runs" / "solo"
    pid = sleeper("abcd")
    if kind == "session":
        session(solo, id="other", pid=pid, pid_start=processes.start_ticks(pid), ended=None)
    elif kind == "rest of a session":
        session(solo, id="abcd", pid=1, pid_start=1, ended=5.0)
    elif kind == "session file gone":
        put(solo / ".session" / "launch.json", '{"id": "abcd", "session": "nanochat-solo-rank0"}')
    else:
        put(solo / "heartbeat-rank0.json", json.dumps({"time": time.time(), "pid": pid, "rank": 0}))
    before = left(base)
    for check in (True, False):
        told = take(check=check)
        assert told["failed"] and "solo" in told["msg"] and "stop it first" in told["msg"]
        assert "-e ddp_run=solo" in told["msg"]
    assert take("run", "solo")["failed"]
    assert left(base) == before
    assert take("run", "d4")["changed"], "another run's folder may go"


def test_the_tracker_counts_as_living_too(take, base, sleeper):
    pid = sleeper("t1")
    session(base / "tracker", id="t1", pid=pid, pid_start=processes.start_ticks(pid), ended=None)
    assert "nanochat-tracker" in take()["msg"]
    assert (base / "tracker" / "mlflow.db").exists()


@pytest.mark.parametrize("torn", ["", "[]", "null", '{"nodes": 5}', "[" * 2000])
def test_torn_marks_keep_what_they_are_in_and_records_that_lead_out_what_is_there(take, base, torn):
    outside = put(base.parent / "precious.txt")
    put(base / "tools" / ".deployed.json", json.dumps({"files": ["../../precious.txt", str(outside), 5, "\0"]}))
    put(base / "runs" / "torn" / "plan.json", torn)
    put(base / "runs" / "torn" / "diary.txt")
    take()
    assert (base / "runs" / "torn" / "diary.txt").exists() and outside.exists()


def test_what_cannot_be_removed_is_named(take, base, monkeypatch):
    def refuse(path: str, *dummy: Any, **dummy_more: Any) -> None:
        raise OSError(13, "Permission denied", path)

    monkeypatch.setattr(deployment.purge_utils.shutil, "rmtree", refuse)
    told = take("run", "d4")
    assert told["failed"] and str(base / "runs" / "d4") in told["msg"] and "Permission denied" in told["msg"]
