# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The model: its parameters, its sizes, and its forward pass for evaluation and generation.

Training goes through nanochat/model/fused.py, which computes the same function with hand-written gradients.
Shapes in names: B rows, T tokens, C = n_embd, H heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanochat.kit.common import UserError
from nanochat.model import ops
from nanochat.model.attention import attend
from nanochat.rules.causes import Cause
from nanochat.rules.model_size import GATE_CHANNELS, SMEAR_CHANNELS, ModelConfig, parameters, value_layers, windows


class Weight(nn.Module):
    """An uninitialised matrix without bias: a linear layer or a table."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.c_q = Weight(config.n_embd, config.n_embd)
        self.c_k = Weight(config.n_embd, config.n_embd)
        self.c_v = Weight(config.n_embd, config.n_embd)
        self.c_proj = Weight(config.n_embd, config.n_embd)
        self.ve_gate = Weight(config.n_head, GATE_CHANNELS) if layer in value_layers(config) else None


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Weight(4 * config.n_embd, config.n_embd)
        self.c_proj = Weight(config.n_embd, 4 * config.n_embd)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = Weight(config.padded_vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)])

    def block(self, layer: int) -> Block:
        block = self.h[layer]
        assert isinstance(block, Block)
        return block


class KVCache:
    """Keys and values of the tokens so far, for generation: `logits = model(ids, cache=cache)` appends ids.

    Holds `rows` sequences of equal length, up to `capacity` tokens.
    """

    def __init__(self, model: GPT, rows: int, capacity: int) -> None:
        config = model.config
        shape = (config.n_layer, rows, capacity, config.n_head, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.length = 0
        self.last_embedding: Tensor | None = None  # of the last token, before smearing

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B, T, H, D] of the new tokens; returns those of all tokens."""
        end = self.length + k.size(1)
        self.keys[layer, :, self.length : end] = k
        self.values[layer, :, self.length : end] = v
        return self.keys[layer, :, :end], self.values[layer, :, :end]


class GPT(nn.Module):
    """Parameters have upstream's names and are uninitialised: call init_weights or load_state_dict."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.n_kv_head != config.n_head:
            raise UserError(
                f"a model with {config.n_head} heads and {config.n_kv_head} for keys and values is not supported; both must be the same.",
                Cause.BAD_CHECKPOINT,
            )
        self.config, self.windows = config, windows(config)
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        self.transformer = Transformer(config)
        self.lm_head = Weight(config.padded_vocab_size, config.n_embd)
        self.smear_gate = Weight(1, SMEAR_CHANNELS)
        tables = {str(layer): Weight(config.padded_vocab_size, config.n_embd) for layer in value_layers(config)}
        self.value_embeds = nn.ModuleDict(tables)
        size, known = sum(p.numel() for p in self.parameters()), parameters(config)["total"]
        if size != known:
            raise UserError(
                f"the model has {size:,} parameters, but rules/model_size.py counts {known:,}; count all of them there.",
                Cause.BUG,
            )

    def value_table(self, layer: int) -> Tensor:
        table = self.value_embeds[str(layer)]
        assert isinstance(table, Weight)
        return table.weight

    @torch.no_grad()
    def init_weights(self, seed: int = 42) -> None:
        """Fill every parameter; the same seed gives the same weights everywhere."""
        generator = torch.Generator().manual_seed(seed)
        bound = (3.0 / self.config.n_embd) ** 0.5

        def uniform(weight: Tensor, low: float, high: float) -> None:
            weight.uniform_(low, high, generator=generator)

        self.transformer.wte.weight.normal_(0.0, 0.8, generator=generator)
        self.lm_head.weight.normal_(0.0, 0.001, generator=generator)
        for layer in range(self.config.n_layer):
            block = self.transformer.block(layer)
            for matrix in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                uniform(matrix.weight, -bound, bound)
            uniform(block.mlp.c_fc.weight, -0.4 * bound, 0.4 * bound)
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
        for table in self.value_embeds.parameters():
            uniform(table, -bound, bound)
        for layer in range(self.config.n_layer):
            gate = self.transformer.block(layer).attn.ve_gate
            if gate is not None:
                uniform(gate.weight, 0.0, 0.02)
        uniform(self.smear_gate.weight, 0.0, 0.02)
        layers = self.config.n_layer
        self.resid_lambdas.copy_(torch.linspace(1.15, 1.05, layers))
        self.x0_lambdas.copy_(torch.linspace(0.20, 0.05, layers))
        self.smear_lambda.fill_(0.0)
        self.backout_lambda.fill_(0.2)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """ids [B, T] -> logits [B, T, V], without gradients."""
        return ops.logits(self.hidden(ids, cache), self.lm_head.weight, self.config.vocab_size)

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """[B, T], 0 where ignored. Autograd can follow it, as the reference for the gradients of fused.TrainingPass."""
        x = self.hidden(ids).flatten(0, 1)
        return ops.token_losses(x, self.lm_head.weight, self.config.vocab_size, targets.flatten()).view_as(targets)

    def hidden(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """The head's input, [B, T, C]."""
        x = self._embed(ids, cache)
        start = backout = x
        for layer in range(self.config.n_layer):
            mlp = self.transformer.block(layer).mlp
            x = self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * start
            x = x + self._attention(layer, ops.norm(x), ids, cache)
            x = x + torch.relu(ops.norm(x) @ mlp.c_fc.weight.t()).square() @ mlp.c_proj.weight.t()
            if layer == self.config.backout_layer:
                backout = x
        if cache is not None:
            cache.length += ids.size(1)
        return ops.norm(x - self.backout_lambda * backout)

    def _embed(self, ids: Tensor, cache: KVCache | None) -> Tensor:
        """Normed embeddings, each smeared with its predecessor."""
        x = ops.norm(self.transformer.wte.weight[ids])
        before = torch.zeros_like(x)
        before[:, 1:] = x[:, :-1]
        if cache is not None:
            if cache.last_embedding is not None:
                before[:, 0] = cache.last_embedding
            cache.last_embedding = x[:, -1].clone()
        gate = torch.sigmoid(x[..., :SMEAR_CHANNELS] @ self.smear_gate.weight.t())
        return x + self.smear_lambda * gate * before

    def _attention(self, layer: int, a: Tensor, ids: Tensor, cache: KVCache | None) -> Tensor:
        attn, config = self.transformer.block(layer).attn, self.config
        position, tokens = 0 if cache is None else cache.length, a.size(1)
        by_head = (*a.shape[:2], config.n_head, config.head_dim)
        q, k, v = ((a @ part.weight.t()).view(by_head) for part in (attn.c_q, attn.c_k, attn.c_v))
        if attn.ve_gate is not None:
            gate = 3 * torch.sigmoid(a[..., :GATE_CHANNELS] @ attn.ve_gate.weight.t())
            v = v + gate.unsqueeze(-1) * self.value_table(layer)[ids].view_as(v)
        cos, sin = ops.rotary_tables(position, tokens, config.head_dim)
        q, k = ops.rotate_and_norm(q, cos, sin), ops.rotate_and_norm(k, cos, sin)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        y = attend(q, k, v, self.windows[layer])
        return y.reshape(a.shape) @ attn.c_proj.weight.t()
