# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validation in bits per byte, a loss that does not depend on the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


class TokenLosses(Protocol):
    """A model, as far as this file knows it: with reduction "none" it gives the nats of every target."""

    def __call__(self, ids: Tensor, targets: Tensor, reduction: str) -> Tensor: ...


def eval_steps(eval_tokens: int, rows: int, length: int, world: int) -> int:
    """Batches of each rank in one evaluation; at least one, however few tokens were asked for."""
    return max(1, eval_tokens // (rows * length * world))


@torch.no_grad()
def bits_per_byte(
    model: TokenLosses,
    batches: Iterable[Batch],
    token_bytes: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Nats of all targets that stand for bytes, over ln 2 times those bytes; reduce sums a tensor over the ranks."""
    totals = torch.zeros(2, dtype=torch.float64)
    for ids, targets in batches:
        losses = model(ids, targets, reduction="none").flatten()
        flat = targets.flatten()
        # Special tokens stand for no bytes, and a target of -1 for no token at all.
        sizes = torch.where(flat >= 0, token_bytes.to(flat.device)[flat.clamp(min=0)], 0)
        counted = sizes > 0
        totals[0] += losses[counted].double().sum().cpu()
        totals[1] += sizes.sum().cpu()
    nats, size = (reduce(totals) if reduce is not None else totals).tolist()
    return nats / (math.log(2) * size) if size else math.inf
