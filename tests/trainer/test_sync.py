# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several ranks do the same as one rank on the same rows, and stay bit-identical to each other, with a whole or a shared head."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from torch import Tensor

from nanochat.kit.common import Ranks, UserError
from nanochat.model import gradients
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT
from nanochat.model.gradients import HEAD, MATMUL_TYPES
from nanochat.model.ops import IGNORED
from nanochat.model.optim import ALL_ROWS, LearningRates, Optimizer
from nanochat.parallel.agreement import digests, start_alike
from nanochat.parallel.comm import Comm, connect
from nanochat.parallel.shared_head import FIRST_TAG, SharedHead
from nanochat.parallel.sync import Notice, Sync, check_ids, make_sync, share_out
from nanochat.parallel.wire import WIRES
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.schedule import StepSchedule
from nanochat.rules.shares import part_bounds, passes_of
from nanochat.rules.ways import shared_bytes

HERE = "test_sync"
LENGTH, VOCABULARY, STEPS = 32, 300, 4


class Case(NamedTuple):
    """rows by rank (six in all); parts: of a shared head; micro: rows in a pass; chunk: bytes of its logits at a time."""

    mode: str
    rows: tuple[int, ...]
    parts: tuple[int, ...] = ()
    micro: int = 1
    chunk: int = 2**27
    steps: int = STEPS
    matmul: str = "fp32"


CASES = [
    Case("exact", (3, 3)),
    Case("exact", (2, 2, 2)),
    Case("exact", (1, 2, 3)),
    Case("bf16", (4, 2)),
    Case("bf16", (2, 2, 2)),
    Case("int8", (4, 2)),
    Case("int8", (2, 2, 2)),
    Case("int4", (4, 2)),
    Case("int4", (2, 2, 2)),
    Case("exact", (3, 3), (1, 1), micro=3, steps=50),
    Case("exact", (2, 4), (3, 1), micro=2, chunk=2**14),
    Case("exact", (6, 0), (1, 2)),
    Case("bf16", (3, 3), (1, 1), micro=3, matmul="bf16"),
    Case("exact", (2, 2, 2), (1, 1, 1), micro=2, chunk=2**14),
    Case("exact", (1, 2, 3), (1, 4, 2)),
    Case("bf16", (1, 4, 1), (2, 1, 1)),
    Case("int8", (4, 0, 2), (1, 1, 1), micro=2),
    Case("int4", (3, 3), (2, 1), micro=3),
]
# Maximum relative difference of weights and optimizer state from those of one rank, if messages are rounded. A shared head rounds
# hidden states, too.
ROUNDING = {"bf16": 0.15, "int8": 0.2, "int4": 0.4}
SHARED_ROUNDING = {"bf16": 0.25, "int8": 0.25, "int4": 0.4}


class Trained(NamedTuple):
    tensors: dict[str, Tensor]  # weights, Muon's state and the head's
    losses: list[float]
    head_bytes: int
    feedback: Mapping[str, Tensor]


def tiny_model() -> GPT:
    """Four layers: two have value embeddings, and no gradient is only rounding noise."""
    model = GPT(ModelConfig.from_depth(4, 16, 32, LENGTH, VOCABULARY))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def count_head_bytes(comm: Comm) -> list[int]:
    """Grows by the bytes of each message of a shared head."""
    sent, send = [0], comm.send

    def counted(tensor: Tensor, to: int, tag: int, what: str) -> Any:
        sent[0] += tensor.nbytes if tag >= FIRST_TAG else 0
        return send(tensor, to, tag, what)

    comm.send = counted  # type: ignore[method-assign]
    return sent


