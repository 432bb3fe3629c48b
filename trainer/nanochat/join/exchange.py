# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Exchanges of gradients and weights between joined ranks, after which all hold the same bits.

Gradients are sent as a --sync method says; a packed one's rounding errors are added to what is sent from the same place in the
next step. They are not saved: a resumed run starts without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.wire import FLOAT32, WIRES, Plain, Wire
from nanochat.rules.ways import BLOCK, LEAST_BLOCK

FIRST_TAG, TAGS = 1000, 10000
WHAT = "the gradients and weights of a step"


class Exchange:
    """The exchanges of one rank, which all ranks make in the same order."""

    def __init__(self, comm: Comm, sync: str) -> None:
        self.comm = comm
        self.wire, self.row_wire = WIRES[sync][:2]
        self._tag = self._place = 0
        self._errors: dict[int, Tensor] = {}  # rounding errors, by place in a step

    def begin_step(self) -> None:
        self._place = 0

    def scatter(self, shares: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send every rank its share of a gradient, all matrices of the same width. The result, when called, is the mean of ours."""
        wire = self._wire_of(shares[0])
        written = [self._written(share, wire) for share in shares]
        mine = shares[self.comm.rank]
        arriving = [torch.empty(wire.length(*mine.shape), dtype=wire.dtype) for dummy in shares]
        arriving[self.comm.rank] = written[self.comm.rank]
        pending = self._start(written, arriving)

        def mean() -> Tensor:
            self.comm.wait(*pending)
            total = torch.zeros(mine.shape)
            for message in arriving:
                wire.add(message, total)
            return total.div_(self.comm.world)

        return mean

    def gather(self, mine: Tensor, into: Sequence[Tensor], exact: bool = False) -> Callable[[], None]:
        """Send our matrix to every rank; the result, when called, has received all into `into`. Ours is rounded as the others' are."""
        wire = FLOAT32 if exact else self._wire_of(mine)
        messages = [torch.empty(wire.length(*one.shape), dtype=wire.dtype) for one in into]
        messages[self.comm.rank] = written = self._written(mine, wire)
        pending = self._start([written] * self.comm.world, messages)

        def finish() -> None:
            self.comm.wait(*pending)
            for message, place in zip(messages, into, strict=True):
                wire.read(message, place)

        return finish

    def from_all(self, mine: Tensor, sizes: Sequence[int] = ()) -> list[Tensor]:
        """Each rank's values, flat; sizes: how many, if not as many as ours."""
        mine = mine.flatten()
        parts = [torch.empty(size, dtype=mine.dtype) for size in sizes or [len(mine)] * self.comm.world]
        parts[self.comm.rank] = mine
        self.comm.wait(*self._start([mine] * self.comm.world, parts))
        return parts

    def average(self, gradients: Sequence[Tensor]) -> Callable[[], None]:
        """Average large gradients in place: each rank sums one share of each. The result, when called, has finished that."""
        flats, means = [], []
        for gradient in gradients:
            unit = BLOCK * self.comm.world
            flat = torch.zeros(-(-gradient.numel() // unit) * unit)
            flat[: gradient.numel()] = gradient.flatten()
            flats.append(flat.view(self.comm.world, -1, BLOCK))
            means.append(self.scatter(flats[-1].unbind()))

        def finish() -> None:
            finishes = [self.gather(mean(), flat.unbind()) for mean, flat in zip(means, flats, strict=True)]
            for gradient, flat, receive in zip(gradients, flats, finishes, strict=True):
                receive()
                gradient.copy_(flat.flatten()[: gradient.numel()].view_as(gradient))

        return finish

    def average_rows(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients of embedding tables in place, of which each rank sends the rows that its tokens have touched."""
        world, wire = self.comm.world, self.row_wire.dtype
        touched = [gradient.ne(0).any(1).nonzero().flatten() for gradient in gradients]
        counts = [one.tolist() for one in self.from_all(torch.tensor([len(rows) for rows in touched]))]
        widths = [gradient.size(1) for gradient in gradients]
        ids = self.from_all(torch.cat(touched), [sum(one) for one in counts])
        rows = torch.cat([gradient[one].to(wire).flatten() for gradient, one in zip(gradients, touched, strict=True)])
        sizes = [[count * width for count, width in zip(one, widths, strict=True)] for one in counts]
        values = [
            part.split(size) for part, size in zip(self.from_all(rows, list(map(sum, sizes))), sizes, strict=True)
        ]
        places = [part.split(one) for part, one in zip(ids, counts, strict=True)]
        for n, gradient in enumerate(gradients):
            union = torch.unique(torch.cat([places[rank][n] for rank in range(world)]))
            total = torch.zeros(len(union), widths[n])
            for rank in range(world):
                part = values[rank][n].view(-1, widths[n]).float()
                total.index_add_(0, torch.searchsorted(union, places[rank][n]), part)
            gradient.index_copy_(0, union, total.div_(world))

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

    def _wire_of(self, matrix: Tensor) -> Wire:
        """The method's wire, or the one for rows if too few values would share a scale."""
        return self.wire if isinstance(self.wire, Plain) or not matrix.size(1) % LEAST_BLOCK else self.row_wire

    def _written(self, values: Tensor, wire: Wire) -> Tensor:
        """The message for a matrix."""
        self._place += 1
        values = values.detach().contiguous()
        if wire.exact:
            return values
        message = torch.empty(wire.length(*values.shape), dtype=wire.dtype)
        if not isinstance(wire, Plain) and self._place not in self._errors:
            self._errors[self._place] = torch.zeros_like(values)
        wire.write(values, message, self._errors.get(self._place))
        return message
