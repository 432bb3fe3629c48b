# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training pass: loss and gradients of one micro-batch at a time, written out by hand.

    training = TrainingPass(model)
    training.start_step(token_ids)                          # all ids of this step, of every rank
    for ids, targets in micro_batches:
        loss += training.forward_backward(ids, targets, scale, on_ready if it is the last else None)
    training.gradients                                      # name -> tensor, see gradients.py

`scale` is 1 / (targets of the whole step over all ranks): the losses and the gradients of all micro-batches and
ranks are then simply summed.

`on_ready(name, gradient)` is called during the last micro-batch as soon as a gradient is complete, in the order of
`training.ready_order`: the head first, then the layers from the last to the first, the scalars and wte at the end.
The dense tensors are the same objects in every step and may be summed in place, those of the tables too.

matmul="bf16" makes the products of the linear layers from operands rounded to bfloat16; all else stays float32.

Shapes in names: N = rows * tokens, C = n_embd, M = rows * heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nanochat import ops
from nanochat.attention import Triple, WindowAttention
from nanochat.gradients import MATMUL_TYPES, WTE, Gradients, product, unique_ids
from nanochat.head import CHUNK_BYTES, HeadLoss
from nanochat.model import GATE_CHANNELS, GPT, SMEAR_CHANNELS

__all__ = ["MATMUL_TYPES", "TrainingPass", "unique_ids"]

OnReady = Callable[[str, Tensor], None]


