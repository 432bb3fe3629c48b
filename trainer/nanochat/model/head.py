# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head's loss and gradients, a chunk of rows at a time: the logits of a large batch never exist together.

With t = tanh(x W' / 15) the logits are 15 t, and their exponentials e need no maximum subtracted: they are bounded. The gradient
of x W' is (e / sum - target) * (1 - t^2). It is made times the sum of its row, by which rows of something smaller are divided.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanochat.model import kernels
from nanochat.model.gradients import HEAD
from nanochat.model.layers import Shared
from nanochat.model.ops import IGNORED, SOFTCAP, tanh_product
from nanochat.model.optim import Optimizer

# Of the gradients of logits that exist at a time. The weight's gradient is complete only when the last chunk is worked
# off, but the last chunk must have been through the softmax before its first block can leave: larger is sooner.
CHUNK_BYTES = 2**27
# Of logits that are made at a time, so that they are still in the cache when the softmax wants them.
CACHED_BYTES = 2**25


def row_slices(rows: int, row_bytes: int, limit: int) -> list[slice]:
    """All rows, as many together as stay below the limit."""
    size = max(1, limit // row_bytes)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class HeadLoss:
    """Works with a buffer of its own, for the gradient of a chunk."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def chunks(self, rows: int, weight: Tensor) -> list[slice]:
        """The rows to be given to chunk() at a time."""
        return row_slices(rows, len(weight) * weight.itemsize, CHUNK_BYTES)

    def chunk(self, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, C] already divided by the cap, the real rows of the weight, targets [R].

        Gives the sum of the losses, and the gradient of the raw logits [R, V], valid until the next call, with the
        factors [R, 1] that its rows lack.
        """
        shape = (len(x), len(weight))
        if self._buffer.shape != shape or self._buffer.dtype != x.dtype:
            self._buffer = x.new_empty(shape)
        columns, counted = targets.clamp_min(0), targets != IGNORED
        sums, at_target = torch.empty(len(x), device=x.device), torch.empty(2, len(x), device=x.device)
        for rows in row_slices(len(x), len(weight) * weight.itemsize, CACHED_BYTES):
            t = tanh_product(x[rows], weight)
            kernels.exponentials(t, self._buffer[rows], columns[rows], sums[rows], at_target[:, rows])
        e, t_at = at_target
        missing = (e - sums) * (1 - t_at.square())
        self._buffer[torch.arange(len(x), device=x.device), columns] = missing.to(self._buffer.dtype)
        loss: Tensor = ((sums.log() - SOFTCAP * t_at) * counted).sum()
        return loss, self._buffer, (counted / sums).unsqueeze(1)


class Head(Protocol):
    """What the training pass wants of a head: WholeHead, or one rank's part of a shared one."""

    def start_step(self) -> None:
        """Take the weights as they are now."""

    def start_pass(self) -> None:
        """A micro-batch is about to begin its forward pass."""

    def loss_and_gradient(self, y: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The loss times scale, and the gradient of y, which may be overwritten; the weight's gradient grows."""


class HeadPart(Head, Protocol):
    """One rank's part of a head that is shared out, as parallel/shared_head.py has it."""

    sizes: list[int]

    def take_part(self, scale: float) -> Tensor:
        """Do what is this rank's to do in a pass; returns the loss of its rows, if it has any."""

    def finish(self, optimizer: Optimizer, piece: int, pieces: int) -> None:
        """One of several pieces of the work postponed to the end of a step."""

    def gather(self) -> None:
        """Bring the weights of all parts up to date, on every rank."""

    def settle(self) -> None:
        """Wait until what was sent has left."""

    def whole_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """AdamW's state of all parts."""


class WholeHead:
    """All of the vocabulary on this rank."""

    def __init__(self, shared: Shared, weight: Tensor, vocab_size: int) -> None:
        self.shared, self.real = shared, weight[:vocab_size]
        self.loss = HeadLoss()
        self.weight = torch.empty(0)

    def start_step(self) -> None:
        self.weight = self.shared.operand(self.real, "head_weight")

    def start_pass(self) -> None:
        """Nothing to make ready."""

    def loss_and_gradient(self, y: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        get, dtype = self.shared.buffers.get, self.shared.dtype
        capped = torch.mul(y, 1 / SOFTCAP, out=get("capped", *y.shape, dtype=dtype))
        scaled = get("scaled", *y.shape, dtype=dtype)
        d, loss = get("d", *y.shape), torch.zeros((), device=y.device)
        for rows in self.loss.chunks(len(y), self.weight):
            chunk_loss, draw, factor = self.loss.chunk(capped[rows], self.weight, targets[rows])
            loss += chunk_loss
            factor.mul_(scale)
            torch.mul(y[rows], factor, out=scaled[rows])
            self._weight_backward(draw, scaled[rows], complete=rows.stop == len(y))
            # As a product of transposes, because that is faster where the inner side is the longest by far.
            torch.mul(torch.mm(self.weight.t(), draw.t()).t(), factor, out=d[rows])
        return loss * scale, d

    def _weight_backward(self, draw: Tensor, scaled: Tensor, complete: bool) -> None:
        """Block by block, each of which may leave while the next one is made."""
        for part in self.shared.gradients.parts[HEAD]:
            self.shared.gradients.add_head_product(part, draw.t(), scaled)
            if complete:
                self.shared.part_ready(part)
