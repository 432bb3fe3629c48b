# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The layers of the training pass: forward stores what backward needs; backward reports completed gradients.

Shapes in names: N = rows * tokens, C = n_embd, B rows, T tokens, M = rows * heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from nanochat.model import kernels, ops
from nanochat.model.attention import Triple, WindowAttention
from nanochat.model.gpt import GPT, MLP
from nanochat.model.gradients import GradientPart, Gradients, product
from nanochat.rules.model_size import GATE_CHANNELS

OnReady = Callable[[GradientPart, Tensor], None]


class Buffers:
    """Named tensors that reuse their memory in every step, because fresh memory costs page faults."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor with undefined contents, reused if the shape is unchanged."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            tensor = self._tensors[name] = torch.empty(shape, dtype=dtype)
        return tensor

    def operand(self, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """x as an operand of products of this type: itself, or rounded."""
        return x if x.dtype == dtype else self.get(name, *x.shape, dtype=dtype).copy_(x)


class PassContext:
    """State shared by all layers of a pass: the batch, the gradients, and scratch buffers."""

    def __init__(self, model: GPT, dtype: torch.dtype, without: Collection[str]) -> None:
        self.dtype = dtype  # of the operands of the large products
        self.gradients = Gradients(model, without)
        self.buffers = Buffers()
        self.ids = self.positions = torch.empty(0)
        self.batch = (0, 0)  # rows and tokens
        self.rotary = (torch.empty(0), torch.empty(0))
        self.on_ready: OnReady | None = None

    def start_batch(self, ids: Tensor, head_dim: int, on_ready: OnReady | None) -> None:
        self.on_ready = on_ready
        self.batch, self.ids = (ids.size(0), ids.size(1)), ids.flatten()
        self.positions = torch.searchsorted(self.gradients.token_ids, self.ids)
        if len(self.rotary[0]) != ids.size(1):
            self.rotary = ops.rotary_tables(0, ids.size(1), head_dim)

    def ready(self, *names: str) -> None:
        """Report these gradients as complete."""
        for name in names:
            for part in self.gradients.parts[name]:
                self.part_ready(part)

    def part_ready(self, part: GradientPart) -> None:
        if self.on_ready is not None:
            self.on_ready(part, self.gradients.of(part))

    def operand(self, x: Tensor, name: str, keep: Buffers | None = None) -> Tensor:
        """x as an operand of large products."""
        return (keep or self.buffers).operand(x, name, self.dtype)


def norm_into(x: Tensor, out: Tensor) -> Tensor:
    """out = norm(x); returns one factor per row."""
    factor = ops.norm_factor(x)
    torch.mul(x, factor, out=out)
    return factor


class Normed:
    """A normed residual stream, with the data for its backward pass."""

    def __init__(self, context: PassContext, buffers: Buffers) -> None:
        self.context, self.buffers = context, buffers
        self.y = self.operand = self.factor = torch.empty(0)

    def forward(self, x: Tensor, mix: kernels.Mix | None = None) -> None:
        get = self.buffers.get
        self.y, self.factor = get("normed", *x.shape), get("factor", len(x), 1)
        narrow = self.context.dtype != self.y.dtype
        self.operand = get("operand", *x.shape, dtype=self.context.dtype) if narrow else self.y
        kernels.norm(x, mix, self.y, self.operand, self.factor)


class MlpPass:
    """u += c_proj(relu(c_fc(norm(u)))^2)."""

    def __init__(self, context: PassContext, mlp: MLP, name: str) -> None:
        self.context, self.mlp = context, mlp
        self.fc_name, self.proj_name = f"{name}.c_fc.weight", f"{name}.c_proj.weight"
        self.buffers = Buffers()
        self.normed = Normed(context, self.buffers)
        self.hidden = torch.empty(0)

    def refresh(self) -> None:
        """Take the weights as they are now."""
        self.fc = self.context.operand(self.mlp.c_fc.weight, "fc", self.buffers)
        self.proj = self.context.operand(self.mlp.c_proj.weight, "proj", self.buffers)

    def forward(self, u: Tensor) -> None:
        self.normed.forward(u)
        self.hidden = self.buffers.get("hidden", len(u), len(self.fc), dtype=self.context.dtype)
        torch.mm(self.normed.operand, self.fc.t(), out=self.hidden).relu_()
        product(self._square(), self.proj.t(), u, add=True)

    def _square(self) -> Tensor:
        """Computed again in the backward pass, because it is the largest tensor."""
        out = self.context.buffers.get("square", *self.hidden.shape, dtype=self.hidden.dtype)
        return torch.mul(self.hidden, self.hidden, out=out)

    def backward(self, d: Tensor) -> None:
        """d, the gradient after it, becomes that before it."""
        context, get = self.context, self.context.buffers.get
        d_operand = context.operand(d, "d_operand")
        square = self._square()
        context.gradients.add_product([self.proj_name], d_operand.t(), square)
        context.ready(self.proj_name)
        # Apply the square's factor 2 to the smallest tensor.
        twice = torch.mul(d_operand, 2, out=get("twice", *d.shape, dtype=d_operand.dtype))
        dhidden = torch.mm(twice, self.proj, out=square).mul_(self.hidden)
        context.gradients.add_product([self.fc_name], dhidden.t(), self.normed.operand)
        context.ready(self.fc_name)
        dnormed = product(dhidden, self.fc, get("dnormed", *d.shape))
        kernels.norm_backward(dnormed, self.normed.y, self.normed.factor, d)


class AttentionPass:
    """u += c_proj(attention(norm(u)))."""

    def __init__(self, context: PassContext, model: GPT, layer: int) -> None:
        self.context, self.config = context, model.config
        self.attn = model.transformer.block(layer).attn
        self.name, self.value_name = f"transformer.h.{layer}.attn", f"value_embeds.{layer}.weight"
        self.qkv_names = [f"{self.name}.{part}.weight" for part in ("c_q", "c_k", "c_v")]
        self.table = model.value_table(layer) if self.attn.ve_gate is not None else None
        self.window = model.windows[layer]
        self.buffers = Buffers()
        self.scores: dict[int, WindowAttention] = {}  # by length of the sequences
        # Both gains of q and k and the softmax's scale, all applied to q.
        self.q_gain = ops.QK_SCALE**2 / math.sqrt(model.config.head_dim)
        self.normed = Normed(context, self.buffers)
        self.out = self.gate = self.values = torch.empty(0)

    def refresh(self) -> None:
        """Read the current weights, with q, k and v as one matrix."""
        parts = [self.attn.c_q.weight, self.attn.c_k.weight, self.attn.c_v.weight]
        shape = (sum(map(len, parts)), self.config.n_embd)
        self.qkv_weight = self.buffers.get("qkv_weight", *shape, dtype=self.context.dtype)
        for target, part in zip(self.qkv_weight.chunk(3), parts, strict=True):
            target.copy_(part)
        self.proj = self.context.operand(self.attn.c_proj.weight, "proj", self.buffers)

    def _heads(self, x_NC: Tensor) -> Tensor:
        """[N, heads * D] as [B, T, heads, D]."""
        split: Tensor = x_NC.unflatten(1, (-1, self.config.head_dim)).unflatten(0, self.context.batch)
        return split

    def _by_head(self, name: str) -> Tensor:
        """A buffer [B, heads, T, D]."""
        rows, tokens = self.context.batch
        return self.buffers.get(name, rows, self.config.n_head, tokens, self.config.head_dim)

    def _qkv_by_head(self) -> Triple:
        return self._by_head("q"), self._by_head("k"), self._by_head("v")

    def forward(self, x: Tensor, mix: kernels.Mix) -> None:
        """Adds to u, the mix of x and the start."""
        tokens, u = self.context.batch[1], mix.u
        self.normed.forward(x, mix)
        qkv = self.context.buffers.get("qkv", len(u), len(self.qkv_weight))
        product(self.normed.operand, self.qkv_weight.t(), qkv)
        self._place_heads(*qkv.chunk(3, dim=1))
        if tokens not in self.scores:
            self.scores[tokens] = WindowAttention(tokens, self.window)
        out = self._by_head("out")
        self.scores[tokens].forward(*self._qkv_by_head(), out)
        self.out = self.buffers.get("out_NC", *u.shape, dtype=self.context.dtype)
        self._heads(self.out).copy_(out.transpose(1, 2))
        product(self.out, self.proj.t(), u, add=True)

    def _place_heads(self, q_NC: Tensor, k_NC: Tensor, v_NC: Tensor) -> None:
        """Turn products into the inputs of attention: gated, rotated, normed, by head."""
        q, k, v = self._qkv_by_head()
        for x, out, name, gain in ((q_NC, q, "q_factor", self.q_gain), (k_NC, k, "k_factor", 1.0)):
            factor = self.buffers.get(name, len(x), self.config.n_head)
            kernels.rotate(x, out, factor, self.context.rotary, gain)
        self._add_values(v_NC)
        v.transpose(1, 2).copy_(self._heads(v_NC))

    def _add_values(self, v: Tensor) -> None:
        """v += 3 * sigmoid(gate) * value embedding, by head."""
        if self.table is None or self.attn.ve_gate is None:
            return
        self.values = torch.index_select(self.table, 0, self.context.ids, out=self.buffers.get("values", *v.shape))
        self.gate = torch.sigmoid_(self.normed.y[:, :GATE_CHANNELS] @ self.attn.ve_gate.weight.t())
        self._heads(v).addcmul_(self._heads(self.values), self._per_head(self.gate), value=3)

    def _per_head(self, gate: Tensor) -> Tensor:
        """[N, heads] as [B, T, heads, 1]."""
        per_head: Tensor = gate.unflatten(0, self.context.batch).unsqueeze(-1)
        return per_head

    def backward(self, d: Tensor) -> None:
        """d, the gradient after it, becomes that before it."""
        context, get = self.context, self.context.buffers.get
        d_operand = context.operand(d, "d_operand")
        context.gradients.add_product([f"{self.name}.c_proj.weight"], d_operand.t(), self.out)
        context.ready(f"{self.name}.c_proj.weight")
        dout = product(d_operand, self.proj, get("dout", *d.shape))
        dqkv = self._scores_backward(dout)
        dqkv_operand = context.operand(dqkv, "dqkv_operand")
        dnormed = product(dqkv_operand, self.qkv_weight, get("dnormed", *d.shape))
        self._values_backward(dqkv.chunk(3, dim=1)[2], dnormed)
        context.gradients.add_product(self.qkv_names, dqkv_operand.t(), self.normed.operand)
        context.ready(*self.qkv_names)
        kernels.norm_backward(dnormed, self.normed.y, self.normed.factor, d)

    def _scores_backward(self, dout_NC: Tensor) -> Tensor:
        """The gradients of the products q, k, v, side by side."""
        context, get = self.context, self.context.buffers.get
        q, k, v = self._qkv_by_head()
        dout = self._by_head("out")
        dout.transpose(1, 2).copy_(self._heads(dout_NC))
        dq, dk, dv = (get(f"d{name}", *q.shape) for name in "qkv")
        self.scores[context.batch[1]].backward(dout, (q, k, v), (dq, dk, dv))
        dqkv = get("qkv", len(dout_NC), len(self.qkv_weight))
        q_out, k_out, v_out = dqkv.chunk(3, dim=1)
        for dy, y, name, gain, into in ((dq, q, "q_factor", self.q_gain, q_out), (dk, k, "k_factor", 1.0, k_out)):
            factor = self.buffers.get(name, len(into), self.config.n_head)
            kernels.rotate_backward(dy, y, factor, context.rotary, gain, into)
        self._heads(v_out).copy_(dv.transpose(1, 2))
        return dqkv

    def _values_backward(self, dv: Tensor, dnormed: Tensor) -> None:
        """The gradients of the value embeddings and of the gate, and the gate's share of dnormed."""
        if self.attn.ve_gate is None:
            return
        context, gate_name = self.context, f"{self.name}.ve_gate.weight"
        dvalues = self._heads(dv) * self._per_head(self.gate).mul(3)
        context.gradients.add_rows(self.value_name, context.positions, dvalues.flatten(2).flatten(0, 1))
        context.ready(self.value_name)
        dgate = torch.linalg.vecdot(self._heads(dv), self._heads(self.values)).flatten(0, 1)
        dgate.mul_(self.gate).mul_(1 - self.gate).mul_(3)
        context.gradients.add_product([gate_name], dgate.t(), self.normed.y[:, :GATE_CHANNELS])
        context.ready(gate_name)
        dnormed[:, :GATE_CHANNELS].addmm_(dgate, self.attn.ve_gate.weight)


