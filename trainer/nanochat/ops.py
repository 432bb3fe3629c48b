# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pieces that the model is made of, without gradients. fused.py has those that training needs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -1  # a target that counts for nothing
SOFTCAP = 15.0
QK_SCALE = 1.2
ROTARY_BASE = 100000.0
HEAD_ROWS = 256  # rows of logits that exist at a time


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last axis, without a weight."""
    return F.rms_norm(x, (x.size(-1),))


def norm_factor(x: Tensor) -> Tensor:
    """What norm multiplies each row with, [.., 1]."""
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1))
    return mean_square.add_(torch.finfo(torch.float32).eps).rsqrt_()


def rotary_tables(position: int, tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] of the positions position .. position + tokens - 1."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(position, position + tokens, dtype=torch.float32, device=device)
    angle = torch.outer(positions, 1.0 / ROTARY_BASE**exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D] with its halves rotated into one another."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def rotate_and_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return norm(rotate(x, cos, sin)) * QK_SCALE


def window_mask(queries: int, keys: int, position: int, window: int, device: torch.device) -> Tensor:
    """True where a query sees a key; the first query stands at `position`, the first key at 0."""
    query = torch.arange(position, position + queries, device=device)[:, None]
    distance = query - torch.arange(keys, device=device)[None, :]
    return (distance >= 0) & (distance <= window)


def attend(q: Tensor, k: Tensor, v: Tensor, position: int, window: int) -> Tensor:
    """Causal attention of q [B, Tq, H, D] to k, v [B, Tk, KV, D] no further back than window; [B, Tq, H, D]."""
    groups = q.size(2) // k.size(2)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    queries, keys = q.size(2), k.size(2)
    if queries == keys and window >= keys - 1:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = window_mask(queries, keys, position, window, q.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2)


def logits(x: Tensor, head: Tensor, vocab_size: int) -> Tensor:
    """Capped logits in float32, cut to the real vocabulary."""
    raw = x @ head[:vocab_size].t()
    return torch.tanh(raw.float() / SOFTCAP) * SOFTCAP


def token_losses(x: Tensor, head: Tensor, vocab_size: int, targets: Tensor) -> Tensor:
    """Cross entropy of each row of x [N, C] in float32, 0 where the target is to be ignored."""
    losses = torch.empty(x.size(0), device=x.device)
    for start in range(0, x.size(0), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        chunk = logits(x[rows], head, vocab_size)
        losses[rows] = F.cross_entropy(chunk, targets[rows], ignore_index=IGNORED, reduction="none")
    return losses
