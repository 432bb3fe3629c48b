# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The same model and optimizer, written as plainly as torch allows: autograd, dense masks, dense gradients.

The benches compare with it and the tests take it as the truth, so it must stay slow and obvious.
Any object with the fields of ModelConfig serves as its config.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, D]."""
    tokens, half = x.size(1), x.size(3) // 2
    frequency = 1.0 / (100000 ** (torch.arange(0, 2 * half, 2, dtype=torch.float32, device=x.device) / (2 * half)))
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32, device=x.device), frequency)[None, :, None, :]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int, window: int) -> None:
        super().__init__()
        width, self.heads, self.window = config.n_embd, config.n_head, window
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, width, bias=False)
        self.c_v = nn.Linear(width, width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        has_values = layer % 2 == (config.n_layer - 1) % 2
        self.ve_gate = nn.Linear(12, self.heads, bias=False) if has_values else None

    def forward(self, x: Tensor, values: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part(x).view(batch, tokens, self.heads, -1) for part in (self.c_q, self.c_k, self.c_v))
        if self.ve_gate is not None and values is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :12]))
            v = v + gate.unsqueeze(-1) * values.view_as(v)
        q, k = 1.2 * norm(rotate(q)), 1.2 * norm(rotate(k))
        position = torch.arange(tokens, device=x.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance <= self.window)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.relu(self.c_fc(x)).square())
        return out


class Block(nn.Module):
    def __init__(self, config: Any, layer: int, window: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer, window)
        self.mlp = MLP(config.n_embd)

    def forward(self, x: Tensor, values: Tensor | None) -> Tensor:
        x = x + self.attn(norm(x), values)
        y: Tensor = self.mlp(norm(x))
        return x + y


class Transformer(nn.Module):
    def __init__(self, config: Any, rows: int, windows: list[int]) -> None:
        super().__init__()
        self.wte = nn.Embedding(rows, config.n_embd)
        self.h = nn.ModuleList([Block(config, layer, window) for layer, window in enumerate(windows)])


class BaselineGPT(nn.Module):
    """The model, straight from its specification."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        layers, width = config.n_layer, config.n_embd
        rows = (config.vocab_size + 63) // 64 * 64
        short = min(-(-config.sequence_len // 4 // 128) * 128, config.sequence_len)
        pattern = config.window_pattern
        windows = [config.sequence_len if pattern[i % len(pattern)] == "L" else short for i in range(layers)]
        windows[-1] = config.sequence_len
        self.transformer = Transformer(config, rows, windows)
        self.lm_head = nn.Linear(width, rows, bias=False)
        self.resid_lambdas = nn.Parameter(torch.linspace(1.15, 1.05, layers))
        self.x0_lambdas = nn.Parameter(torch.linspace(0.20, 0.05, layers))
        self.smear_gate = nn.Linear(24, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(0.2 * torch.ones(1))
        tables = {str(i): nn.Embedding(rows, width) for i in range(layers) if i % 2 == (layers - 1) % 2}
        self.value_embeds = nn.ModuleDict(tables)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = norm(self.transformer.wte(ids))
        gate = self.smear_lambda * torch.sigmoid(self.smear_gate(x[:, 1:, :24]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
        start, backout = x, x
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * start
            values = self.value_embeds[str(i)](ids) if str(i) in self.value_embeds else None
            x = block(x, values)
            if i == self.config.n_layer // 2:
                backout = x
        x = norm(x - self.backout_lambda * backout)
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class BaselineOptimizer(torch.optim.Optimizer):
    """Dense AdamW and Muon with these learning rates, one stacked product per group. Groups and state are upstream's on a single rank."""

    def __init__(self, model: BaselineGPT, embedding: float, unembedding: float, matrix: float, scalar: float) -> None:
        scale = math.sqrt(768 / model.config.n_embd)
        groups: list[dict[str, Any]] = [
            {"kind": "adamw", "params": params, "lr": lr, "betas": (beta1, beta2), "eps": 1e-10, "weight_decay": decay}
            for params, lr, beta1, beta2, decay in (
                ([model.lm_head.weight], unembedding * scale, 0.8, 0.96, 0.01),
                ([model.transformer.wte.weight], embedding * scale, 0.8, 0.995, 0.001),
                (list(model.value_embeds.parameters()), embedding * scale / 2, 0.8, 0.995, 0.01),
                ([model.resid_lambdas], scalar * 0.01, 0.8, 0.95, 0.05),
                ([model.x0_lambdas], scalar, 0.96, 0.95, 0.0),
                ([model.smear_gate.weight, model.smear_lambda, model.backout_lambda], 0.2, 0.8, 0.95, 0.0),
            )
        ]
        matrices = list(model.transformer.h.parameters())
        for shape in sorted({p.shape for p in matrices}):
            alike = [p for p in matrices if p.shape == shape]
            groups.append({"kind": "muon", "params": alike, "lr": matrix, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9,
                           "weight_decay": 0.1})  # fmt: skip
        super().__init__(groups, defaults={})
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    def follow(self, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        """Take a step's place in the schedule."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier
            if group["kind"] == "muon":
                group |= {"momentum": momentum, "weight_decay": weight_decay}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            getattr(self, f"_update_{group['kind']}")(group)

    def _update_adamw(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state["step"] += 1
            m, v = state["exp_avg"], state["exp_avg_sq"]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            m.lerp_(p.grad, 1 - beta1)
            v.lerp_(p.grad.square(), 1 - beta2)
            root = (v / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
            p.sub_(m / root, alpha=group["lr"] / (1 - beta1 ** state["step"]))

    def _update_muon(self, group: dict[str, Any]) -> None:
        parameters, state = group["params"], self.state[group["params"][0]]
        p, g = torch.stack(parameters), torch.stack([parameter.grad for parameter in parameters])
        rows, columns = p.shape[-2:]
        axis = -1 if rows >= columns else -2
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
            state["second_momentum_buffer"] = torch.zeros_like(p.mean(axis, keepdim=True))
        # A loaded state may be filled up to a multiple of the ranks.
        m, s = state["momentum_buffer"][: len(p)], state["second_momentum_buffer"][: len(p)]
        m.lerp_(g, 1 - group["momentum"])
        g = g.lerp(m, group["momentum"])
        row_norm = g.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        g = orthogonalize(g * (g.norm(dim=(-2, -1), keepdim=True) / math.sqrt(rows) / row_norm))
        g = g * (math.sqrt(min(rows, columns)) / g.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
        size = g.norm(dim=(-2, -1), keepdim=True)
        s.lerp_(g.square().mean(axis, keepdim=True), 1 - group["beta2"])
        g = g * s.clamp_min(1e-10).rsqrt()
        g = g * (size / g.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
        lr = group["lr"] * math.sqrt(max(1.0, rows / columns))
        p -= lr * g + lr * group["weight_decay"] * p * (g * p >= 0)
        torch._foreach_copy_(parameters, list(p.unbind()))


def orthogonalize(g: Tensor) -> Tensor:
    """Five polynomial steps towards the nearest orthogonal matrix."""
    x = g / (1.01 * g.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for a, b, c in POLAR:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result
