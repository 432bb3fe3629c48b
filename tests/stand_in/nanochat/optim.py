# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AdamW and Muon behind torch.optim.Optimizer, with their state where nanochat has it on a single rank; the arithmetic is plain."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def matrix_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def orthogonal(g: Tensor, count: int) -> Tensor:
    rows, columns = g.shape[-2:]
    lines = torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp_min(1e-6)
    g = g * (matrix_norm(g) / math.sqrt(rows) / lines)
    x = g / (1.01 * matrix_norm(g) + 1e-6)
    x = x.mT if rows > columns else x
    for a, b, c in POLAR[:count]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if rows > columns else x
    return x * (math.sqrt(min(rows, columns)) / matrix_norm(x).clamp_min(1e-6))


class MuonAdamW(torch.optim.Optimizer):
    """Groups of kind "adamw" or "muon"; nanochat's own splits its state among several ranks, this one has no need to."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, defaults={})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        assert not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) == (0, 1)
        for group in self.param_groups:
            getattr(self, f"_update_{group['kind']}")(group)

    def _update_adamw(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state["step"] += 1
            beta1, beta2 = group["betas"]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
            p.sub_(state["exp_avg"] / root * (group["lr"] / (1 - beta1 ** state["step"])))

    def _update_muon(self, group: dict[str, Any]) -> None:
        """Its matrices, of one shape, are stacked."""
        gradients, stacked = (torch.stack(each) for each in zip(*((p.grad, p) for p in group["params"]), strict=True))
        state, tall = self.state[group["params"][0]], gradients.shape[-2] >= gradients.shape[-1]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradients)
            state["second_momentum_buffer"] = torch.zeros_like(gradients.mean(-1 if tall else -2, keepdim=True))
        self._muon(group, gradients, stacked, state, -1 if tall else -2)
        torch._foreach_copy_(group["params"], list(stacked.unbind(0)))

    def _muon(self, group: dict[str, Any], g: Tensor, p: Tensor, state: dict[str, Tensor], axis: int) -> None:
        m, s = state["momentum_buffer"][: len(g)], state["second_momentum_buffer"][: len(g)]
        m.lerp_(g, 1 - group["momentum"])
        g = orthogonal(g.lerp(m, group["momentum"]), group["ns_steps"])
        size = matrix_norm(g)
        s.lerp_(g.square().mean(axis, keepdim=True), 1 - group["beta2"])
        g = g * s.clamp_min(1e-10).rsqrt()
        g = g * (size / matrix_norm(g).clamp_min(1e-10))
        lr = group["lr"] * math.sqrt(max(1.0, p.shape[-2] / p.shape[-1]))
        p.sub_(lr * g + lr * group["weight_decay"] * p * (g * p >= 0))
