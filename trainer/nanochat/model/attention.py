# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Causal attention within a window, forward and backward, a block of queries at a time.

A block reads only the keys that its queries see, and masks are no larger than a block. Probabilities are kept for the
backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nanochat.model import kernels, ops

QUERY_BLOCK = 128
Triple = tuple[Tensor, Tensor, Tensor]  # q, k, v or their gradients


class WindowAttention:
    """Attention of one layer over sequences of one length; M = rows * heads."""

    def __init__(self, tokens: int, window: int, device: torch.device) -> None:
        self.blocks, self.window = [], window
        for start in range(0, tokens, QUERY_BLOCK):
            end, first = min(start + QUERY_BLOCK, tokens), max(0, start - window)
            self.blocks.append((start, end, first, ops.window_mask(end - start, end - first, window, device)))
        self.probabilities: list[Tensor] = []

    def forward(self, q_MTD: Tensor, k_MTD: Tensor, v_MTD: Tensor, out_MTD: Tensor) -> None:
        """q must already be scaled."""
        if not self.probabilities or len(self.probabilities[0]) != len(q_MTD):
            self.probabilities = [q_MTD.new_empty(len(q_MTD), *block[-1].shape) for block in self.blocks]
        for (start, end, first, mask), p in zip(self.blocks, self.probabilities, strict=True):
            kernels.probabilities(q_MTD[:, start:end], k_MTD[:, first:end], mask, self.window, p)
            out_MTD[:, start:end] = torch.bmm(p, v_MTD[:, first:end])

    def backward(self, dout_MTD: Tensor, qkv_MTD: Triple, dqkv_MTD: Triple) -> None:
        """Overwrite dqkv."""
        (q, k, v), (dq, dk, dv) = qkv_MTD, dqkv_MTD
        dk.zero_()
        dv.zero_()
        for (start, end, first, dummy), p in zip(self.blocks, self.probabilities, strict=True):
            d = dout_MTD[:, start:end]
            ds = torch.bmm(d, v[:, first:end].mT)
            dv[:, first:end] += torch.bmm(p.mT, d)
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
            dq[:, start:end] = torch.bmm(ds, k[:, first:end])
            dk[:, first:end] += torch.bmm(ds.mT, q[:, start:end])


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention without a backward pass: q [B, Tq, H, D] belong to the last of k, v [B, Tk, KV, D]; gives [B, Tq, H, D]."""
    groups = q.size(2) // k.size(2)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    blocks = []
    shift = k.size(2) - q.size(2)
    for start in range(0, q.size(2), QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q.size(2))
        seen = slice(max(0, shift + start - window), shift + end)
        mask = ops.window_mask(end - start, seen.stop - seen.start, window, q.device)
        blocks.append(F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, seen], v[:, :, seen], mask))
    return torch.cat(blocks, dim=2).transpose(1, 2)
