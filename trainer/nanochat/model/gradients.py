# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gradients of one step: their memory, accumulation and completion.

A gradient is a tensor named like its parameter. Dense ones are contiguous in `flat`, in `ready_order`. Those of the
embedding tables (wte and the value tables) hold only rows: row n belongs to table row `token_ids[n]`, and all tables
share token_ids (sorted, unique). Ranks that started a step with the same token_ids can sum all gradients directly.

A part is completed at once: a whole gradient, or a block of rows of the head's, which is by far the largest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.kit.common import UserError
from nanochat.model import kernels
from nanochat.model.gpt import GPT

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
# Size of a block of the head's gradient; large enough for its product to be as fast as the whole one's.
BLOCK_BYTES = 2**22
MATMUL_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of the operands of products


class GradientPart(NamedTuple):
    """Rows of a parameter's gradient that are completed and sent together."""

    name: str
    start: int
    stop: int
    label: str  # for messages: the name, and the rows unless all

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def is_table(name: str) -> bool:
    """Whether this parameter's gradient holds only rows."""
    return name == WTE or name.startswith("value_embeds.")


def unique_ids(batches: Sequence[Tensor]) -> Tensor:
    """Sorted unique token ids of a step's batches."""
    ids: Tensor = torch.unique(torch.cat([batch.flatten() for batch in batches]))
    return ids


def ready_order(model: GPT) -> list[str]:
    """Names of all gradients in the order in which the last micro-batch completes them and reports each (PassContext.ready)."""
    ordered = [HEAD, "backout_lambda"]
    for layer in reversed(range(model.config.n_layer)):
        block = f"transformer.h.{layer}"
        ordered += [f"{block}.mlp.c_proj.weight", f"{block}.mlp.c_fc.weight", f"{block}.attn.c_proj.weight"]
        ordered += [f"value_embeds.{layer}.weight", f"{block}.attn.ve_gate.weight"]
        ordered += [f"{block}.attn.{part}.weight" for part in ("c_q", "c_k", "c_v")]
    ordered += ["resid_lambdas", "x0_lambdas", "smear_lambda", "smear_gate.weight", WTE]
    names = [name for name, dummy in model.named_parameters()]
    if unknown := set(names) - set(ordered):
        raise UserError(
            f"the model has parameters without a gradient: {', '.join(sorted(unknown))}; compute each in the training pass, report it by "
            "ready(), and list it in the order of gradients.py."
        )
    return [name for name in ordered if name in names]


def parts(name: str, shape: torch.Size) -> list[GradientPart]:
    """The head's gradient in blocks of rows, any other in one part."""
    rows = shape[0]
    size = max(1, BLOCK_BYTES // (4 * shape[1])) if name == HEAD else rows
    if size >= rows:
        return [GradientPart(name, 0, rows, name)]
    starts = range(0, rows, size)
    return [GradientPart(name, start, min(start + size, rows), f"{name} from row {start} on") for start in starts]


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b; a and b may have a narrower type than out."""
    if a.dtype != out.dtype:
        result = torch.mm(a, b)
        if not add:
            return out.copy_(result)
        if out.is_contiguous():
            kernels.accumulate(out, result)
            return out
        return out.add_(result)
    return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


class Bucket:
    """Tensors that are contiguous in one: that one, flat, and views of it by name."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        sizes = [shape.numel() for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes))
        parts = torch.split(self.flat, sizes)
        self.views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


class Gradients:
    """Named gradients of one model, overwritten in every step, to which each micro-batch adds."""

    def __init__(self, model: GPT, without: Collection[str]) -> None:
        """without: parameters whose gradients are handled elsewhere."""
        self.ready_order = [name for name in ready_order(model) if name not in without]
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.parts = {name: parts(name, self._shapes[name]) for name in self.ready_order}
        dense = Bucket({name: self._shapes[name] for name in self.ready_order if not is_table(name)})
        self.flat, self.tensors = dense.flat, dense.views
        self.token_ids = torch.empty(0, dtype=torch.int64)
        self._rows: dict[str, Tensor] = {}
        self._written: set[str] = set()  # labels of parts

    def start_step(self, token_ids: Tensor) -> None:
        """Begin a step, with rows for token_ids."""
        self._written.clear()
        self.token_ids = token_ids
        count = len(token_ids)
        for name in filter(is_table, self.ready_order):
            if name not in self._rows or len(self._rows[name]) < count:
                self._rows[name] = torch.empty(count + count // 4, self._shapes[name][1])
            self.tensors[name] = self._rows[name][:count].zero_()

    def of(self, part: GradientPart) -> Tensor:
        """The gradient of a part."""
        return self.tensors[part.name][part.rows]

    def add_product(self, names: Sequence[str], a: Tensor, b: Tensor) -> None:
        """Add a @ b to a gradient, or to several that are adjacent in `flat`."""
        rows, columns = sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1]
        start = self.tensors[names[0]].storage_offset()
        out = self.flat[start : start + rows * columns].view(rows, columns)
        product(a, b, out, add=self._grown(names))

    def add_head_product(self, part: GradientPart, a: Tensor, b: Tensor) -> None:
        """The same for the rows of a part of the head; a covers only the real vocabulary, so the padding's gradient
        stays zero."""
        a = a[part.rows]
        product(a, b, self.of(part)[: len(a)], add=self._grown([part.label]))

    def add(self, name: str, value: Tensor) -> None:
        """Add to a small gradient."""
        target = self.tensors[name]
        if self._grown([name]):
            target.add_(value.view_as(target))
        else:
            target.copy_(value.view_as(target))

    def add_rows(self, name: str, positions: Tensor, rows: Tensor) -> None:
        """Add one row per token to the gradient of a table."""
        self.tensors[name].index_add_(0, positions, rows)

    def _grown(self, labels: Sequence[str]) -> bool:
        """Whether these were already written in this step."""
        known = labels[0] in self._written
        self._written.update(labels)
        return known
