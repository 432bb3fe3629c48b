# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Updates the dense weights when separately training ranks meet: one step along their mean change.

    dense = DenseMeeting(comm, parameters, weights, wire, outer)
    dense.start()               # before the first separate step: from here on changes count
    dense.send()                # send this rank's change
    dense.take()                # receive the mean; the weights are the same on all ranks

or, if the ranks continue training during the transfer:

    dense.send()
    dense.reduce()              # some steps later: sum our part and send its mean
    dense.land()                # some more later: move the weights by the mean minus this rank's own change

Each rank sums a part of all weights, in float32 and in rank order, and sends its mean to all; everybody
continues from the mean as sent. The sender keeps the rounding error of a packed change or mean and adds it to
the next one, damped: the weights move far between meetings, so old errors lose their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.sync import SMALL
from nanochat.parallel.wire import Wire
from nanochat.rules.ways import BLOCK

SMALL_TAG, FIRST_TAG = 4, 10
# Elements summed together: each arriving piece shows that a rank makes progress.
PIECE = 2**20
# Fraction of the error feedback kept from one meeting to the next.
KEPT = 0.9


class Part(NamedTuple):
    """A piece of a rank's change that this rank sums, or of the mean from another rank."""

    rank: int
    number: int
    message: Tensor
    pending: Pending


