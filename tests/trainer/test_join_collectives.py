# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkout's gradients arrive by each way of exchange; the ranks take turns in this process."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.join.collectives import Collectives, in_blocks
from nanochat.parallel.comm import Comm

WORLD = 2
STEPS = 30


class Post:
    """A Comm that keeps messages in a dictionary until they are received."""

    world, phase = WORLD, "sync"
    letters: ClassVar[dict[tuple[int, int, int], Tensor]] = {}

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def send(self, tensor: Tensor, to: int, tag: int, what: str) -> Any:
        self.letters[self.rank, to, tag] = tensor.clone().flatten()
        return lambda: None

    def receive(self, buffer: Tensor, source: int, tag: int, what: str) -> Any:
        return lambda: buffer.view(-1).copy_(self.letters.pop((source, self.rank, tag)))

    def wait(self, *pending: Any) -> None:
        for take in pending:
            take()


def ranks_of(sync: str) -> list[Collectives]:
    return [Collectives(cast(Comm, Post(rank)), sync) for rank in range(WORLD)]


def gradients(step: int, *shape: int) -> list[Tensor]:
    """Each rank's gradients, with some blocks far smaller than others."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-4, 0, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return [torch.randn(*shape, generator=generator) * sizes for dummy in range(WORLD)]


def scattered(ranks: list[Collectives], each: list[Tensor]) -> Tensor:
    """The mean from reduce_scatter_tensor: the shares of all ranks concatenated."""
    outputs = [torch.empty(len(each[0]) // WORLD, *each[0].shape[1:]) for dummy in ranks]
    works = [
        rank.reduce_scatter_tensor(output, mine, op=dist.ReduceOp.AVG, async_op=True)
        for rank, output, mine in zip(ranks, outputs, each, strict=True)
    ]
    for work in works:
        assert work is not None
        work.get_future().wait()
    return torch.cat(outputs)


@pytest.mark.parametrize(("sync", "off"), [("exact", 0.0), ("bf16", 2**-8), ("int8", 2**-5)])
def test_the_mean_is_as_precise_as_the_method(sync: str, off: float) -> None:
    each = gradients(0, 8, 16, 64)
    wanted, found = sum(each) / WORLD, scattered(ranks_of(sync), each)
    assert ((found - wanted).abs().amax((1, 2)) <= off * wanted.abs().amax((1, 2))).all()


def test_rounding_errors_are_sent_with_the_next_step() -> None:
    ranks, wanted, found, worst = ranks_of("int8"), torch.zeros(8, 64), torch.zeros(8, 64), 0.0
    for step in range(STEPS):
        each = gradients(step, 8, 64)
        for rank in ranks:
            rank.start_step("optimizer")
        once = scattered(ranks, each)
        worst = max(worst, float((once - sum(each) / WORLD).abs().max()))
        wanted += sum(each) / WORLD
        found += once
        # A second matrix of the step has its own feedback.
        scattered(ranks, gradients(step + 1000, 8, 64))
    assert worst > 0
    # Without feedback, the errors of thirty steps would add up.
    assert float((found - wanted).abs().max()) <= 1.5 * worst


def test_all_ranks_receive_the_same_bits() -> None:
    for sync in ("exact", "bf16", "int8"):
        mine = gradients(7, WORLD * 3, 128)[0]
        parts, found = in_blocks(mine.flatten(), WORLD), [torch.zeros(mine.numel()) for dummy in range(WORLD)]
        works = [
            rank.share_out(part, in_blocks(into, WORLD))
            for rank, part, into in zip(ranks_of(sync), parts, found, strict=True)
        ]
        for work in works:
            work.wait()
        assert torch.equal(*found), sync
        assert torch.equal(found[0], mine.flatten()) is (sync == "exact")


def test_rows_too_short_for_a_scale_are_sent_in_16_bits() -> None:
    each = gradients(3, 8, 10)
    found = scattered(ranks_of("int8"), each)
    assert torch.equal(found, scattered(ranks_of("bf16"), each))
