# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A task whose examples the ranks share out, and wait for each other before they add up."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def evaluate_task(examples: int, seconds: float) -> float:
    """seconds: how much longer the last rank takes than the others."""
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
