# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run folder gets its plan, and the outputs of an earlier run are never lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.deployment import run_folder
from ansible_collections.nanochat.ddp.plugins.module_utils._run import folder


def plan(shards: int = 3, depth: int = 4, resume: bool = True, **flags: object) -> dict[str, Any]:
    return {
        "run": "d4",
        "digest": f"{depth}-{shards}",
        "model": {"depth": depth},
        "data": {"id": f"text-{shards}", "source": "text", "shards": shards},
        "training": {"resume": resume},
        "nodes": [{"host": "node1", "flags": flags}],
    }


def train(run: Path, step: int | None = 10) -> None:
    """Make a run's files; without a step, of a run that died before its first checkpoint."""
    (run / "log").mkdir(parents=True, exist_ok=True)
    (run / "log" / "rank0.log").write_text(f"to step {step}")
    (run / "metrics-rank0.jsonl").write_text(f"{step}")
    if step is not None:
        checkpoints = run / "base_checkpoints" / "d4"
        checkpoints.mkdir(parents=True, exist_ok=True)
        for name in ("model_%06d.pt", "meta_%06d.json"):
            (checkpoints / (name % step)).write_text("{}")


def prepare(run: Path, wanted: dict[str, Any], fresh: bool = False, dry: bool = False, **more: Any) -> dict[str, Any]:
    return {**folder.prepare(str(run), wanted, fresh, dry, **more)}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("change", [{"shards": 4}, {"depth": 8}])
def test_field_26_checkpoints_of_another_plan_are_refused_and_stay(tmp_path, call, change):
    told = call(run_folder, path=str(tmp_path), plan=plan())
    train(tmp_path)
    before = files(tmp_path)
    assert told["changed"] and told["place"] is None
    for check in (True, False):
        told = call(run_folder, check, path=str(tmp_path), plan=plan(**change))
        assert told["failed"]
        assert "checkpoints up to step 10" in told["msg"] and "ddp_fresh" in told["msg"]
        assert "ddp_data_shards was 3 and is 4 now" in told["msg"] or "ddp_depth was 4 and is 8 now" in told["msg"]
        assert files(tmp_path) == before
    assert not call(run_folder, path=str(tmp_path), plan=plan())["changed"], "set back, all is as it was"


def test_generations_are_numbered_and_never_replaced(tmp_path, call):
    first = call(run_folder, path=str(tmp_path), plan=plan())
    assert first["diff"]["before"] == "" and '"d4"' in first["diff"]["after"]
    for number, step in enumerate((10, None, 20, None), 1):
        train(tmp_path, step)
        (tmp_path / "apart/generation-2").mkdir(parents=True)
        dry = call(run_folder, True, path=str(tmp_path), plan=plan(), fresh=True)
        told = call(run_folder, path=str(tmp_path), plan=plan(), fresh=True)
        assert dry["place"] == told["place"] == str(tmp_path / "previous" / str(number))
        assert dry["set_aside"] == told["set_aside"]
        assert told["diff"]["before"] == told["diff"]["after"] == first["diff"]["after"]
        assert told["checkpoint"] == step
        assert not (tmp_path / "base_checkpoints").exists() and not (tmp_path / "apart").exists()
    kept = tmp_path / "previous"
    assert files(kept / "1") == [
        "base_checkpoints/d4/meta_000010.json", "base_checkpoints/d4/model_000010.pt", "log/rank0.log", "metrics-rank0.jsonl", "plan.json",
    ]  # fmt: skip
    assert (kept / "3" / "base_checkpoints" / "d4" / "model_000020.pt").exists()
    assert json.loads((kept / "1" / "plan.json").read_text()) == plan()
    again = call(run_folder, path=str(tmp_path), plan=plan(), fresh=True)
    assert again["set_aside"] == [], "nothing was written since"


def test_a_run_without_checkpoints_makes_way(tmp_path):
    prepare(tmp_path, plan())
    train(tmp_path, None)
    told = prepare(tmp_path, plan(shards=4))
    assert told["set_aside"] == ["log", "metrics-rank0.jsonl"]
    assert json.loads((tmp_path / "plan.json").read_text()) == plan(shards=4)


def test_a_trainer_that_is_not_told_to_go_on_does_not_write_over_checkpoints(tmp_path):
    prepare(tmp_path, plan())
    train(tmp_path)
    anew = plan(3, 4, False)
    assert prepare(tmp_path, plan(3, 4, False, **{"resume-from-step": "10"}))["set_aside"] == []
    assert prepare(tmp_path, anew)["checkpoint"] == 10
    assert prepare(tmp_path, anew)["set_aside"] == []


