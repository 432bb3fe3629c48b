# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training pass: loss and gradients of one micro-batch at a time.

    training = TrainingPass(model)
    training.start_step(token_ids)                          # all ids of this step, of every rank
    for ids, targets in micro_batches:
        loss += training.forward_backward(ids, targets, scale, on_ready if it is the last else None)
    training.gradients                                      # name -> tensor

`scale` is 1 / (targets of the whole step over all ranks): the losses and the gradients of all micro-batches and
ranks are then simply summed.

A gradient is a tensor named like its parameter. For the embedding tables (wte and the value tables) it holds
rows only: row n is the gradient of table row `training.token_ids[n]`, and token_ids (sorted, unique) serves all tables.
Ranks that start a step with the same token_ids can thus sum every gradient as it is.

`on_ready(name, gradient)` is called during the last micro-batch as soon as a gradient is complete, in the order of
`training.ready_order`: the head first, then the layers from the last to the first, wte and the scalars at the end.
The tensors are the same objects in every step (of the rows, the first len(token_ids)) and may be summed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nanochat import ops
from nanochat.model import GPT

OnReady = Callable[[str, Tensor], None]


def unique_ids(batches: Sequence[Tensor]) -> Tensor:
    """The token ids of a step's batches, each once, sorted."""
    return torch.unique(torch.cat([batch.flatten() for batch in batches]))


def table_names(model: GPT) -> list[str]:
    """The parameters whose gradient is rows."""
    return ["transformer.wte.weight", *(f"value_embeds.{layer}.weight" for layer in model.value_embeds)]


def ready_order(model: GPT) -> list[str]:
    """The names of all gradients, in the order in which the last micro-batch completes them."""
    names = [name for name, dummy in model.named_parameters()]
    ordered = ["lm_head.weight", "backout_lambda"]
    for layer in reversed(range(model.config.n_layer)):
        attn = [f"transformer.h.{layer}.attn.{part}.weight" for part in ("c_proj", "ve_gate", "c_q", "c_k", "c_v")]
        mlp = [f"transformer.h.{layer}.mlp.{part}.weight" for part in ("c_proj", "c_fc")]
        ordered += [*mlp, attn[0], f"value_embeds.{layer}.weight", *attn[1:]]
    ordered += ["resid_lambdas", "x0_lambdas", "smear_lambda", "smear_gate.weight", "transformer.wte.weight"]
    return [name for name in ordered if name in names]


class TrainingPass:
    """Buffers and gradients of the training of one model."""

    def __init__(self, model: GPT, matmul: str = "fp32") -> None:
        self.model, self.matmul = model, matmul
        self.gradients: dict[str, Tensor] = {}
        self.token_ids = torch.empty(0, dtype=torch.int64)
        self.ready_order = ready_order(model)

    def start_step(self, token_ids: Tensor) -> None:
        """token_ids: sorted, unique, all ids of the coming step."""
        self.token_ids = token_ids
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward_backward(self, ids: Tensor, targets: Tensor, scale: float, on_ready: OnReady | None = None) -> Tensor:
        """Add this micro-batch's gradients; the result is its share of the step's loss (scale * sum of losses)."""
        with torch.enable_grad():
            x = self.model.hidden(ids)
            logits = ops.logits(x, self.model.lm_head.weight, self.model.config.vocab_size)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
            loss = losses * scale
            loss.backward()
        tables = table_names(self.model)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.gradients[name] = parameter.grad[self.token_ids] if name in tables else parameter.grad
        if on_ready is not None:
            for name in self.ready_order:
                on_ready(name, self.gradients[name])
        return loss.detach()
