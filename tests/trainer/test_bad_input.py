# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever the command line, the environment and the files of a run may hold: one sentence, or it works."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as trial
from hypothesis import strategies as st
from trainings import DATA

from nanochat.data import dataloader, tokenizer
from nanochat.kit import common
from nanochat.kit.common import Ranks, UserError
from nanochat.kit.settings import Settings, parse, rank_shares
from nanochat.parallel import comm
from nanochat.record.journal import Metrics
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.schedule import StepSchedule
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run import restore
from nanochat.run.stage import RunStage
from nanochat.run.state import TrainingProgress

FLAGS = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(Settings)]
EDGES = st.sampled_from(
    [
        "0", "-1", "1", "-0", "nan", "inf", "-inf", "1e400", "1e-320", "1e308", "9" * 30, "9" * 5000, "-" + "9" * 40,
        "2.5",
    ]
    + [
        "", " ", "٣", "²", "1_000", "0x10", "\x00", "\ud800", "é", "a" * 10000, "6,2", "1,", ",", "6,-2",
        "9" * 40 + ",1",
    ]
    + ["cpu", "exact", "bf16", "SSSL", "--", "--help-me", "-x", "../..", "/", "none", "mlflow"]
)  # fmt: skip
WORDS = EDGES | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
LINES = st.lists(st.tuples(st.sampled_from(FLAGS), WORDS, st.booleans()), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["\x00", "../x", "9" * 400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
BROKEN = st.sampled_from([b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b"0", b'"x"', b"\x00" * 100, b"{}"])


@contextlib.contextmanager
def told() -> Iterator[None]:
    """The block works, or fails with one sentence that says more than the input."""
    try:
        yield
    except UserError as error:
        assert len(str(error).split()) > 3


def cases(count: int) -> trial:
    return trial(
        max_examples=max(1, count // int(os.environ.get("FEWER", "1"))),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


@cases(3000)
@given(LINES)
def test_any_command_line(line: list[tuple[str, str, bool]]) -> None:
    argv = [word for flag, value, glued in line for word in ([f"{flag}={value}"] if glued else [flag, value])]
    # --help itself is the only way to end otherwise.
    if "-h" in argv or "--help" in argv:
        return
    with told():
        settings = parse(argv)
        plan = RunStage().plan(settings, ModelConfig.from_depth(min(settings.depth, 64)))
        rank_shares(settings, plan.total_batch_size, 3)
        for step in (0, plan.num_iterations // 2, plan.num_iterations - 1):
            assert all(math.isfinite(value) for value in dataclasses.astuple(StepSchedule.at(plan, step)))


@cases(1000)
@given(st.dictionaries(st.sampled_from(["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]), WORDS))
def test_any_environment(environ: dict[str, str]) -> None:
    with told():
        common.read_ranks(environ)
    # Without a valid port, no connection is tried.
    port = environ.get("MASTER_PORT", "")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536):
        with pytest.raises(UserError):
            comm.connect(Ranks(1, 0, 2), "cpu", 0.1, environ)
    with told():
        common.matmul_type("auto", {"NANOCHAT_DTYPE": environ.get("RANK", "")}, frozenset())
    with told():
        common.check_device(environ.get("RANK", ""))


FILES = (
    checkpoints.list_name(5, 0),
    checkpoints.meta_name(5),
    checkpoints.model_name(5),
    checkpoints.optimizer_name(5, 0),
)
MODEL = {"depth": 3}
LISTS = st.fixed_dictionaries(
    {"files": JSON | st.lists(st.dictionaries(st.sampled_from(["name", "bytes", "sha256"]), JSON))}
)
METAS = st.fixed_dictionaries(
    {"model_config": JSON | st.just(MODEL)},
    optional={
        "loop_state": JSON | st.dictionaries(st.sampled_from(["min_val_bpb", "smooth_train_loss", "total_training_time"]), JSON),
        "val_bpb": JSON,
        "dataloader_state_dict": JSON | st.dictionaries(st.sampled_from(["pq_idx", "rg_idx", "epoch"]), JSON),
    },
)  # fmt: skip
CONTENTS = (JSON | LISTS | METAS).map(lambda content: json.dumps(content).encode()) | BROKEN | st.binary(max_size=400)


@functools.cache
def whole_checkpoint() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        checkpoints.save(folder, 5, 0, {"state": {}}, {}, {"w": torch.ones(3)}, {"model_config": MODEL})
        return {name: (folder / name).read_bytes() for name in FILES}


@cases(1500)
@given(st.sampled_from(FILES), CONTENTS)
def test_any_file_of_a_checkpoint(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        for file, whole in (whole_checkpoint() | {name: content}).items():
            (folder / file).write_bytes(whole)
        assert checkpoints.whole_steps(folder) in ([], [5])
        for read in (
            checkpoints.load_model,
            take_meta,
            lambda folder, step: checkpoints.load_optimizer(folder, step, 0),
        ):
            with told(), restore.refusing_bad_content(folder, 5):
                read(folder, 5)
        checkpoints.prune(folder, 1, [6])
        checkpoints.set_aside(folder, checkpoints.steps_in(folder), print)
        assert checkpoints.steps_in(folder) == []


def take_meta(folder: Path, step: int) -> None:
    """Load a meta file as resuming does."""
    meta, progress = checkpoints.load_meta(folder, step), TrainingProgress()
    config = dataclasses.make_dataclass("Config", [("depth", int)])(3)
    restore.check_same_model(config, meta, folder, step)
    restore.restore_progress(progress, meta, step)
    assert isinstance(progress.smooth_loss, float)
    dataloader._checked({"epoch": 1, **meta["dataloader_state_dict"]}, 3, folder)


TOKENS = tokenizer.load(DATA / "tokenizer")
SHARDS = DATA / "base_data_climbmix"


@cases(200)
@given(
    st.fixed_dictionaries(
        {"rank": st.just(0) | JSON, "world": st.just(1) | JSON, "files": JSON | st.just(["shard_00000.parquet"])},
        optional={"cursor": JSON | st.lists(st.integers(-2, 4), min_size=4, max_size=4), "lengths": JSON, "tokens": JSON},
    ),
    st.booleans(),
)  # fmt: skip
def test_any_state_of_a_loader(state: dict[str, Any], tensors: bool) -> None:
    if tensors:
        state |= {"lengths": torch.tensor([3, -2]), "tokens": torch.tensor([1, 2])}
    files = [path.name for path in sorted(SHARDS.iterdir())][:-1]
    state["files"] = files if state["files"] == ["shard_00000.parquet"] else state["files"]
    with told(), restore.refusing_bad_content(SHARDS, 5):
        loader = dataloader.Loader(TOKENS, SHARDS, "train", 1, 16, 0, 1, None, state)
        loader.close()


@cases(400)
@given(st.binary(max_size=50) | BROKEN, JSON)
def test_any_metrics_file_is_appended_to(before: bytes, value: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "metrics-rank0.jsonl"
        path.write_bytes(before)
        metrics = Metrics(path)
        metrics.write("step", 3, value=value)
        metrics.close()
        data = path.read_bytes()
        assert data.startswith(before)
        assert json.loads(data.splitlines()[-1])["step"] == 3
