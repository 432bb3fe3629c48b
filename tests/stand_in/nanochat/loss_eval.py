# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bits per byte (a token is a byte here), and a task, both summed over the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def evaluate_bpb(model: Any, batches: Iterator[tuple[Tensor, Tensor, Any]], steps: int, token_bytes: Any) -> float:
    nats, count = torch.tensor(0.0), torch.tensor(0, dtype=torch.int64)
    for dummy in range(steps):
        x, y, _state = next(batches)
        nats += model(x, y) * y.numel()
        count += y.numel()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(nats, op=dist.ReduceOp.SUM)
        dist.all_reduce(count, op=dist.ReduceOp.SUM)
    return float(nats / math.log(2) / count)


def evaluate_task(examples: int, seconds: float) -> float:
    """The ranks wait for each other before they add up; seconds: how much longer the last one takes than the others."""
    together = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    correct = torch.zeros(examples)
    correct[rank::world] = 1.0
    if together and world > 1:
        if rank == world - 1:
            time.sleep(seconds)
        dist.barrier()
        dist.all_reduce(correct, op=dist.ReduceOp.SUM)
    return float(correct.mean())
