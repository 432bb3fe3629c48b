# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The model's operations. Autograd can follow those of the plain model (gpt.py); fused.py has gradients of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -1  # a target without loss
SOFTCAP = 15.0
QK_SCALE = 1.2
ROTARY_BASE = 100000.0
HEAD_ROWS = 256  # rows of logits that exist at a time


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last axis, without a weight."""
    return F.rms_norm(x, (x.size(-1),))


def norm_factor(x: Tensor) -> Tensor:
    """The factor by which norm multiplies each row, [.., 1]."""
    mean_square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1))
    return mean_square.add_(torch.finfo(torch.float32).eps).rsqrt_()


def rotary_tables(position: int, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] for positions position .. position + tokens - 1."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    positions = torch.arange(position, position + tokens, dtype=torch.float32)
    angle = torch.outer(positions, 1.0 / ROTARY_BASE**exponent).unsqueeze(1)
    return angle.cos(), angle.sin()


def rotate_into(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """out = x [.., T, H, D] with its halves rotated into each other; -sin rotates back."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=-1)
    return out


def rotate_and_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return norm(torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)) * QK_SCALE


def window_mask(queries: int, keys: int, window: int) -> Tensor:
    """0 where a query sees a key, else -inf; the last query is aligned with the last key."""
    query = torch.arange(keys - queries, keys)[:, None]
    distance = query - torch.arange(keys)[None, :]
    hidden = (distance < 0) | (distance > window)
    return torch.zeros(queries, keys).masked_fill_(hidden, -math.inf)


def tanh_product(x: Tensor, weight: Tensor) -> Tensor:
    """tanh(x @ weight.T); oneDNN fuses the tanh into the product, but not for autograd."""
    fuses = not x.requires_grad and torch.backends.mkldnn.is_available()
    if fuses and (x.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "tanh", [], "")
        return result
    return torch.tanh_(x @ weight.t())


def logits(x: Tensor, head: Tensor, vocab_size: int) -> Tensor:
    """Capped logits of x [.., C] in float32, cut to the real vocabulary."""
    capped = tanh_product(x.flatten(0, -2) / SOFTCAP, head[:vocab_size])
    scaled = capped * SOFTCAP if capped.requires_grad else capped.mul_(SOFTCAP)
    return scaled.view(*x.shape[:-1], vocab_size)


def token_losses(x: Tensor, head: Tensor, vocab_size: int, targets: Tensor) -> Tensor:
    """Cross entropy of each row of x [N, C] in float32, 0 if the target is IGNORED."""
    losses = torch.empty(x.size(0))
    for start in range(0, x.size(0), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        chunk = logits(x[rows], head, vocab_size)
        losses[rows] = F.cross_entropy(chunk, targets[rows], ignore_index=IGNORED, reduction="none")
    return losses