class Buffers:
    """Named tensors that keep their memory from step to step: fresh memory costs page faults."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor with unknown contents, the same one as the last time if the shape is."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            tensor = self._tensors[name] = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor


def norm_into(x: Tensor, out: Tensor) -> Tensor:
    """out = norm(x); gives the factors, one a row."""
    factor = ops.norm_factor(x)
    torch.mul(x, factor, out=out)
    return factor


def norm_backward_(dy: Tensor, y: Tensor, factor: Tensor, gain: float = 1.0) -> Tensor:
    """The gradient of x in place of that of y = gain * norm(x); factor includes the gain."""
    along = torch.linalg.vecdot(dy, y).unsqueeze_(-1).mul_(1 / (y.size(-1) * gain * gain))
    return dy.sub_(y * along).mul_(factor)


class LayerPass:
    """Forward and backward of one layer. What the backward needs stays in buffers of the layer."""

    def __init__(self, owner: TrainingPass, layer: int) -> None:
        model, self.config = owner.model, owner.model.config
        self.owner, self.layer, self.gradients = owner, layer, owner.step_gradients
        self.block = model.transformer.block(layer)
        self.name = f"transformer.h.{layer}"
        self.buffers = Buffers(owner.device)
        self.values = model.value_table(layer) if self.config.has_value_embeds(layer) else None
        self.attention: dict[int, WindowAttention] = {}
        self.operands: dict[str, Tensor] = {}

    def refresh(self) -> None:
        """Copy the weights that the products want in another form: q, k, v as one matrix, or rounded."""
        attn, mlp, dtype = self.block.attn, self.block.mlp, self.owner.dtype
        parts = [attn.c_q.weight, attn.c_k.weight, attn.c_v.weight]
        qkv = self.buffers.get("qkv_weight", sum(map(len, parts)), self.config.n_embd, dtype=dtype)
        for target, part in zip(qkv.split([len(part) for part in parts]), parts, strict=True):
            target.copy_(part)
        self.operands["qkv"] = qkv
        for name, weight in (("o", attn.c_proj.weight), ("fc", mlp.c_fc.weight), ("proj", mlp.c_proj.weight)):
            self.operands[name] = self._operand(f"{name}_weight", weight)

    def _operand(self, name: str, x: Tensor) -> Tensor:
        """x as the products want it."""
        if x.dtype == self.owner.dtype:
            return x
        return self.buffers.get(name, *x.shape, dtype=self.owner.dtype).copy_(x)

    def forward(self, x_NC: Tensor, start_NC: Tensor, ids: Tensor) -> Tensor:
        """The residual stream after this layer."""
        lambdas = self.owner.lambdas[self.layer]
        u = self.buffers.get("u", *x_NC.shape)
        torch.mul(x_NC, lambdas[0], out=u).add_(start_NC, alpha=lambdas[1])
        self.x, self.start = x_NC, start_NC
        self._attention_forward(u, ids)
        self._mlp_forward(u)
        return u

    def backward(self, d_NC: Tensor, dstart_NC: Tensor) -> Tensor:
        """d is the gradient after this layer and becomes that before it; dstart grows."""
        self._mlp_backward(d_NC)
        self._attention_backward(d_NC)
        resid, x0 = self.owner.lambdas[self.layer]
        self.owner.dlambdas[self.layer, 0] += torch.linalg.vecdot(d_NC, self.x).sum()
        self.owner.dlambdas[self.layer, 1] += torch.linalg.vecdot(d_NC, self.start).sum()
        dstart_NC.add_(d_NC, alpha=x0)
        return d_NC.mul_(resid)

    def _mlp_forward(self, u: Tensor) -> None:
        m = self.buffers.get("m", *u.shape)
        self.m_factor = norm_into(u, m)
        m = self._operand("m_operand", m)
        hidden = self.buffers.get("hidden", len(u), 4 * u.size(1), dtype=m.dtype)
        torch.mm(m, self.operands["fc"].t(), out=hidden).relu_()
        square = torch.mul(hidden, hidden, out=self.buffers.get("square", *hidden.shape, dtype=m.dtype))
        product(square, self.operands["proj"].t(), u, add=True)

    def _mlp_backward(self, d: Tensor) -> None:
        shared, get = self.owner.buffers, self.buffers.get
        hidden = get("hidden", len(d), 4 * d.size(1), dtype=self.owner.dtype)
        square = get("square", *hidden.shape, dtype=hidden.dtype)
        m = get("m", *d.shape)
        d_operand = self._operand("d_operand", d)
        self.gradients.add_product(f"{self.name}.mlp.c_proj.weight", d_operand.t(), square)
        self.owner.ready(f"{self.name}.mlp.c_proj.weight")
        # The square's factor 2 is taken where there is least to multiply.
        twice = torch.mul(d_operand, 2, out=shared.get("twice", *d.shape, dtype=d_operand.dtype))
        dhidden = shared.get("dhidden", *hidden.shape, dtype=hidden.dtype)
        torch.mm(twice, self.operands["proj"], out=dhidden).mul_(hidden)
        self.gradients.add_product(f"{self.name}.mlp.c_fc.weight", dhidden.t(), self._operand("m_operand", m))
        self.owner.ready(f"{self.name}.mlp.c_fc.weight")
        dm = product(dhidden, self.operands["fc"], shared.get("da", *d.shape))
        d.add_(norm_backward_(dm, m, self.m_factor))

    def _heads(self, x_NC: Tensor, heads: int) -> Tensor:
        """[N, heads * D] as [B, T, heads, D]."""
        split: Tensor = x_NC.unflatten(1, (heads, self.config.head_dim)).unflatten(0, self.owner.batch)
        return split

    def _by_head(self, name: str, heads: int) -> Tensor:
        """A buffer [B, heads, T, D], seen as [B, T, heads, D]."""
        rows, tokens = self.owner.batch
        return self.buffers.get(name, rows, heads, tokens, self.config.head_dim).transpose(1, 2)

    def _grouped(self, x: Tensor) -> Tensor:
        """[B, T, heads, D] as [M, T, D], the heads of k and v repeated for as many as q has."""
        groups = self.config.n_head // x.size(2)
        x = x.transpose(1, 2)
        return (x.repeat_interleave(groups, dim=1) if groups > 1 else x).flatten(0, 1)

    def _attention_forward(self, u: Tensor, ids: Tensor) -> None:
        config, get, (dummy, tokens) = self.config, self.buffers.get, self.owner.batch
        a = get("a", *u.shape)
        self.a_factor = norm_into(u, a)
        operand = self._operand("a_operand", a)
        qkv = product(operand, self.operands["qkv"].t(), get("qkv", len(u), config.n_embd + 2 * config.kv_dim))
        q, k, v = qkv.split([config.n_embd, config.kv_dim, config.kv_dim], dim=1)
        self._gate_values(a, v, ids)
        q, k, v = self._heads(q, config.n_head), self._heads(k, config.n_kv_head), self._heads(v, config.n_kv_head)
        self.q_factor = self._rotate(q, self._by_head("q", config.n_head), self.q_gain)
        self.k_factor = self._rotate(k, self._by_head("k", config.n_kv_head), 1.0)
        self._by_head("v", config.n_kv_head).copy_(v)
        if tokens not in self.attention:
            self.attention[tokens] = WindowAttention(tokens, config.window(self.layer), u.device)
        self.qkv = self._qkv_by_head()
        out = self._by_head("o", config.n_head)
        self.attention[tokens].forward(*self.qkv, self._grouped(out))
        o = get("o_NC", len(u), config.n_embd, dtype=self.owner.dtype)
        self._heads(o, config.n_head).copy_(out)
        product(o, self.operands["o"].t(), u, add=True)

    @property
    def q_gain(self) -> float:
        """Both gains and the softmax's scale: multiplied into q alone."""
        return ops.QK_SCALE**2 / math.sqrt(self.config.head_dim)

    def _qkv_by_head(self) -> Triple:
        q, kv = self.config.n_head, self.config.n_kv_head
        parts = [self._grouped(self._by_head(name, heads)) for name, heads in (("q", q), ("k", kv), ("v", kv))]
        return parts[0], parts[1], parts[2]

    def _rotate(self, x: Tensor, out: Tensor, gain: float) -> Tensor:
        """out = gain * norm(rotated x); gives the factors. Rotating does not change the norm."""
        factor = ops.norm_factor(x).mul_(gain)
        ops.rotate_into(x, *self.owner.rotary, out)
        out.mul_(factor)
        return factor

    def _rotate_backward(self, dy: Tensor, y: Tensor, factor: Tensor, gain: float, out: Tensor) -> None:
        cos, sin = self.owner.rotary
        ops.rotate_into(norm_backward_(dy, y, factor, gain), cos, -sin, out)

    def _gate_values(self, a: Tensor, v: Tensor, ids: Tensor) -> None:
        """v += gate * value embeddings, per kv head."""
        gate = self.block.attn.ve_gate
        if gate is None or self.values is None:
            return
        rows = torch.index_select(self.values, 0, ids.flatten(), out=self.buffers.get("ve", *v.shape))
        self.sigmoid = torch.sigmoid_(a[:, :GATE_CHANNELS] @ gate.weight.t())
        heads = (self.config.n_kv_head, self.config.head_dim)
        v.unflatten(1, heads).addcmul_(rows.unflatten(1, heads), self.sigmoid.unsqueeze(-1), value=3)

    def _gate_backward(self, dv: Tensor, da: Tensor) -> None:
        """From dv [N, KV * D]: the rows of the value table, the gate's weight, and its share of da."""
        gate = self.block.attn.ve_gate
        if gate is None:
            return
        heads = (self.config.n_kv_head, self.config.head_dim)
        rows = self.buffers.get("ve", *dv.shape)
        dgate = torch.linalg.vecdot(dv.unflatten(1, heads), rows.unflatten(1, heads))
        dgate.mul_(self.sigmoid).mul_(1 - self.sigmoid).mul_(3)
        drows = dv.unflatten(1, heads) * self.sigmoid.unsqueeze(-1).mul(3)
        self.gradients.add_rows(f"value_embeds.{self.layer}.weight", self.owner.positions, drows.flatten(1))
        self.owner.ready(f"value_embeds.{self.layer}.weight")
        channels = self.buffers.get("a", *da.shape)[:, :GATE_CHANNELS]
        self.gradients.add_product(f"{self.name}.attn.ve_gate.weight", dgate.t(), channels)
        self.owner.ready(f"{self.name}.attn.ve_gate.weight")
        da[:, :GATE_CHANNELS].addmm_(dgate, gate.weight)

    def _attention_backward(self, d: Tensor) -> None:
        config, shared, get = self.config, self.owner.buffers, self.buffers.get
        o = get("o_NC", len(d), config.n_embd, dtype=self.owner.dtype)
        d_operand = self._operand("d_operand", d)
        self.gradients.add_product(f"{self.name}.attn.c_proj.weight", d_operand.t(), o)
        self.owner.ready(f"{self.name}.attn.c_proj.weight")
        do = product(d_operand, self.operands["o"], shared.get("da", *d.shape))
        dqkv = self._scores_backward(do)
        dv = dqkv[:, config.n_embd + config.kv_dim :]
        a, da = get("a", *d.shape), shared.get("da", *d.shape)
        dqkv_operand = self._operand("dqkv_operand", dqkv)
        product(dqkv_operand, self.operands["qkv"], da)
        self._gate_backward(dv, da)
        names = [f"{self.name}.attn.{part}.weight" for part in ("c_q", "c_k", "c_v")]
        self.gradients.add_product(names, dqkv_operand.t(), self._operand("a_operand", a))
        for name in names:
            self.owner.ready(name)
        d.add_(norm_backward_(da, a, self.a_factor))

    def _scores_backward(self, do_NC: Tensor) -> Tensor:
        """From the gradient of the attention's output to that of [q, k, v] [N, ...] before rotation and norm."""
        config = self.config
        dout = self._by_head("o", config.n_head).copy_(self._heads(do_NC, config.n_head))
        shapes = [(len(self.qkv[0]), *x.shape[1:]) for x in self.qkv]
        dq, dk, dv = (self.owner.buffers.get(f"d{n}", *s) for n, s in zip("qkv", shapes, strict=True))
        self.attention[self.owner.batch[1]].backward(self._grouped(dout), self.qkv, (dq, dk, dv))
        dqkv = self.owner.buffers.get("dqkv", len(do_NC), config.n_embd + 2 * config.kv_dim)
        q_out, k_out, v_out = dqkv.split([config.n_embd, config.kv_dim, config.kv_dim], dim=1)
        dq_heads, dk_heads, dv_heads = self._ungrouped(dq, config.n_head), self._ungrouped(dk), self._ungrouped(dv)
        q, k = self._by_head("q", config.n_head), self._by_head("k", config.n_kv_head)
        self._rotate_backward(dq_heads, q, self.q_factor, self.q_gain, self._heads(q_out, config.n_head))
        self._rotate_backward(dk_heads, k, self.k_factor, 1.0, self._heads(k_out, config.n_kv_head))
        self._heads(v_out, config.n_kv_head).copy_(dv_heads)
        return dqkv

    def _ungrouped(self, dx_MTD: Tensor, heads: int | None = None) -> Tensor:
        """[M, T, D] as [B, T, heads, D]; the query heads that share a kv head are summed."""
        heads = heads or self.config.n_kv_head
        by_row: Tensor = dx_MTD.unflatten(0, (self.owner.batch[0], heads, -1))
        return (by_row.sum(2) if by_row.size(2) > 1 else by_row[:, :, 0]).transpose(1, 2)


