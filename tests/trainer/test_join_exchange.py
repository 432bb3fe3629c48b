# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How precisely a checkout's gradients arrive; the ranks take turns in this process."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nanochat.join.exchange import Exchange
from nanochat.parallel.comm import Comm

WORLD, STEPS = 2, 30


class Post:
    """A Comm that keeps messages in a dictionary until they are received."""

    world = WORLD
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


def ranks_of(sync: str) -> list[Exchange]:
    return [Exchange(cast(Comm, Post(rank)), sync) for rank in range(WORLD)]


def gradients(step: int, *shape: int) -> list[Tensor]:
    """Each rank's gradients, with some rows far smaller than others."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-4, 0, shape[0]).view(-1, 1)
    return [torch.randn(*shape, generator=generator) * sizes for dummy in range(WORLD)]


def scattered(ranks: list[Exchange], each: list[Tensor]) -> Tensor:
    means = [rank.scatter(mine.chunk(WORLD)) for rank, mine in zip(ranks, each, strict=True)]
    return torch.cat([mean() for mean in means])


def test_rounding_errors_are_sent_with_the_next_step() -> None:
    ranks, wanted, found, worst = ranks_of("int8"), torch.zeros(8, 64), torch.zeros(8, 64), 0.0
    for step in range(STEPS):
        each = gradients(step, 8, 64)
        for rank in ranks:
            rank.begin_step()
        once = scattered(ranks, each)
        worst = max(worst, float((once - sum(each) / WORLD).abs().max()))
        wanted += sum(each) / WORLD
        found += once
        # A second matrix of the step has errors of its own.
        scattered(ranks, gradients(step + 1000, 8, 64))
    assert worst > 0
    # Otherwise the errors of thirty steps would add up.
    assert float((found - wanted).abs().max()) <= 1.5 * worst


def test_rows_that_no_token_has_touched_are_not_sent() -> None:
    class Counting(Post):
        sent = 0

        def send(self, tensor: Tensor, to: int, tag: int, what: str) -> Any:
            self.sent += tensor.numel()

    table = torch.zeros(1000, 8)
    table[[3, 7]] = 1.0
    one = Exchange(cast(Comm, Counting(0)), "exact")
    one.comm.receive = lambda buffer, *dummy: lambda: buffer.fill_(2)  # type: ignore[method-assign,assignment,return-value]
    one.comm.wait = lambda *pending: [take() for take in pending if take]  # type: ignore[method-assign,assignment,func-returns-value]
    one.average_rows([table])
    assert one.comm.sent == 1 + 2 + 2 * 8  # type: ignore[attr-defined]