class LayerPass:
    """u = resid * x + x0 * start, then attention and MLP."""

    def __init__(self, context: PassContext, model: GPT, layer: int) -> None:
        self.attention = AttentionPass(context, model, layer)
        self.mlp = MlpPass(context, model.transformer.block(layer).mlp, f"transformer.h.{layer}.mlp")
        self.buffers = Buffers()
        self.x = self.start = torch.empty(0)
        self.resid = self.x0 = 0.0
        self.dlambdas = torch.zeros(2)  # of resid and x0

    def refresh(self, resid: float, x0: float) -> None:
        """Begin a step: read the current weights and lambdas."""
        self.resid, self.x0 = resid, x0
        self.dlambdas.zero_()
        self.attention.refresh()
        self.mlp.refresh()

    def forward(self, x_NC: Tensor, start_NC: Tensor) -> Tensor:
        """Returns the residual stream after this layer."""
        self.x, self.start = x_NC, start_NC
        u = self.buffers.get("u", *x_NC.shape)
        self.attention.forward(x_NC, kernels.Mix(start_NC, u, self.resid, self.x0))
        self.mlp.forward(u)
        return u

    def backward(self, d_NC: Tensor, dstart_NC: Tensor) -> None:
        """Turn d, the gradient after this layer, into the one before it; adds to dstart."""
        self.mlp.backward(d_NC)
        self.attention.backward(d_NC)
        self.dlambdas[0] += torch.linalg.vecdot(d_NC, self.x).sum(dtype=torch.float64)
        self.dlambdas[1] += torch.linalg.vecdot(d_NC, self.start).sum(dtype=torch.float64)
        dstart_NC.add_(d_NC, alpha=self.x0)
        d_NC.mul_(self.resid)
