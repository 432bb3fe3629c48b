# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Exchanges of gradients and weights between joined ranks, after which all hold the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.parallel.comm import Comm
from nanochat.parallel.wire import WIRES

WHAT = "the gradients and weights of a step"
Arriving = Callable[[], list[Tensor]]


class Exchange:
    """The exchanges of flat tensors of one rank, which all ranks make in the same order; sync: how gradients are sent."""

    def __init__(self, comm: Comm, sync: str) -> None:
        self.comm, self.dtype = comm, WIRES[sync].matrices.dtype

    def start(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> Arriving:
        """Send one tensor to each rank; the result, when called, has those of these sizes that the ranks sent us."""
        comm, counts, sent = self.comm, list(map(len, outgoing)), torch.cat(list(outgoing))
        arriving = sent.new_empty(sum(sizes)) if comm.world > 1 else sent
        pending = comm.launch(WHAT, lambda: dist.all_to_all_single(arriving, sent, list(sizes), counts, async_op=True))
        comm.bytes_sent += (len(sent) - counts[comm.rank]) * sent.itemsize

        def finish() -> list[Tensor]:
            comm.wait(pending)
            return list(arriving.split(list(sizes)))

        return finish

    def from_all(self, mine: Tensor, sizes: Sequence[int] = ()) -> Arriving:
        """Send our tensor to every rank; the result, when called, has each rank's. sizes: how long they are, if not as ours."""
        return self.start([mine] * self.comm.world, sizes or [len(mine)] * self.comm.world)

    def mean(self, shares: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send every rank its share of the gradients; the result, when called, is the mean of ours."""
        mine = len(shares[self.comm.rank])
        arriving = self.start([share.to(self.dtype) for share in shares], [mine] * self.comm.world)

        def finish() -> Tensor:
            total = torch.zeros(mine)
            for part in arriving():
                total += part
            return total.div_(self.comm.world)

        return finish

    def average_rows(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients of embedding tables in place, of which each rank sends the rows that its tokens have touched."""
        touched = [gradient.ne(0).any(1).nonzero().flatten() for gradient in gradients]
        counts = self.from_all(torch.tensor([len(rows) for rows in touched], dtype=torch.int64))()
        arriving = []
        for gradient, rows, each in zip(gradients, touched, torch.stack(counts, 1).tolist(), strict=True):
            values = gradient[rows].to(self.dtype).flatten()
            ids = self.from_all(rows, each)
            arriving.append((ids, self.from_all(values, [count * gradient.size(1) for count in each])))
        for gradient, rows, (ids, sent) in zip(gradients, touched, arriving, strict=True):
            gradient.index_fill_(0, rows, 0)
            for at, part in zip(ids(), sent(), strict=True):
                values = part.view(len(at), gradient.size(1)).to(gradient.dtype)
                gradient.index_add_(0, at, values, alpha=1 / self.comm.world)
