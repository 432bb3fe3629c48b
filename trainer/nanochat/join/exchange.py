# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Exchanges of gradients and weights between joined ranks, after which all hold the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.wire import WIRES

FIRST_TAG, TAGS = 1000, 10000
WHAT = "the gradients and weights of a step"


class Exchange:
    """The exchanges of one rank, which all ranks make in the same order; sync: how gradients are sent."""

    def __init__(self, comm: Comm, sync: str) -> None:
        self.comm, self.dtype = comm, WIRES[sync].matrices.dtype
        self._tag = 0

    def scatter(self, shares: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send every rank its share of a gradient. The result, when called, is the mean of ours."""
        sent = [share.to(self.dtype).contiguous() for share in shares]
        arriving = [torch.empty_like(sent[self.comm.rank]) for dummy in shares]
        arriving[self.comm.rank] = sent[self.comm.rank]
        pending = self._start(sent, arriving)

        def mean() -> Tensor:
            self.comm.wait(*pending)
            total = torch.zeros(arriving[0].shape)
            for message in arriving:
                total += message
            return total.div_(self.comm.world)

        return mean

    def gather(self, mine: Tensor, into: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Callable[[], None]:
        """Send our tensor to every rank; the result, when called, has received all into `into`. Ours is rounded as the others' are."""
        messages = [torch.empty(one.shape, dtype=dtype) for one in into]
        messages[self.comm.rank] = mine.to(dtype).contiguous()
        pending = self._start([messages[self.comm.rank]] * self.comm.world, messages)

        def finish() -> None:
            self.comm.wait(*pending)
            for message, place in zip(messages, into, strict=True):
                place.copy_(message)

        return finish

    def from_all(self, mine: Tensor, sizes: Sequence[int] = ()) -> list[Tensor]:
        """Each rank's values, flat; sizes: how many, if not as many as ours."""
        parts = [torch.empty(size, dtype=mine.dtype) for size in sizes or [mine.numel()] * self.comm.world]
        self.gather(mine.flatten(), parts, mine.dtype)()
        return parts

    def average(self, gradients: Sequence[Tensor]) -> Callable[[], None]:
        """Average gradients in place: each rank sums one share of all. The result, when called, has finished that."""
        flat = torch.cat([torch.empty(0), *(gradient.flatten() for gradient in gradients)])
        shares = flat.tensor_split(self.comm.world)
        mean = self.scatter(shares)

        def finish() -> None:
            self.gather(mean(), shares, self.dtype)()
            for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

        return finish

    def average_rows(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients of embedding tables in place, of which each rank sends the rows that its tokens have touched."""
        touched = [gradient.ne(0).any(1).nonzero().flatten() for gradient in gradients]
        counts = [one.tolist() for one in self.from_all(torch.tensor([len(rows) for rows in touched]))]
        ids = self.from_all(torch.cat(touched), list(map(sum, counts)))
        sizes = [[n * gradient.size(1) for n, gradient in zip(one, gradients, strict=True)] for one in counts]
        rows = [gradient[one].to(self.dtype).flatten() for gradient, one in zip(gradients, touched, strict=True)]
        values = self.from_all(torch.cat(rows), list(map(sum, sizes)))
        for gradient, one in zip(gradients, touched, strict=True):
            gradient.index_fill_(0, one, 0)
        for count, size, places, parts in zip(counts, sizes, ids, values, strict=True):
            for gradient, at, part in zip(gradients, places.split(count), parts.split(size), strict=True):
                gradient.index_add_(0, at, part.view(len(at), -1).float(), alpha=1 / self.comm.world)

    def sum_small(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of small tensors over the ranks, in one piece."""
        sizes = [tensor.numel() for tensor in tensors]
        total = torch.zeros(sum(sizes))
        for part in self.from_all(torch.cat([tensor.detach().float().flatten() for tensor in tensors])):
            total += part
        return [one.view(tensor.shape) for one, tensor in zip(total.split(sizes), tensors, strict=True)]

    def _start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Pending]:
        """Start sending a tensor to each other rank, and receiving one from it."""
        comm, pending = self.comm, []
        self._tag = (self._tag + 1) % TAGS
        for rank in range(comm.world):
            if rank != comm.rank and incoming[rank].numel():
                pending.append(comm.receive(incoming[rank], rank, FIRST_TAG + self._tag, WHAT))
            if rank != comm.rank and outgoing[rank].numel():
                pending.append(comm.send(outgoing[rank], rank, FIRST_TAG + self._tag, WHAT))
        return pending