class TrainingPass:
    """Buffers and gradients of the training of one model."""

    def __init__(self, model: GPT, matmul: str = "fp32") -> None:
        self.model, self.dtype = model, MATMUL_TYPES[matmul]
        self.device = model.lm_head.weight.device
        self.step_gradients = Gradients(model)
        self.buffers = Buffers(self.device)
        self.head = HeadLoss(model.config.vocab_size)
        self.layers = [LayerPass(self, layer) for layer in range(model.config.n_layer)]
        self.dlambdas = torch.zeros(model.config.n_layer, 2, device=self.device)
        self.batch = (0, 0)
        self.rotary = (torch.empty(0), torch.empty(0))
        self.positions = torch.empty(0)
        self.lambdas: list[list[float]] = []
        self._on_ready: OnReady | None = None

    @property
    def gradients(self) -> dict[str, Tensor]:
        return self.step_gradients.tensors

    @property
    def ready_order(self) -> list[str]:
        return self.step_gradients.ready_order

    @property
    def token_ids(self) -> Tensor:
        return self.step_gradients.token_ids

    @torch.no_grad()
    def start_step(self, token_ids: Tensor) -> None:
        """token_ids: sorted, unique, all ids of the coming step. The weights are those of the last step by now."""
        self.step_gradients.start_step(token_ids)
        for layer in self.layers:
            layer.refresh()
        head = self.model.lm_head.weight[: self.model.config.vocab_size]
        self.head_weight = head if head.dtype == self.dtype else head.to(self.dtype)
        self.dlambdas.zero_()
        self.lambdas = torch.stack([self.model.resid_lambdas, self.model.x0_lambdas], dim=1).tolist()

    @torch.no_grad()
    def forward_backward(self, ids: Tensor, targets: Tensor, scale: float, on_ready: OnReady | None = None) -> Tensor:
        """Add this micro-batch's gradients; the result is its share of the step's loss (scale * sum of losses)."""
        self._prepare(ids)
        self._on_ready = on_ready
        start = x = self._embed(ids)
        backout = x
        for layer in self.layers:
            x = layer.forward(x, start, ids)
            if layer.layer == self.model.config.backout_layer:
                backout = x
        loss, d, dbackout = self._head(x, backout, targets, scale)
        dstart = self.buffers.get("dstart", *d.shape).zero_()
        for layer in reversed(self.layers):
            if layer.layer == self.model.config.backout_layer:
                d.add_(dbackout)
            d = layer.backward(d, dstart)
        self._scalars_ready()
        self._embed_backward(dstart.add_(d))
        return loss

    def ready(self, name: str) -> None:
        """Say that a gradient is complete."""
        if self._on_ready is not None:
            self._on_ready(name, self.gradients[name])

    def _prepare(self, ids: Tensor) -> None:
        """What depends on the batch alone."""
        tokens = ids.size(1)
        if self.rotary[0].size(0) != tokens:
            self.rotary = ops.rotary_tables(0, tokens, self.model.config.head_dim, self.device)
        self.batch = (ids.size(0), tokens)
        self.positions = self.step_gradients.positions(ids)

    def _embed(self, ids: Tensor) -> Tensor:
        """Normed embeddings, each with some of the one before."""
        model, (rows, tokens) = self.model, self.batch
        width, get = model.config.n_embd, self.buffers.get
        h = get("embedded", ids.numel(), width)
        self.h_factor = norm_into(torch.index_select(model.transformer.wte.weight, 0, ids.flatten()), h)
        h_BTC = h.view(rows, tokens, width)
        self.smear = torch.sigmoid_(h_BTC[:, 1:, :SMEAR_CHANNELS] @ model.smear_gate.weight.t())
        x = get("start", ids.numel(), width).copy_(h)
        x.view(rows, tokens, width)[:, 1:].addcmul_(h_BTC[:, :-1], self.smear * model.smear_lambda)
        return x

    def _embed_backward(self, dx: Tensor) -> None:
        model, (rows, tokens), gradients = self.model, self.batch, self.step_gradients
        dx_BTC, h = dx.view(rows, tokens, -1), self.buffers.get("embedded", *dx.shape)
        h_BTC = h.view(rows, tokens, -1)
        along = torch.linalg.vecdot(dx_BTC[:, 1:], h_BTC[:, :-1]).unsqueeze_(-1)
        gradients.add("smear_lambda", (along * self.smear).sum())
        dgate = along.mul_(model.smear_lambda).mul_(self.smear).mul_(1 - self.smear)
        dh = self.buffers.get("dh", *dx.shape).copy_(dx)
        dh_BTC = dh.view(rows, tokens, -1)
        dh_BTC[:, :-1].addcmul_(dx_BTC[:, 1:], self.smear * model.smear_lambda)
        dh_BTC[:, 1:, :SMEAR_CHANNELS].addcmul_(dgate, model.smear_gate.weight)
        gradients.add("smear_gate.weight", (dgate * h_BTC[:, 1:, :SMEAR_CHANNELS]).sum((0, 1)))
        self.ready("smear_lambda")
        self.ready("smear_gate.weight")
        gradients.add_rows(WTE, self.positions, norm_backward_(dh, h, self.h_factor))
        self.ready(WTE)

    def _scalars_ready(self) -> None:
        for column, name in enumerate(("resid_lambdas", "x0_lambdas")):
            self.gradients[name].copy_(self.dlambdas[:, column])
            self.ready(name)

    def _head(self, x: Tensor, backout: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and the gradients of x and of the backout."""
        get, gradients = self.buffers.get, self.step_gradients
        z = torch.addcmul(x, backout, self.model.backout_lambda, value=-1, out=get("z", *x.shape))
        y = get("y", *x.shape)
        factor = norm_into(z, y)
        capped = torch.mul(y, 1 / ops.SOFTCAP, out=get("capped", *x.shape, dtype=self.dtype))
        scaled = torch.mul(y, scale, out=get("scaled", *x.shape, dtype=self.dtype))
        d, targets = get("d", *x.shape), targets.flatten()
        loss = torch.zeros((), device=self.device)
        chunk = max(1, CHUNK_BYTES // (len(self.head_weight) * self.dtype.itemsize))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            chunk_loss, draw = self.head.chunk(capped[rows], self.head_weight, targets[rows])
            loss += chunk_loss
            product(draw, self.head_weight, d[rows], alpha=scale)
            gradients.add_head_product(draw.t(), scaled[rows])
        self.ready("lm_head.weight")
        norm_backward_(d, y, factor)
        gradients.add("backout_lambda", -torch.linalg.vecdot(d, backout).sum())
        self.ready("backout_lambda")
        dbackout = torch.mul(d, -self.model.backout_lambda, out=get("dbackout", *d.shape))
        return loss * scale, d, dbackout
