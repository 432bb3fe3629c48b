# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bits per byte, summed over the ranks."""

import math

import torch
import torch.distributed as dist


@torch.no_grad()
def evaluate_bpb(model, batches, steps):
    totals = torch.zeros(2)
    for dummy in range(steps):
        x, y, _state = next(batches)
        totals += torch.tensor([float(model(x, y)) * y.numel(), y.numel()])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    return float(totals[0] / math.log(2) / totals[1])
