# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validation loss in bits per byte, which does not depend on the vocabulary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from nanochat.data.dataloader import Pair
from nanochat.rules.shares import spread


def eval_steps(eval_tokens: int, rows: int, length: int) -> int:
    """Batches of an evaluation over all ranks; at least one."""
    return max(1, eval_tokens // (rows * length))


def deal_out(batches: Iterable[Pair], rank: int, world: int) -> Iterator[Pair]:
    """One rank's rows of batches that all ranks read alike: a batch per rank, and equal parts of the last few.

    So the ranks together evaluate what one rank alone would, whatever their number.
    """
    source = iter(batches)
    while taken := list(itertools.islice(source, world)):
        ids, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
        sizes = spread(len(ids), world)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        if sizes[rank]:
            yield ids[mine], targets[mine]


@torch.no_grad()
def nats_and_bytes(
    losses_of: Callable[[Tensor, Tensor], Tensor], batches: Iterable[Pair], token_bytes: Tensor
) -> Tensor:
    """The nats of all targets that represent bytes, and those bytes; totals that add up over the ranks."""
    totals = torch.zeros(2, dtype=torch.float64)
    for ids, targets in batches:
        losses = losses_of(ids, targets).flatten()
        flat = targets.flatten()
        # Special tokens have no bytes, and a target of -1 is no token.
        sizes = torch.where(flat >= 0, token_bytes[flat.clamp(min=0)], 0)
        counted = sizes > 0
        totals[0] += losses[counted].double().sum()
        totals[1] += sizes.sum()
    return totals


def bits_per_byte(totals: Tensor) -> float:
    """The result from all ranks' totals."""
    nats, size = totals.tolist()
    return nats / (math.log(2) * size) if size else math.inf