def train(comm: Comm, case: Case) -> Trained:
    """Some steps over rows that all ranks draw alike and share out, some of whose targets are to be ignored."""
    torch.set_num_threads(1)
    model, sent = tiny_model(), count_head_bytes(comm)
    each = passes_of(case.rows, case.micro, together=bool(case.parts))
    passes = [[rows * LENGTH for rows in one] for one in zip(*each, strict=True)] if case.parts else []
    head = None
    if case.parts:
        bounds = part_bounds(VOCABULARY, model.config.padded_vocab_size, case.parts)
        wire, dtype = WIRES[case.mode].hidden, MATMUL_TYPES[case.matmul]
        head = SharedHead(comm, model, bounds, passes, wire, dtype, case.chunk)
    with pytest.MonkeyPatch.context() as patch:
        # Seven blocks of the head, the last one of two rows: of three ranks one has none of them to sum.
        patch.setattr(gradients, "BLOCK_BYTES", 53 * 64 * 4)
        training = TrainingPass(model, case.matmul, head)
    optimizer = Optimizer(model, LearningRates(), case.matmul, head.rows if head else ALL_ROWS)
    sync = make_sync(case.mode, comm, training, optimizer, [rows * LENGTH for rows in case.rows])
    generator, losses = torch.Generator().manual_seed(5), []
    for step in range(case.steps):
        drawn = torch.randint(0, VOCABULARY, (sum(case.rows), LENGTH + 1), generator=generator)
        mine = drawn[sum(case.rows[: comm.rank]) :][: case.rows[comm.rank]]
        batches = [part for part in mine.split(each[comm.rank]) if len(part)]
        losses.append(train_step(sync, step, batches, len(passes), 1 / drawn[:, 1:].numel()))
    return finished(sync, losses, sent[0])


def train_step(sync: Sync, step: int, batches: list[Tensor], passes: int, scale: float) -> float:
    notice = Notice(stop=step == 2 and sync.comm.rank == sync.comm.world - 1)
    sync.offer_ids([part[:, :-1] for part in batches], notice)
    token_ids, stop = sync.take_ids()
    assert stop == (step == 2)
    sync.optimizer.prepare(token_ids)
    sync.training.start_step(token_ids)
    sync.start_step(token_ids)
    loss = torch.zeros(())
    for number, part in enumerate(batches, start=1):
        ids, targets = part[:, :-1].contiguous(), part[:, 1:].clone()
        targets[:, 3] = IGNORED
        on_ready = sync.on_ready if number == len(batches) else None
        loss += sync.training.forward_backward(ids, targets, scale, on_ready)
    for dummy in range(len(batches), passes):
        sync.join_pass(scale)
    return sync.step(loss, StepSchedule(0.5, 0.9, 0.01))


def finished(sync: Sync, losses: list[float], sent: int) -> Trained:
    sync.optimizer.catch_up()
    if sync.head is not None:
        sync.head.gather()
    state = sync.whole_state()
    states = {**state["muon"], HEAD: state["adamw"][HEAD]}
    parts = {f"{name} {part}": tensor for name, one in states.items() for part, tensor in one.items()}
    weights = {name: p.detach() for name, p in sync.training.model.named_parameters()}
    return Trained({**weights, **parts}, losses, sent, sync.feedback)


def train_and_print(comm: Comm, numbers: list[int], folder: str) -> None:
    """One case after the other, since starting ranks takes longer than their training."""
    send = comm.send
    for number in numbers:
        comm.send = send  # type: ignore[method-assign]
        trained = train(comm, CASES[number])
        if comm.rank == 0:
            torch.save(trained.tensors, Path(folder) / f"{number}.pt")
        same = {"losses": trained.losses, "digests": digests(trained.tensors)}
        kept = [len(trained.feedback), [name for name, values in trained.feedback.items() if not values.any()]]
        if HEAD in trained.feedback:
            kept.append(bool(trained.feedback[HEAD][:VOCABULARY].any(1).all()))
        print(json.dumps([same, trained.head_bytes, kept]))


