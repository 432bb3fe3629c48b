# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plain model of bench/ (beside this file in a test's checkout) with the optimizer's groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanochat.baseline_model import BaselineGPT
from nanochat.common import COMPUTE_DTYPE
from nanochat.optim import MuonAdamW


@dataclass
class GPTConfig:
    sequence_len: int = 64
    vocab_size: int = 1920
    n_layer: int = 3
    n_head: int = 2
    n_kv_head: int = 2
    n_embd: int = 64
    window_pattern: str = "L"


class GPT(BaselineGPT):
    def init_weights(self) -> None:
        assert COMPUTE_DTYPE is torch.float32, "this model computes in float32"
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.5 if "wte" in name else 0.05)

    def num_scaling_params(self) -> dict[str, int]:
        return {"total": sum(p.numel() for p in self.parameters())}

    def setup_optimizer(self, lr: float = 0.02) -> MuonAdamW:
        matrices = list(self.transformer.h.parameters())
        adamw = [
            (list(self.lm_head.parameters()), lr / 2, (0.8, 0.96), 0.01),
            (list(self.transformer.wte.parameters()), lr * 4, (0.8, 0.995), 0.001),
            (list(self.value_embeds.parameters()), lr * 2, (0.8, 0.995), 0.01),
            ([self.resid_lambdas], lr / 10, (0.8, 0.95), 0.05),
            ([self.x0_lambdas], lr, (0.96, 0.95), 0.0),
            ([self.smear_gate.weight, self.smear_lambda, self.backout_lambda], lr, (0.8, 0.95), 0.0),
        ]
        groups = [
            {"kind": "adamw", "params": params, "lr": rate, "betas": betas, "eps": 1e-6, "weight_decay": decay}
            for params, rate, betas, decay in adamw
        ]
        for shape in sorted({p.shape for p in matrices}):
            alike = [p for p in matrices if p.shape == shape]
            groups.append({"kind": "muon", "params": alike, "lr": lr, "momentum": 0.9, "ns_steps": 5, "beta2": 0.9,
                           "weight_decay": 0.1})  # fmt: skip
        optimizer = MuonAdamW(groups)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer
