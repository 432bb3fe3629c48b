# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head's loss and gradients, a chunk of rows at a time: all logits together never exist.

With t = tanh(x W' / 15) the logits are 15 t, and their softmax p needs no maximum subtracted with care: it is bounded.
The gradient of x W' is (p - target) * (1 - t^2), made in place of p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanochat.ops import IGNORED, SOFTCAP, tanh_product

CHUNK_BYTES = 2**26  # of logits that exist at a time


class HeadLoss:
    """Works with buffers of its own: one for the probabilities of a chunk."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def chunk(self, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, C] already divided by the cap, the real rows of the weight, targets [R].

        Gives the sum of the losses and the gradient of the raw logits [R, V], valid until the next call.
        """
        t = tanh_product(x, weight)
        if self._buffer.shape != t.shape or self._buffer.dtype != t.dtype:
            self._buffer = torch.empty_like(t)
        p = torch.mul(t, SOFTCAP, out=self._buffer)
        torch.ops.aten._softmax.out(p, -1, False, out=p)
        counted = targets != IGNORED
        at_target = (torch.arange(len(x), device=x.device), targets.clamp_min(0))
        of_target = p[at_target]
        loss = -(of_target.float().log() * counted).sum()
        p[at_target] = of_target - 1
        if not bool(counted.all()):
            p.mul_(counted[:, None])
        torch.ops.aten.tanh_backward.grad_input(p, t, grad_input=p)
        return loss, p
