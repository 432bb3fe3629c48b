# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bits per byte: of the same tokens, and so the same figure, however many ranks share them out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import ranks
import torch
from test_chat_sft import Chat
from test_faults import ready
from torch import Tensor

from nanochat.kit.settings import parse_chat
from nanochat.parallel.comm import Comm
from nanochat.run import loop as training
from nanochat.run.fine_tuning import FineTuning
from nanochat.run.stage import RunStage, bits_per_byte, deal_out, nats_and_bytes
from nanochat.run.state import Run

HERE = "test_loss_eval"


def even(ids: Tensor, targets: Tensor) -> Tensor:
    """The losses of a model that gives every token the same probability."""
    return torch.full(targets.shape, math.log(512))


def test_bits_per_byte_leaves_out_special_tokens_and_gaps() -> None:
    sizes = torch.zeros(512, dtype=torch.int32)
    sizes[:503] = torch.arange(503) % 4 + 1
    targets = torch.tensor([[0, 1, 2], [503, -1, 3]])
    counted, size = 4, 1 + 2 + 3 + 4
    found = bits_per_byte(nats_and_bytes(even, [(targets, targets)] * 3, sizes))
    assert found == pytest.approx(9 * counted / size)
    assert bits_per_byte(nats_and_bytes(even, [], sizes)) == math.inf


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("batches", [1, 5, 6])
def test_every_row_is_dealt_out_once_and_in_equal_parts(world: int, batches: int) -> None:
    whole = [(torch.tensor([[2 * n], [2 * n + 1]]), torch.tensor([[-2 * n], [-2 * n - 1]])) for n in range(batches)]
    dealt = [list(deal_out(whole, rank, world)) for rank in range(world)]
    assert sorted(int(row) for one in dealt for ids, dummy in one for row in ids) == list(range(2 * batches))
    assert all(torch.equal(ids, -targets) for one in dealt for ids, targets in one)
    assert {sum(len(ids) for ids, dummy in one) for one in dealt} <= {2 * batches // world, -(-2 * batches // world)}
    assert all(len(ids) <= 2 for one in dealt for ids, dummy in one)


def fixed(run: Run) -> Run:
    """Replace the weights by fixed ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for dummy, weight in sorted(run.weights.items()):
            weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    return run


def evaluated(comm: Comm, folder: str) -> None:
    """Evaluate five batches of two rows, which two and three ranks cannot share evenly, and then conversations."""
    run = fixed(ready(comm, folder, "--eval-tokens", str(5 * 2 * 64)))
    told = []
    for stage in (run.stage, FineTuning(parse_chat(Chat(Path(folder), comm.world).argv([])[2:], lambda *dummy: {}))):
        run.stage = stage
        assert training.evaluate(run) is False
        told.append(run.progress.val_bpb)
    run.settings = dataclasses.replace(run.settings, eval_tokens=1)
    with RunStage().evaluation(run) as (dummy, number):
        assert number == 1
    print(json.dumps(told))


# As evaluated by one rank on upstream's rows (golden/loader.json).
GOLDEN = (2.6350925859, 8.5609157933)


@pytest.mark.parametrize("world", [1, 3])
def test_an_evaluation_gives_the_same_figure_for_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    outs = ranks.passed(ranks.call(HERE, "evaluated", world, str(tmp_path)))
    assert [ranks.last_json(out) for out in outs] == [[pytest.approx(one, rel=1e-6) for one in GOLDEN]] * world


def asked_to_stop(comm: Comm, folder: str) -> None:
    """The last rank is asked to stop in its second batch, long before the others would be done."""
    training.LOOK_SECONDS = 0.0
    run = ready(comm, folder, "--eval-tokens", str(10**8))
    evaluating = run.journal.heartbeat.evaluating

    def count(number: int, of: int | None) -> None:
        evaluating(number, of)
        run.stop_asked = comm.rank == comm.world - 1 and number > 1

    run.journal.heartbeat.evaluating = count  # type: ignore[method-assign, assignment]
    assert training.evaluate(run) is True
    assert run.progress.val_bpb is None


def test_an_evaluation_ends_early_if_any_rank_is_asked_to_stop(tmp_path: Path) -> None:
    outs = ranks.passed(ranks.call(HERE, "asked_to_stop", 2, str(tmp_path)))
    assert "Evaluation interrupted" in outs[0]
