# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bits per byte (a token is a byte here), summed over the ranks."""

from __future__ import annotations

import math
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
