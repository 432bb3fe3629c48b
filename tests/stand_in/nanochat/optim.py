# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AdamW and Muon behind torch.optim.Optimizer, with the state of several ranks split and exchanged as nanochat's does it.

What matters here is what is exchanged by which calls, and where state lies; the arithmetic is the plain one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 1024
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
    """Groups of kind "adamw" or "muon"; with a process group each rank keeps and updates its part of the state."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, defaults={})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        sums = [getattr(self, f"_send_{group['kind']}")(group) for group in self.param_groups]
        arriving: list[tuple[Any, list[Tensor], Tensor | None]] = []
        for group, one in zip(self.param_groups, sums, strict=True):
            getattr(self, f"_update_{group['kind']}")(group, one, arriving)
        for future, parameters, stacked in arriving:
            if future is not None:
                future.wait()
            if stacked is not None:
                torch._foreach_copy_(parameters, list(stacked[: len(parameters)].unbind(0)))

    # -- AdamW: the large parameters by rows

    def _send_adamw(self, group: dict[str, Any]) -> list[tuple[Any, Tensor, bool]]:
        sums = []
        for p in group["params"]:
            assert p.grad is not None
            if self.world == 1:
                sums.append((None, p.grad, False))
            elif p.numel() < SMALL:
                future = dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True).get_future()
                sums.append((future, p.grad, False))
            else:
                assert p.shape[0] % self.world == 0, "the rows must divide by the ranks"
                part = torch.empty_like(p.grad[: p.shape[0] // self.world])
                future = dist.reduce_scatter_tensor(part, p.grad, op=dist.ReduceOp.AVG, async_op=True).get_future()
                sums.append((future, part, True))
        return sums

    def _update_adamw(self, group: dict[str, Any], sums: list[tuple[Any, Tensor, bool]], arriving: list[Any]) -> None:
        for p, (future, gradient, split) in zip(group["params"], sums, strict=True):
            if future is not None:
                future.wait()
            part = p[self.rank * len(gradient) :][: len(gradient)] if split else p
            state = self.state[p]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}
            state["step"] += 1
            beta1, beta2 = group["betas"]
            part.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
            part.sub_(state["exp_avg"] / root * (group["lr"] / (1 - beta1 ** state["step"])))
            if split:
                arriving.append((dist.all_gather_into_tensor(p, part, async_op=True).get_future(), [p], None))

    # -- Muon: matrices of one shape stacked, a number of them on each rank

    def _send_muon(self, group: dict[str, Any]) -> tuple[Any, Tensor, Tensor | None]:
        gradients = torch.stack([p.grad for p in group["params"]])
        if self.world == 1:
            return None, gradients, None
        each = -(-len(gradients) // self.world)
        stacked = gradients.new_zeros(each * self.world, *gradients.shape[1:])
        stacked[: len(gradients)] = gradients
        mine = torch.empty_like(stacked[:each])
        future = dist.reduce_scatter_tensor(mine, stacked, op=dist.ReduceOp.AVG, async_op=True).get_future()
        return future, mine, stacked

    def _update_muon(self, group: dict[str, Any], sums: tuple[Any, Tensor, Tensor | None], arriving: list[Any]) -> None:
        future, gradients, stacked = sums
        if future is not None:
            future.wait()
        each = len(gradients)
        owned = group["params"][self.rank * each :][:each]
        parts = torch.zeros_like(gradients)
        state = self.state[group["params"][0]]
        tall = gradients.shape[-2] >= gradients.shape[-1]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradients)
            state["second_momentum_buffer"] = torch.zeros_like(gradients.mean(-1 if tall else -2, keepdim=True))
        if owned:
            torch.stack(owned, out=parts[: len(owned)])
            self._muon(group, gradients[: len(owned)], parts[: len(owned)], state, -1 if tall else -2)
        if stacked is None:
            arriving.append((None, group["params"], parts))
            return
        future = dist.all_gather_into_tensor(stacked, parts, async_op=True).get_future()
        arriving.append((future, group["params"], stacked))

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
