# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training pass: hand-written loss and gradients, one micro-batch at a time.

    training = TrainingPass(model)
    training.start_step(token_ids)                          # all ids of this step, of every rank
    for ids, targets in micro_batches:
        loss += training.forward_backward(ids, targets, scale, on_ready if it is the last else None)
    training.gradients                                      # name -> tensor, see gradients.py

`scale` is 1 / (targets of the whole step over all ranks), so that losses and gradients of all micro-batches and ranks
can be summed.

`on_ready(part, gradient)` is called during the last micro-batch as soon as a part of a gradient is complete, in
`training.ready_order`: first the head, block by block and before the gradient of its input, then the layers from last
to first, then scalars and wte. Gradients are the same tensor objects in every step, and may be summed in place.

matmul="bf16" rounds the operands of linear layers to bfloat16; everything else stays float32.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from nanochat.kit.common import UserError
from nanochat.model.gpt import GPT
from nanochat.model.gradients import HEAD, MATMUL_TYPES, WTE, is_table, unique_ids
from nanochat.model.head import Head, WholeHead
from nanochat.model.kernels import KernelShape, norm_backward_
from nanochat.model.layers import LayerPass, OnReady, PassContext, norm_into
from nanochat.rules.causes import Cause
from nanochat.rules.model_size import SMEAR_CHANNELS, ModelConfig

TRIAL_TOKENS = 2048  # more would take memory that a run may need
# The small model whose gradients are compared with autograd's: two kinds of layers, and more tokens than a block of queries.
PROOF = ModelConfig(sequence_len=140, vocab_size=60, n_layer=3, n_head=2, n_kv_head=2, n_embd=32, window_pattern="SL")
WORST_LOSS, WORST_GRADIENT = 1e-5, 0.01  # relative to the largest element; rounding makes a hundredth of that


