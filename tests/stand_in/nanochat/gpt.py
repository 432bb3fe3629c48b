# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small model and its optimizer; bench/baseline_model.py is copied beside this file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanochat.baseline_model import BaselineGPT, BaselineOptimizer
from nanochat.common import COMPUTE_DTYPE


@dataclass
class GPTConfig:
    sequence_len: int = 64
    vocab_size: int = 1920
    n_layer: int = 3
    n_head: int = 2
    n_kv_head: int = 2
    n_embd: int = 64
    window_pattern: str = "L"


class MuonAdamW(BaselineOptimizer):
    def step(self) -> None:  # type: ignore[override]
        assert not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) == (0, 1)
        super().step()


class GPT(BaselineGPT):
    def init_weights(self) -> None:
        assert COMPUTE_DTYPE is torch.float32, "this model computes in float32"
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.5 if "wte" in name else 0.05)

    def num_scaling_params(self) -> dict[str, int]:
        return {"total": sum(p.numel() for p in self.parameters())}

    def setup_optimizer(self) -> MuonAdamW:
        optimizer = MuonAdamW(self, embedding=0.02, unembedding=0.003, matrix=0.02, scalar=0.02)
        for group in optimizer.param_groups:
            # Otherwise it would amplify rounding errors of gradients near zero.
            group |= {"eps": 1e-6} if group["kind"] == "adamw" else {}
        return optimizer
