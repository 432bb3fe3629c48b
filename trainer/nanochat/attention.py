# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Causal attention within a window, forward and backward, a block of queries at a time.

Only the keys that some query of a block sees are touched, and no mask is larger than a block's. The probabilities
are kept for the backward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

QUERY_BLOCK = 128


def block_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """0 where a query sees a key, else -inf; the last query stands at the last key."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    distance = query - torch.arange(keys, device=device)[None, :]
    hidden = (distance < 0) | (distance > window)
    return torch.zeros(queries, keys, device=device).masked_fill_(hidden, -math.inf)


class WindowAttention:
    """Attention of one layer over sequences of one length; M = rows * heads."""

    def __init__(self, tokens: int, window: int, device: torch.device) -> None:
        self.blocks = []
        for start in range(0, tokens, QUERY_BLOCK):
            end, first = min(start + QUERY_BLOCK, tokens), max(0, start - window)
            self.blocks.append((start, end, first, block_mask(end - start, end - first, window, device)))
        self.probabilities: list[Tensor] = []

    def forward(self, q_MTD: Tensor, k_MTD: Tensor, v_MTD: Tensor, out_MTD: Tensor) -> None:
        """q is scaled already."""
        if not self.probabilities or len(self.probabilities[0]) != len(q_MTD):
            self.probabilities = [q_MTD.new_empty(len(q_MTD), *mask.shape) for *dummy, mask in self.blocks]
        for (start, end, first, mask), p in zip(self.blocks, self.probabilities, strict=True):
            torch.baddbmm(mask, q_MTD[:, start:end], k_MTD[:, first:end].mT, out=p)
            torch.ops.aten._softmax.out(p, -1, False, out=p)
            out_MTD[:, start:end] = torch.bmm(p, v_MTD[:, first:end])

    def backward(
        self, dout_MTD: Tensor, q_MTD: Tensor, k_MTD: Tensor, v_MTD: Tensor, out: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """The gradients of q, k, v go to `out`."""
        dq, dk, dv = out
        dk.zero_()
        dv.zero_()
        for (start, end, first, dummy), p in zip(self.blocks, self.probabilities, strict=True):
            d = dout_MTD[:, start:end]
            ds = torch.bmm(d, v_MTD[:, first:end].mT)
            dv[:, first:end] += torch.bmm(p.mT, d)
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
            dq[:, start:end] = torch.bmm(ds, k_MTD[:, first:end])
            dk[:, first:end] += torch.bmm(ds.mT, q_MTD[:, start:end])