def kernel_shape(config: ModelConfig, batch: int, matmul: str) -> KernelShape:
    """Tensor shapes for kernels in a pass of this many rows, limited to what a trial needs."""
    tokens = min(config.sequence_len, TRIAL_TOKENS)
    return KernelShape(
        rows=max(1, min(batch, TRIAL_TOKENS // tokens)) * tokens,
        tokens=tokens,
        width=config.n_embd,
        heads=config.n_head,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        dtype=MATMUL_TYPES[matmul],
    )


class TrainingPass:
    """Buffers and gradients for training one model."""

    def __init__(self, model: GPT, matmul: str = "fp32", shared_head: Head | None = None) -> None:
        self.model = model
        self.context = PassContext(model, MATMUL_TYPES[matmul], without=(HEAD,) if shared_head else ())
        self.step_gradients = self.context.gradients
        self.gradients, self.ready_order = self.step_gradients.tensors, self.step_gradients.ready_order
        self.layers = [LayerPass(self.context, model, layer) for layer in range(model.config.n_layer)]
        whole = WholeHead(self.context, model.lm_head.weight.detach(), model.config.vocab_size)
        self.head: Head = shared_head or whole
        self.h_factor = self.smear = torch.empty(0)

    @property
    def token_ids(self) -> Tensor:
        return self.step_gradients.token_ids

    @torch.no_grad()
    def start_step(self, token_ids: Tensor) -> None:
        """token_ids: sorted, unique, all ids of the coming step. All weights must be up to date."""
        self.step_gradients.start_step(token_ids)
        resid, x0 = self.model.resid_lambdas.tolist(), self.model.x0_lambdas.tolist()
        for layer, resid_lambda, x0_lambda in zip(self.layers, resid, x0, strict=True):
            layer.refresh(resid_lambda, x0_lambda)
        self.head.start_step()

    @torch.no_grad()
    def forward_backward(self, ids: Tensor, targets: Tensor, scale: float, on_ready: OnReady | None = None) -> Tensor:
        """Add this micro-batch's gradients; the result is its share of the step's loss (scale * sum of losses)."""
        self.context.start_batch(ids, self.model.config.head_dim, on_ready)
        self.head.start_pass()
        backout_layer = self.layers[self.model.config.backout_layer]
        x = start = backout = self._embed()
        for layer in self.layers:
            x = layer.forward(x, start)
            if layer is backout_layer:
                backout = x
        loss, d, dbackout = self._head(x, backout, targets.flatten(), scale)
        dstart = self.context.buffers.get("dstart", *d.shape).zero_()
        for layer in reversed(self.layers):
            if layer is backout_layer:
                d.add_(dbackout)
            layer.backward(d, dstart)
        dlambdas = torch.stack([layer.dlambdas for layer in self.layers])
        for column, name in enumerate(("resid_lambdas", "x0_lambdas")):
            self.gradients[name].copy_(dlambdas[:, column])
            self.context.ready(name)
        self._embed_backward(dstart.add_(d))
        return loss

    def _embed(self) -> Tensor:
        """Normed embeddings, each smeared with its predecessor."""
        model, ids, get = self.model, self.context.ids, self.context.buffers.get
        h = get("embedded", len(ids), model.config.n_embd)
        self.h_factor = norm_into(torch.index_select(model.transformer.wte.weight, 0, ids), h)
        h_BTC = h.unflatten(0, self.context.batch)
        self.smear = torch.sigmoid_(h_BTC[:, 1:, :SMEAR_CHANNELS] @ model.smear_gate.weight.t())
        x = get("start", *h.shape).copy_(h)
        x.unflatten(0, self.context.batch)[:, 1:].addcmul_(h_BTC[:, :-1], self.smear * model.smear_lambda)
        return x

    def _embed_backward(self, dx: Tensor) -> None:
        model, gradients, get = self.model, self.step_gradients, self.context.buffers.get
        h, dh = get("embedded", *dx.shape), get("dh", *dx.shape).copy_(dx)
        dx_BTC, h_BTC, dh_BTC = (x.unflatten(0, self.context.batch) for x in (dx, h, dh))
        along = torch.linalg.vecdot(dx_BTC[:, 1:], h_BTC[:, :-1]).unsqueeze_(-1)
        gradients.add("smear_lambda", (along * self.smear).sum(dtype=torch.float64))
        dgate = along.mul_(model.smear_lambda).mul_(self.smear).mul_(1 - self.smear)
        gradients.add("smear_gate.weight", (dgate * h_BTC[:, 1:, :SMEAR_CHANNELS]).sum((0, 1), dtype=torch.float64))
        self.context.ready("smear_lambda", "smear_gate.weight")
        dh_BTC[:, :-1].addcmul_(dx_BTC[:, 1:], self.smear * model.smear_lambda)
        dh_BTC[:, 1:, :SMEAR_CHANNELS].addcmul_(dgate, model.smear_gate.weight)
        gradients.add_rows(WTE, self.context.positions, norm_backward_(dh, h, self.h_factor))
        self.context.ready(WTE)

    def _head(self, x: Tensor, backout: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and the gradients of x and the backout."""
        get, backout_lambda = self.context.buffers.get, self.model.backout_lambda
        y = get("y", *x.shape)
        factor = norm_into(torch.addcmul(x, backout, backout_lambda, value=-1, out=get("z", *x.shape)), y)
        loss, d = self.head.loss_and_gradient(y, targets, scale)
        norm_backward_(d, y, factor)
        self.step_gradients.add("backout_lambda", -torch.linalg.vecdot(d, backout).sum(dtype=torch.float64))
        self.context.ready("backout_lambda")
        return loss, d, torch.mul(d, -backout_lambda, out=get("dbackout", *d.shape))


def check_gradients() -> None:
    """Refuse a training pass whose loss and gradients are not those of autograd through the plain model (gpt.py), in a small model
    with nothing zero, or that does not report them in their order; and a model of which init_weights leaves a part unfilled. Takes some
    hundredths of a second."""
    model, generator = GPT(PROOF), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
        model.init_weights()
        if unfilled := [name for name, parameter in model.named_parameters() if parameter.isnan().any()]:
            raise UserError(f"init_weights leaves {', '.join(unfilled)} unfilled; fill every parameter.", Cause.BUG)
        for name, parameter in model.named_parameters():
            parameter.normal_(float(name == "resid_lambdas"), 0.1, generator=generator)
    ids, targets = torch.randint(PROOF.vocab_size, (2, 2, PROOF.sequence_len), generator=generator)
    training = TrainingPass(model)
    training.start_step(unique_ids([ids]))
    reported: list[str] = []
    scale = 1 / ids.numel()
    # Two micro-batches, since gradients must add up.
    loss = training.forward_backward(ids[:1], targets[:1], scale)
    loss += training.forward_backward(ids[1:], targets[1:], scale, lambda part, dummy: reported.append(part.name))
    found = {"loss": loss}
    loss = model.losses(ids, targets).mean()
    wanted, parameters = {"loss": loss.detach()}, dict(model.named_parameters())
    # In the order of the backward pass, so that the first one that differs shows where the fault is.
    order = training.ready_order
    if missed := next((name for name, at in itertools.zip_longest(order, dict.fromkeys(reported)) if name != at), None):
        raise UserError(
            f"the training pass does not report the gradient of {missed} in its turn, so other ranks would wait for it; call ready() in "
            "its backward pass, in the order of gradients.py.",
            Cause.BUG,
        )
    gradients = torch.autograd.grad(loss, [parameters[name] for name in order], materialize_grads=True)
    for name, gradient in zip(order, gradients, strict=True):
        found[f"gradient of {name}"] = training.gradients[name]
        wanted[f"gradient of {name}"] = gradient[training.token_ids] if is_table(name) else gradient
    for what, tensor in wanted.items():
        if not tensor.any():
            raise UserError(
                f"the {what} is zero: the model in gpt.py does not use that parameter; use or remove it.", Cause.BUG
            )
        error = float((found[what] - tensor).abs().max() / tensor.abs().max())
        if math.isnan(error) or error > (WORST_LOSS if what == "loss" else WORST_GRADIENT):
            raise UserError(
                f"the {what} in the training pass is not that of the model in gpt.py (it differs by {error:.1g} of its size); correct the "
                f"{'forward pass' if what == 'loss' else 'backward pass there or just before it'}, in layers.py and fused.py.",
                Cause.BUG,
            )
