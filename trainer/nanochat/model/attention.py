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
    """Attention of one layer over sequences of one length; tensors are [rows, heads, T, D], or M = rows * heads of them."""

    def __init__(self, tokens: int, window: int) -> None:
        self.blocks, self.window = [], window
        for start in range(0, tokens, QUERY_BLOCK):
            end, first = min(start + QUERY_BLOCK, tokens), max(0, start - window)
            self.blocks.append((start, end, first, ops.window_mask(end - start, end - first, window)))
        self.probabilities: list[Tensor] = []

    def forward(self, *qkv_and_out: Tensor) -> None:
        """Overwrite out; q must already be scaled."""
        q_MTD, k_MTD, v_MTD, out_MTD = (x.flatten(0, -3) for x in qkv_and_out)
        if not self.probabilities or len(self.probabilities[0]) != len(q_MTD):
            self.probabilities = [q_MTD.new_empty(len(q_MTD), *block[-1].shape) for block in self.blocks]
        for (start, end, first, mask), p in zip(self.blocks, self.probabilities, strict=True):
            kernels.probabilities(q_MTD[:, start:end], k_MTD[:, first:end], mask, self.window, p)
            out_MTD[:, start:end] = torch.bmm(p, v_MTD[:, first:end])

    def backward(self, dout: Tensor, qkv: Triple, dqkv: Triple) -> None:
        """Overwrite dqkv."""
        dout_MTD, q, k, v, dq, dk, dv = (x.flatten(0, -3) for x in (dout, *qkv, *dqkv))
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
    """The same without hand-written gradients: q [B, Tq, H, D] belong to the last of k, v [B, Tk, H, D]; gives [B, Tq, H, D]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    blocks = []
    shift = k.size(2) - q.size(2)
    for start in range(0, q.size(2), QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q.size(2))
        seen = slice(max(0, shift + start - window), shift + end)
        mask = ops.window_mask(end - start, seen.stop - seen.start, window)
        blocks.append(F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, seen], v[:, :, seen], mask))
    return torch.cat(blocks, dim=2).transpose(1, 2)