class DenseMeeting:
    """The dense weights in one piece, the matrices first, in rows of a common width."""

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[str, Tensor],
        weights: Sequence[float],
        wire: Wire,
        outer: tuple[float, float],
    ) -> None:
        """weights: of the ranks in the mean; outer: rate and momentum."""
        self.comm, self.weights, self.wire, self.outer = comm, weights, wire, outer
        self.others = [rank for rank in range(comm.world) if rank != comm.rank]
        large = [p for p in parameters.values() if p.dim() == 2 and p.numel() >= SMALL]
        small = [p for p in parameters.values() if p.dim() != 2 or p.numel() < SMALL]
        self.parameters = [*large, *small]
        self.size = sum(p.numel() for p in large)
        self.width = math.gcd(BLOCK, *(p.size(1) for p in large))
        total = self.size + sum(p.numel() for p in small)
        self.anchor, self.change, self.momentum = torch.empty(total), torch.empty(total), torch.zeros(self.size)
        self.pieces = -(-self.size // (PIECE * comm.world))  # of the part that a rank sums
        rows, parts = self.size // self.width, self.pieces * comm.world
        self._bounds = [rows * part // parts * self.width for part in range(parts + 1)]
        # Rounding errors of this rank's change, and of the mean of its part.
        self.feedback: dict[str, Tensor] = {}
        if not wire.dtype.is_floating_point:
            own = self._bounds[self.pieces * (comm.rank + 1)] - self._bounds[self.pieces * comm.rank]
            self.feedback = {"change": torch.zeros(self.size), "mean": torch.zeros(own)}
        self._mean_change: Tensor | None = None  # this rank's part, once summed
        self._coming: list[Part] = []
        self._own: list[Tensor] = []
        self._arriving: list[list[Part]] = []
        self._small: list[tuple[Pending | None, Tensor]] = []
        self._leaving: list[tuple[Pending, Tensor]] = []

    def start(self) -> None:
        """Start counting changes from these weights, the same on all ranks."""
        self._gather(self.anchor)

    def _gather(self, into: Tensor) -> None:
        torch.cat([p.flatten() for p in self.parameters], out=into)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its slice of the whole."""
        values = flat.split([p.numel() for p in self.parameters])
        return ((p, part.view_as(p)) for p, part in zip(self.parameters, values, strict=True))

    def _piece(self, flat: Tensor, rank: int, number: int) -> Tensor:
        """One piece of a rank's part, in rows."""
        part = rank * self.pieces + number
        return flat[self._bounds[part] : self._bounds[part + 1]].view(-1, self.width)

    def _written(self, values: Tensor, feedback: Tensor | None) -> Tensor:
        """The values as sent."""
        if self.wire.exact:
            return values.view(-1)
        message = torch.empty(self.wire.length(*values.shape), dtype=self.wire.dtype)
        self.wire.write(values, message, feedback.mul_(KEPT) if feedback is not None else None)
        return message

    def _expect(self, rank: int, number: int, shape: torch.Size, tag: int, what: str) -> Part:
        message = torch.empty(self.wire.length(*shape), dtype=self.wire.dtype)
        return Part(rank, number, message, self.comm.receive(message, rank, tag, what))

    def _leave(self, message: Tensor, rank: int, tag: int, what: str) -> None:
        self._leaving.append((self.comm.send(message, rank, tag, what), message))

    @torch.no_grad()
    def send(self) -> None:
        """Send each rank its part of our change, and receive ours, piece by piece."""
        self._gather(self.change)
        self.change.sub_(self.anchor)
        self._send_small()
        what, me = "the changes of the weights", self.comm.rank
        kept = self.feedback.get("change")
        for number in range(self.pieces):
            tag, shape = FIRST_TAG + 2 * number, self._piece(self.change, me, number).shape
            self._arriving.append([self._expect(rank, number, shape, tag, what) for rank in self.others])
            for rank in range(self.comm.world):
                left = None if kept is None else self._piece(kept, rank, number)
                message = self._written(self._piece(self.change, rank, number), left)
                if rank == me:
                    self._own.append(message)
                else:
                    self._leave(message, rank, tag, what)

    def take(self) -> None:
        """Sum our part, exchange the means, and continue from them with the same weights on all ranks."""
        self.reduce()
        self._step(self._arrived())
        for parameter, values in self._parts(self.anchor):
            parameter.copy_(values)

    def land(self) -> None:
        """Continue from the means, some steps later, with this rank's changes since."""
        self.reduce()
        for parameter, moved in self._parts(self._step(self._arrived()).sub_(self.change)):
            parameter.add_(moved)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum our part of all ranks' changes and send its mean; once per meeting, however often called."""
        if self._mean_change is not None:
            return
        mean = self._mean_change = torch.empty_like(self.change)
        what, me = "the mean change of the weights", self.comm.rank
        for number, parts in enumerate(self._arriving):
            tag = FIRST_TAG + 2 * number + 1
            shapes = {rank: self._piece(mean, rank, number).shape for rank in self.others}
            self._coming += [self._expect(rank, number, shape, tag, what) for rank, shape in shapes.items()]
            self._await(*(part.pending for part in parts))
            message = self._mean(number, parts, self._piece(mean, me, number))
            for rank in self.others:
                self._leave(message, rank, tag, what)
        self._arriving.clear()

    def _arrived(self) -> Tensor:
        """The mean of all ranks' changes, once it has arrived."""
        mean, self._mean_change = self._mean_change, None
        assert mean is not None, "reduce() comes first"
        for part in self._coming:
            self._await(part.pending)
            self.wire.read(part.message, self._piece(mean, part.rank, part.number))
        mean[self.size :] = self._mean_of_small()
        self.comm.wait(*(pending for pending, dummy in self._leaving))
        for done in (self._own, self._coming, self._small, self._leaving):
            done.clear()
        return mean

    def _await(self, *pending: Pending) -> None:
        self.comm.enter("sync")
        self.comm.wait(*pending)

    def _mean(self, number: int, parts: Sequence[Part], into: Tensor) -> Tensor:
        """The mean of a piece of our part, weighted by rows; our own change counts as sent, and the mean
        as it will be sent. Returns the message."""
        messages = {self.comm.rank: self._own[number], **{part.rank: part.message for part in parts}}
        total, values = torch.zeros_like(into), torch.empty_like(into)
        for rank, weight in enumerate(self.weights):
            total += self.wire.read(messages[rank], values) * weight
        kept = self.feedback.get("mean")
        if kept is not None:
            start = self._bounds[self.pieces * self.comm.rank]
            first = self._bounds[self.pieces * self.comm.rank + number] - start
            kept = kept[first : first + into.numel()].view_as(into)
        message = self._written(total, kept)
        self.wire.read(message, into)
        return message

    def _send_small(self) -> None:
        """Send every rank our changes of tensors too small to be split or packed."""
        mine, what = self.change[self.size :], "the changes of the small weights"
        for rank in range(self.comm.world):
            if rank == self.comm.rank:
                self._small.append((None, mine))
            else:
                message = torch.empty_like(mine)
                self._small.append((self.comm.receive(message, rank, SMALL_TAG, what), message))
                self._leave(mine, rank, SMALL_TAG, what)

    def _mean_of_small(self) -> Tensor:
        total = torch.zeros(len(self.change) - self.size)
        for weight, (pending, change) in zip(self.weights, self._small, strict=True):
            if pending is not None:
                self._await(pending)
            total += change * weight
        return total

    @torch.no_grad()
    def _step(self, mean: Tensor) -> Tensor:
        """Move the anchor and return its change: a Nesterov step along the mean for matrices, the plain mean for scalars, whose
        learning rates are so large that they converge within a few steps, and momentum would overshoot."""
        rate, momentum = self.outer
        matrices = mean[: self.size]
        self.momentum.mul_(momentum).add_(matrices)
        matrices.add_(self.momentum * momentum).mul_(rate)
        self.anchor += mean
        return mean