def test_an_interrupted_move_loses_nothing(tmp_path, monkeypatch):
    prepare(tmp_path, plan())
    train(tmp_path)
    rename = os.rename

    def full(source: str, target: str) -> None:
        if source.endswith("metrics-rank0.jsonl"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(folder.os, "rename", full)
    with pytest.raises(folder.RunFolderError, match="previous/1"):
        prepare(tmp_path, plan(), fresh=True)
    monkeypatch.undo()
    prepare(tmp_path, plan(), fresh=True)
    left = files(tmp_path / "previous")
    assert {"1/base_checkpoints/d4/model_000010.pt", "1/log/rank0.log", "2/metrics-rank0.jsonl"} <= set(left)


def test_a_folder_is_made_ready_without_a_change_to_what_is_in_it(tmp_path, monkeypatch):
    """Before a job is stopped for its successor."""
    run = tmp_path / "runs" / "d4"
    assert folder.make_ready(str(run), plan(), False, True)["changed"] and not run.exists()
    assert folder.make_ready(str(run), plan(), False, False)["changed"] and run.is_dir()
    prepare(run, plan())
    train(run)
    before = files(run)
    assert not folder.make_ready(str(run), plan(), False, False)["changed"]
    with pytest.raises(folder.RunFolderError, match="ddp_data_shards was 3 and is 4 now"):
        folder.make_ready(str(run), plan(shards=4), False, False)
    folder.make_ready(str(run), plan(shards=4), True, False)
    monkeypatch.setattr(folder.os, "access", lambda path, mode: False)
    with pytest.raises(folder.RunFolderError, match="cannot be created or written: this user cannot write there"):
        folder.make_ready(str(run), plan(), False, False)
    assert files(run) == before


def test_a_keeper_s_secret_is_nobody_else_s_to_read(tmp_path):
    prepare(tmp_path, plan(), keeper=folder.KeeperSetup("node1", "s" * 20, "print()"))
    kept = [tmp_path / folder.KEEPER_FOLDER, *(tmp_path / folder.KEEPER_FOLDER).iterdir()]
    assert [path.stat().st_mode & 0o077 for path in kept] == [0] * 3
    prepare(tmp_path, plan())
    assert not (tmp_path / folder.KEEPER_FOLDER).exists()


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b"null", b'{"model": 4, "data": []}', b"\xff\xfe", b"[" * 3000])
def test_a_torn_plan_in_the_folder_harms_nothing(tmp_path, torn):
    (tmp_path / "plan.json").write_bytes(torn)
    train(tmp_path)
    assert prepare(tmp_path, plan())["set_aside"] == []
    assert (tmp_path / "base_checkpoints" / "d4" / "model_000010.pt").exists()


NEW, OLD = "0" * 15 + "2", "0" * 15 + "1"


def launched(goes_on: str | None, name: str = NEW, number: int = 2) -> dict[str, Any]:
    return {"id": name, "number": number, "begun": 1000, "goes_on": goes_on, "base": None}


def prepared(call, path, training, **more):
    return call(run_folder, path=str(path), plan=plan(), training=training, **more)


def test_an_older_training_is_set_aside_and_the_one_that_goes_on_stays(tmp_path, call):
    prepared(call, tmp_path, launched(None, OLD, 1))
    train(tmp_path, 300)
    (tmp_path / "apart" / "generation-2").mkdir(parents=True)
    (tmp_path / "apart" / "generation-2" / "model_000200.pt").touch()
    assert prepared(call, tmp_path, launched(OLD, OLD, 1))["set_aside"] == []
    told = prepared(call, tmp_path, launched(NEW))
    assert told["checkpoint"] == 300
    kept = tmp_path / "previous" / "1"
    assert (kept / "apart" / "generation-2" / "model_000200.pt").exists()
    assert json.loads((kept / "training.json").read_text())["id"] == OLD
    assert json.loads((tmp_path / "training.json").read_text()) == {"id": NEW, "number": 2, "begun": 1000}
    assert prepared(call, tmp_path, launched(NEW))["set_aside"] == []


def test_an_older_training_under_other_settings_is_no_reason_to_refuse(tmp_path, call):
    call(run_folder, path=str(tmp_path), plan=plan(depth=8), training=launched(None, OLD, 1))
    train(tmp_path, 300)
    assert not prepared(call, tmp_path, launched(NEW), state="ready").get("failed")
    assert prepared(call, tmp_path, launched(NEW))["checkpoint"] == 300


@pytest.mark.parametrize(("goes_on", "checkpoint"), [("", None), (NEW, 10)])
def test_a_training_without_an_id_stays_only_for_the_one_that_resumes_it(tmp_path, call, goes_on, checkpoint):
    train(tmp_path, 10)
    told = prepared(call, tmp_path, launched(goes_on))
    assert told["checkpoint"] == checkpoint and bool(told["set_aside"]) == (checkpoint is not None)
    assert json.loads((tmp_path / "training.json").read_text())["id"] == NEW


def test_end_is_told_by_the_clock_of_the_host_and_stays_where_it_was_said(tmp_path, call, monkeypatch):
    def ends(clock: float, now: float) -> int:
        monkeypatch.setattr(folder.time, "time", lambda: clock)
        told.append(prepared(call, tmp_path, {**launched(None), "ends": 20000, "now": now})["changed"])
        return json.loads((tmp_path / "training.json").read_text())["ends"]

    told: list[bool] = []
    assert ends(clock=13600.0, now=10000.0) == 23600
    assert ends(clock=13702.4, now=10100.0) == 23600
    assert ends(clock=10100.0, now=10100.0) == 20000
    assert told == [True, False, True]
