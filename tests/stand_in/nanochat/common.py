# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkout such as users have, small and written here: the module names, calls and loop of nanochat, with rows of made-up text.

On a CPU it makes no process group.
"""

import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

from nanochat.baseline_model import BaselineGPT, BaselineOptimizer

COMPUTE_DTYPE = getattr(torch, os.environ.get("NANOCHAT_DTYPE", "bfloat16"))
ddp, rank, world = "RANK" in os.environ, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def flags(**defaults):
    parser = argparse.ArgumentParser()
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser.parse_args()


def print0(text):
    if rank == 0:
        print(text)


def compute_cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()


def batches(rows, length, split, number=0):
    """The same rows make up a step, whatever the number of ranks."""
    while True:
        seeds = [(number * world + rank) * rows + row + (10**6 if split == "val" else 0) for row in range(rows)]
        drawn = [torch.randint(0, 12, (length + 1,), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        ids = torch.stack(drawn).cumsum(1) % 90
        number += 1
        yield ids[:, :-1], ids[:, 1:].clone(), {"pq_idx": 0, "rg_idx": number, "epoch": 1}


class MuonAdamW(BaselineOptimizer):
    def step(self):
        assert not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) == (0, 1)
        super().step()


class GPT(BaselineGPT):
    def __init__(self, **config):
        super().__init__(SimpleNamespace(**config))

    def init_weights(self):
        assert COMPUTE_DTYPE is torch.float32, "this model computes in float32"
        torch.manual_seed(42)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.5 if "wte" in name else 0.05)

    def setup_optimizer(self):
        optimizer = MuonAdamW(self, embedding=0.02, unembedding=0.003, matrix=0.02, scalar=0.02)
        for group in optimizer.param_groups:
            # Otherwise it would amplify rounding errors of gradients near zero.
            group |= {"eps": 1e-6} if group["kind"] == "adamw" else {}
        return optimizer