@functools.cache
def alone(steps: int, matmul: str) -> Trained:
    """One rank, with a whole head."""
    return train(connect(Ranks(0, 0, 1), "cpu", 5.0, {}), Case("exact", (6,), steps=steps, matmul=matmul))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Rank 0's weights of every case in the folder, and each rank's output."""
    folder, printed = tmp_path_factory.mktemp("trained"), {}
    for world in (2, 3):
        numbers = [number for number, case in enumerate(CASES) if len(case.rows) == world]
        outs = ranks.passed(ranks.call(HERE, "train_and_print", world, numbers, str(folder)))
        for number, *lines in zip(numbers, *(out.splitlines() for out in outs), strict=True):
            printed[number] = [json.loads(line) for line in lines]
    return folder, [printed[number] for number in range(len(CASES))]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_field_21_ranks_train_one_model(number: int, told: tuple[Path, list[Any]]) -> None:
    case, lines = CASES[number], told[1][number]
    assert len(lines) == len(case.rows)
    assert all(line[0] == lines[0][0] for line in lines)
    whole, losses = alone(case.steps, case.matmul), lines[0][0]["losses"]
    found = torch.load(told[0] / f"{number}.pt", weights_only=True)
    assert found.keys() == whole.tensors.keys()
    # Rounded operands are amplified within few steps at such learning rates: only the first loss is nearly the same.
    if case.matmul == "bf16":
        assert losses[0] == pytest.approx(whole.losses[0], abs=5e-3)
        assert losses == pytest.approx(whole.losses, abs=0.1)
        return
    loose = (SHARED_ROUNDING if case.parts else ROUNDING).get(case.mode)
    assert losses[0] == pytest.approx(whole.losses[0], abs=5e-3 if loose else 1e-5)
    assert losses == pytest.approx(whole.losses, abs=(3e-2 if case.parts else loose / 20) if loose else 1e-5)
    many = case.steps > STEPS
    for name, expected in whole.tensors.items():
        error = float((found[name] - expected).norm() / expected.norm().clamp_min(1e-9))
        # AdamW amplifies rounding errors of a gradient near zero, as a single number's can be.
        if expected.numel() > 100 or not (loose or many):
            assert error < (loose or (2e-3 if many else 1e-4)), name


@pytest.mark.parametrize("number", [number for number, case in enumerate(CASES) if case.parts])
def test_the_count_of_a_shared_heads_bytes_is_what_is_sent(number: int, told: tuple[Path, list[Any]]) -> None:
    case, width = CASES[number], tiny_model().config.n_embd
    tokens, wire = [rows * LENGTH for rows in case.rows], WIRES[case.mode].hidden
    element = wire.length(1, width) * wire.dtype.itemsize / width
    for rank, line in enumerate(told[1][number]):
        assert line[1] == shared_bytes(tokens, width, rank, element) * case.steps


@pytest.mark.parametrize("number", [n for n, case in enumerate(CASES) if case.mode == "int8" and not case.parts])
def test_every_rank_keeps_what_rounding_left_of_gradients_and_updates(
    number: int, told: tuple[Path, list[Any]]
) -> None:
    """Of every gradient that it sends, and of every update that it computes."""
    for *dummy, (count, empty, whole_head) in told[1][number]:
        # Of three ranks each sends its own gradient of some rows of the head, and of the others the sum.
        assert count > 20 and empty == [] and whole_head


def begin(comm: Comm) -> None:
    weights = {"a": torch.full((5,), float(comm.rank)), "b": torch.ones(3)}
    assert start_alike(comm, weights) == ["a"]
    assert not weights["a"].any() and bool(weights["b"].all())


def test_ranks_begin_with_the_weights_of_the_first() -> None:
    ranks.passed(ranks.call(HERE, "begin", 2))


def test_a_rank_alone_tells_when_it_updates() -> None:
    told: list[tuple[str, int]] = []
    comm = Comm(Ranks(0, 0, 1), 5.0, on_phase=lambda phase, step, collective: told.append((phase, step)))
    train(comm, Case("exact", (1,)))
    assert told == [("optimizer", 0)] * STEPS


def test_matrices_are_shared_out_as_fast_as_the_ranks_are() -> None:
    shapes = {f"m{n}": torch.Size((64, 64)) for n in range(12)}
    owners = list(share_out(shapes, [2, 1]).values())
    assert (owners.count(0), owners.count(1)) == (8, 4)
    assert set(share_out(shapes, [1] * 5).values()) == set(range(5))
    assert share_out({"one": torch.Size((4, 4))}, [1, 1, 1]) == {"one": 0}


@pytest.mark.parametrize("ids", [[-1, 3], [3, 300], [2**31 - 1], [-(2**31)]])
def test_token_ids_without_a_row_are_refused(ids: list[int]) -> None:
    check_ids(torch.tensor([0, 299], dtype=torch.int32), 300, 1)
    check_ids(torch.empty(0, dtype=torch.int32), 300, 1)
    with pytest.raises(UserError, match=r"rank 1 has token ids between .*, but the tables have 300 rows") as caught:
        check_ids(torch.tensor(ids, dtype=torch.int32), 300, 1)
    assert caught.value.blames == [1]
