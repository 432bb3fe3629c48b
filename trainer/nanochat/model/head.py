# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head's loss and gradients, a chunk of rows at a time, so that the logits of a large batch never exist at once.

With t = tanh(x W' / 15) the logits 15 t are bounded, so their exponentials e need no maximum subtracted. The gradient of
x W' is (e / sum - target) * (1 - t^2). We compute it times its row's sum, and divide the rows of a smaller tensor instead.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanochat.model import kernels
from nanochat.model.gradients import HEAD
from nanochat.model.layers import PassContext
from nanochat.model.ops import IGNORED, SOFTCAP, tanh_product

# Size of a chunk's logit gradients. The weight's gradient is complete only with the last chunk, whose softmax must be done
# before the first block can be sent; larger chunks send it sooner.
CHUNK_BYTES = 2**27
# Size of logits computed at a time, so that they are still cached for the softmax.
CACHED_BYTES = 2**25


def row_slices(rows: int, row_bytes: int, limit: int) -> list[slice]:
    """All rows in slices below the limit."""
    size = max(1, limit // row_bytes)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class Head(Protocol):
    """The training pass's interface to WholeHead or one rank's part of a shared head (parallel/shared_head.py)."""

    def start_step(self) -> None:
        """Read the current weights."""

    def start_pass(self) -> None:
        """Called before the forward pass of a micro-batch."""

    def loss_and_gradient(self, y: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the loss times scale and the gradient of y, which may be overwritten; adds to the weight's gradient."""


class WholeHead:
    """The whole vocabulary on this rank."""

    def __init__(self, context: PassContext, weight: Tensor, vocab_size: int) -> None:
        self.context, self.real = context, weight[:vocab_size]
        self.weight = torch.empty(0)

    def start_step(self) -> None:
        self.weight = self.context.operand(self.real, "head_weight")

    def start_pass(self) -> None:
        """Nothing to prepare."""

    def loss_and_gradient(self, y: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        get, dtype = self.context.buffers.get, self.context.dtype
        capped = torch.mul(y, 1 / SOFTCAP, out=get("capped", *y.shape, dtype=dtype))
        scaled = get("scaled", *y.shape, dtype=dtype)
        d, loss = get("d", *y.shape), torch.zeros(())
        for rows in row_slices(len(y), len(self.weight) * self.weight.itemsize, CHUNK_BYTES):
            chunk_loss, draw, factor = self._chunk(capped[rows], targets[rows])
            loss += chunk_loss
            factor.mul_(scale)
            torch.mul(y[rows], factor, out=scaled[rows])
            # The weight's gradient block by block; each may be sent while the next is computed.
            for part in self.context.gradients.parts[HEAD]:
                self.context.gradients.add_head_product(part, draw.t(), scaled[rows])
                if rows.stop == len(y):
                    self.context.part_ready(part)
            # A product of transposes is faster if the inner dimension is by far the longest.
            torch.mul(torch.mm(self.weight.t(), draw.t()).t(), factor, out=d[rows])
        return loss * scale, d

    def _chunk(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, C], already divided by the cap; targets [R].

        Returns the sum of the losses, the gradient of the raw logits [R, V], valid until the next call, and the factors
        [R, 1] by which its rows must still be multiplied.
        """
        draw = self.context.buffers.get("draw", len(x), len(self.weight), dtype=x.dtype)
        columns, counted = targets.clamp_min(0), targets != IGNORED
        sums, at_target = torch.empty(len(x)), torch.empty(2, len(x))
        for rows in row_slices(len(x), len(self.weight) * self.weight.itemsize, CACHED_BYTES):
            t = tanh_product(x[rows], self.weight)
            kernels.exponentials(t, draw[rows], columns[rows], sums[rows], at_target[:, rows])
        e, t_at = at_target
        missing = (e - sums) * (1 - t_at.square())
        draw[torch.arange(len(x)), columns] = missing.to(draw.dtype)
        loss: Tensor = ((sums.log() - SOFTCAP * t_at) * counted).sum()
        return loss, draw, (counted / sums).unsqueeze(1)
