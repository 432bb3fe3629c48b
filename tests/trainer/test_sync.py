# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several ranks do the same as one rank on the same rows, and stay bit-identical to each other."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor

from nanochat.kit.common import Ranks
from nanochat.model import gradients
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT, ModelConfig
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.parallel.agreement import check_identical, digests, start_alike
from nanochat.parallel.comm import Comm, connect
from nanochat.parallel.sync import Notice, make_sync, share_out
from nanochat.parallel.wire import block
from nanochat.rules.schedule import StepSchedule

HERE = "test_sync"
LENGTH, VOCABULARY, STEPS = 32, 300, 4


def tiny_model() -> GPT:
    """Four layers: two have value embeddings, and no gradient is only rounding noise."""
    model = GPT(ModelConfig.from_depth(4, 16, 32, LENGTH, VOCABULARY))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def train(
    comm: Comm, mode: str, rows: list[int], left: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Some steps over rows that all ranks draw alike and share out; weights, losses and Muon's whole state.

    left: takes the error feedback of this rank.
    """
    torch.set_num_threads(1)
    model = tiny_model()
    with pytest.MonkeyPatch.context() as patch:
        # Seven blocks of the head, the last one of two rows: of three ranks one has none of them to sum.
        patch.setattr(gradients, "BLOCK_BYTES", 53 * 64 * 4)
        training, optimizer = TrainingPass(model), Optimizer(model, LearningRates())
    shares = rows if comm.world > 1 else [sum(rows)]
    tokens = [share * LENGTH for share in shares]
    sync = make_sync(mode, comm, training, optimizer, tokens)
    generator, losses = torch.Generator().manual_seed(5), []
    for step in range(STEPS):
        drawn = torch.randint(0, VOCABULARY, (sum(rows), LENGTH + 1), generator=generator)
        mine = drawn[sum(shares[: comm.rank]) :][: shares[comm.rank]]
        sync.offer_ids([mine[:, :-1]], Notice(stop=step == 2 and comm.rank == comm.world - 1))
        token_ids, stop = sync.take_ids()
        assert stop == (step == 2)
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        loss = torch.zeros(())
        for number, row in enumerate(mine.split(1), start=1):
            on_ready = sync.on_ready if number == len(mine) else None
            loss += training.forward_backward(
                row[:, :-1].contiguous(), row[:, 1:].contiguous(), 1 / (sum(rows) * LENGTH), on_ready
            )
        losses.append(sync.step(loss, StepSchedule(0.5, 0.9, 0.01)))
    optimizer.catch_up()
    if left is not None:
        left.update(sync.feedback)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    muon = {f"{n} {part}": t for n, state in sync.whole_state()["muon"].items() for part, t in state.items()}
    return weights, losses, muon


def train_and_print(comm: Comm, numbers: list[int], folder: str) -> None:
    """One case after the other, since starting ranks takes longer than their training."""
    for mode, rows in (CASES[number] for number in numbers):
        comm.take_counters()
        weights, losses, muon = train(comm, mode, rows)
        if comm.rank == 0:
            torch.save({"weights": weights, "muon": muon}, Path(folder) / f"{mode}{rows}.pt")
        told = {"losses": losses, "weights": digests(weights), "muon": digests(muon)}
        print(json.dumps({"alike": told, "bytes": comm.take_counters()[1]}))


@functools.cache
def alone(rows: int) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    return train(connect(Ranks(0, 0, 1), "cpu", 5.0, {}), "exact", [rows])


CASES = [
    ("exact", [3, 3]),
    ("exact", [2, 2, 2]),
    ("exact", [1, 2, 3]),
    ("bf16", [4, 2]),
    ("bf16", [2, 2, 2]),
    ("int8", [4, 2]),
    ("int8", [2, 2, 2]),
    ("int4", [4, 2]),
    ("int4", [2, 2, 2]),
]
# Maximum relative difference of weights and Muon's state from those of one rank, if messages are rounded.
ROUNDING = {"bf16": 0.1, "int8": 0.2, "int4": 0.4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Every case: rank 0's weights in the folder, and each rank's output."""
    folder = tmp_path_factory.mktemp("trained")
    printed = ranks.call_cases(HERE, "train_and_print", [len(rows) for mode, rows in CASES], str(folder))
    return folder, dict(zip(map(str, CASES), printed, strict=True))


@pytest.mark.parametrize(("mode", "rows"), CASES)
def test_field_21_ranks_train_one_model(mode: str, rows: list[int], trained: tuple[Path, dict[str, list[Any]]]) -> None:
    told = [one["alike"] for one in trained[1][str((mode, rows))]]
    assert len(told) == len(rows)
    assert all(one == told[0] for one in told)
    weights, losses, muon = alone(sum(rows))
    found = torch.load(trained[0] / f"{mode}{rows}.pt", weights_only=True)
    loose = ROUNDING.get(mode)
    assert told[0]["losses"] == pytest.approx(losses, rel=loose / 100 if loose else 1e-6)
    assert found["muon"].keys() == muon.keys()
    for name, expected in {**weights, **muon}.items():
        got = {**found["weights"], **found["muon"]}[name]
        error = float((got - expected).norm() / expected.norm().clamp_min(1e-9))
        # AdamW amplifies rounding errors of a gradient near zero, as a single number's can be.
        if not loose or expected.numel() > 100:
            assert error < (loose or 1e-4), name


def feedback_by_hand(comm: Comm) -> None:
    """Keep the rounding errors of every gradient that this rank sends, and of every update that it computes."""
    left: dict[str, Tensor] = {}
    train(comm, "int8", [2] * comm.world, left)
    assert gradients.HEAD in left and len(left) > 20
    assert [name for name, values in left.items() if not values.any()] == []
    # Of three ranks each sends its own gradient of some rows, and of the others the sum.
    assert bool(left[gradients.HEAD][:VOCABULARY].any(1).all())


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_keeps_what_rounding_left_of_gradients_and_updates(world: int) -> None:
    ranks.passed(ranks.call(HERE, "feedback_by_hand", world))


def begin(comm: Comm) -> None:
    weights = {"a": torch.full((5,), float(comm.rank)), "b": torch.ones(3)}
    assert start_alike(comm, weights) == ["a"]
    assert not weights["a"].any() and bool(weights["b"].all())


def test_ranks_begin_with_the_weights_of_the_first() -> None:
    ranks.passed(ranks.call(HERE, "begin", 2))


@pytest.mark.parametrize(("mode", "bits"), [("int8", 8), ("int4", 4)])
def test_packed_matrices_are_a_byte_or_half_of_one_a_value(
    mode: str, bits: int, trained: tuple[Path, dict[str, list[Any]]]
) -> None:
    told = trained[1]
    fewer = [
        a["bytes"] - b["bytes"] for a, b in zip(told[str(("bf16", [4, 2]))], told[str((mode, [4, 2]))], strict=True)
    ]
    model = tiny_model()
    dense = [p for name, p in model.named_parameters() if name == gradients.HEAD or name.startswith("transformer.h.")]
    # Each of two ranks sends every matrix once, as gradient or update, and the head; a scale takes two bytes.
    scales = sum(p.numel() // block(p.size(1)) for p in dense)
    saved = sum(p.numel() * (16 - bits) // 8 for p in dense) - 2 * scales
    rest = [sent - STEPS * saved for sent in fewer]
    # int4 takes a byte for each value of an embedding row, too.
    tables = [p for name, p in model.named_parameters() if gradients.is_table(name)]
    row = sum(p.size(1) - 2 * (p.size(1) // block(p.size(1))) for p in tables)
    assert [count % row for count in rest] == [0, 0]
    assert all(rest) if mode == "int4" else not any(rest)


def test_a_rank_alone_tells_when_it_updates() -> None:
    told: list[tuple[str, int]] = []
    train(Comm(Ranks(0, 0, 1), 5.0, on_phase=lambda phase, step, collective: told.append((phase, step))), "exact", [1])
    assert told == [("optimizer", 0)] * STEPS


def drift(comm: Comm) -> None:
    weights = {"a": torch.ones(5), "b": torch.ones(3), "c": torch.ones(2)}
    check_identical(comm, weights, "at the start")
    if comm.rank == 1:
        weights["b"][1] += 1e-7
        weights["c"][0] += 1
    check_identical(comm, weights, "at step 7")


def test_field_21_the_first_tensor_that_differs_is_named() -> None:
    for result in ranks.call(HERE, "drift", 2):
        assert result.code == 2
        assert "different weights at step 7; the first tensor that differs is b" in result.err


def test_matrices_are_shared_out_as_fast_as_the_ranks_are() -> None:
    shapes = {f"m{n}": torch.Size((64, 64)) for n in range(12)}
    owners = list(share_out(shapes, [2, 1]).values())
    assert (owners.count(0), owners.count(1)) == (8, 4)
    assert set(share_out(shapes, [1] * 5).values()) == set(range(5))
    assert share_out({"one": torch.Size((4, 4))}, [1, 1, 1]) == {"one": 0}
