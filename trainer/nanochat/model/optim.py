# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AdamW for embeddings, head and scalars, Muon for the layers' matrices.

One rank on its own:

    optimizer.prepare(token_ids)                # before the forward pass: bring the rows that it reads up to date
    optimizer.step(gradients, token_ids, schedule)
    optimizer.catch_up()                        # before evaluating or saving: bring all rows up to date

With several ranks a step is split, to overlap with communication; after `start_step`, in any order:

    optimizer.start_step(schedule)
    optimizer.update(name, gradient, token_ids) # AdamW; every rank, for all of every name in adamw_names
    directions = optimizer.directions({name: gradient})     # Muon; the owner of a matrix computes its direction
    optimizer.apply(name, direction)            # every rank, with the same bits of the direction

Table rows that a step does not use have a zero gradient, but AdamW still decays them and applies their momentum. We
postpone those updates until the row is read or its turn comes (every REFRESH_STEPS steps), using the same kernel and
numbers, so the result is bit-identical to a dense optimizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.kit.common import UserError
from nanochat.model import kernels
from nanochat.model.gpt import GPT
from nanochat.model.gradients import HEAD, MATMUL_TYPES, is_table
from nanochat.model.kernels import EPSILON, AdamWConstants
from nanochat.model.layers import Buffers
from nanochat.rules.causes import Cause
from nanochat.rules.schedule import StepSchedule

FIXED_LR = 0.2  # of smear and backout, independent of the batch
SECOND_MOMENT_BETA = 0.9
REFRESH_STEPS = 32
CATCH_UP_ROWS = 1024  # few enough to stay in the cache
ALL_ROWS = slice(None)
ELONGATED = 2  # at this ratio of the sides or more, Gram matrices are cheaper
BATCH_ELEMENTS = 2**23  # of matrices that Muon processes at once
PolarCoefficients = Sequence[tuple[float, float, float]]
ADAMW, MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer", "second_momentum_buffer")
POLAR_COEFFICIENTS: PolarCoefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class LearningRates(NamedTuple):
    """As given on the command line, times the batch scale."""

    embedding: float = 0.3
    unembedding: float = 0.008
    matrix: float = 0.02
    scalar: float = 0.5

    def scaled(self, factor: float) -> LearningRates:
        return LearningRates(*(rate * factor for rate in self))


def adamw_groups(model: GPT, rates: LearningRates) -> dict[str, AdamWConstants]:
    """AdamW's constants by parameter name, in upstream's order; Muon updates all other parameters, which must be matrices."""
    width_scale = math.sqrt(768 / model.config.n_embd)
    groups = {
        "lm_head.weight": AdamWConstants(rates.unembedding * width_scale, 0.8, 0.96, 0.01),
        "transformer.wte.weight": AdamWConstants(rates.embedding * width_scale, 0.8, 0.995, 0.001),
    }
    for layer in model.value_embeds:
        groups[f"value_embeds.{layer}.weight"] = AdamWConstants(rates.embedding * width_scale / 2, 0.8, 0.995, 0.01)
    groups["resid_lambdas"] = AdamWConstants(rates.scalar * 0.01, 0.8, 0.95, 0.05)
    groups["x0_lambdas"] = AdamWConstants(rates.scalar, 0.96, 0.95, 0.0)
    for name in ("smear_gate.weight", "smear_lambda", "backout_lambda"):
        groups[name] = AdamWConstants(FIXED_LR, 0.8, 0.95, 0.0)
    return groups


class Undo:
    """Copies of what an update changes, to take it back if it cannot be finished."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor | None, Tensor]] = []
        self._buffers = Buffers()

    def keep(self, rows: Tensor | None, *tensors: Tensor) -> None:
        """Copy these tensors, or some rows of each."""
        for tensor in tensors:
            if rows is not None:
                copy = tensor.index_select(0, rows)
            else:
                copy = self._buffers.get(str(len(self.kept)), *tensor.shape, dtype=tensor.dtype).copy_(tensor)
            self.kept.append((tensor, rows, copy))

    def take_back(self) -> None:
        """Restore all copies."""
        for tensor, rows, copy in self.kept:
            if rows is None:
                tensor.copy_(copy)
            else:
                tensor.index_copy_(0, rows, copy)
        self.kept.clear()


class DenseAdamW:
    """AdamW that updates a parameter, or some of its rows, completely in every step, at once or in blocks of rows."""

    def __init__(self, parameter: Tensor, group: AdamWConstants, part: slice = ALL_ROWS) -> None:
        self.parameter, self.group, self.part = parameter[part], group, part
        self.m, self.v = torch.zeros_like(self.parameter), torch.zeros_like(self.parameter)

    def update(self, gradient: Tensor, multiplier: float, step: int, rows: slice = ALL_ROWS) -> None:
        kernels.adamw(kernels.AdamWTable(*self.at(rows)), None, gradient, [self.group.at(multiplier, step)])

    def at(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """What an update of these rows changes."""
        return self.parameter[rows], self.m[rows], self.v[rows]

    def state_dict(self) -> dict[str, Tensor]:
        """All rows must be up to date."""
        return {"exp_avg": self.m, "exp_avg_sq": self.v}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """state: of the whole parameter."""
        self.m.copy_(state["exp_avg"][self.part])
        self.v.copy_(state["exp_avg_sq"][self.part])


class RowAdamW(DenseAdamW):
    """AdamW of one table. Updates of rows without a gradient are postponed, with the same result."""

    def __init__(self, parameter: Tensor, group: AdamWConstants) -> None:
        super().__init__(parameter, group)
        # The step to which each row is up to date.
        self.current = torch.zeros(len(parameter), dtype=torch.int32)
        self.turn_length = -(-len(parameter) // REFRESH_STEPS)

    def rows_in_turn(self, step: int) -> Tensor:
        turns = -(-len(self.parameter) // self.turn_length)
        start = step % turns * self.turn_length
        end = min(start + self.turn_length, len(self.parameter))
        return torch.arange(start, end)

    def update_rows(self, rows: Tensor, gradient: Tensor, multiplier: float, step: int) -> None:
        """Make step `step` of rows that are up to date with the previous one."""
        kernels.adamw(self.table(), rows, gradient, [self.group.at(multiplier, step)])

    def advance(self, rows: Tensor, history: Mapping[int, float], step: int) -> None:
        """Make the rows' postponed updates up to `step`."""
        first = int(self.current[rows].min()) + 1 if len(rows) else step + 1
        if first <= step:
            missed = [self.group.at(history[number], number) for number in range(first, step + 1)]
            kernels.adamw(self.table(), rows, None, missed)

    def table(self) -> kernels.AdamWTable:
        return kernels.AdamWTable(self.parameter, self.m, self.v, self.current)


class Muon:
    """Muon for the layers' matrices. Has state only for matrices whose direction was computed here.

    Matrices of one shape are processed together. dtype: of the products' operands.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lr: float, dtype: torch.dtype = torch.float32) -> None:
        self.parameters, self.lr, self.dtype = dict(parameters), lr, dtype
        self.momentum: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def directions(self, gradients: Mapping[str, Tensor], momentum: float) -> dict[str, Tensor]:
        """The update directions of the given matrices, before learning rate and decay."""
        result: dict[str, Tensor] = {}
        for names in batches_by_shape(gradients):
            first = gradients[names[0]]
            g_KRC = first.new_empty(len(names), *first.shape)
            for name, g in zip(names, g_KRC, strict=True):
                m = self.momentum.get(name)
                if m is None:
                    m = self.momentum[name] = torch.zeros_like(gradients[name])
                m.lerp_(gradients[name], 1 - momentum)
                torch.lerp(gradients[name], m, momentum, out=g)
            x_KRC = orthogonalized(equilibrated(g_KRC, self.dtype))
            result.update(zip(names, self._reduced_variance(names, x_KRC), strict=True))
        return result

    def _reduced_variance(self, names: list[str], x_KRC: Tensor) -> Tensor:
        """Scale each line by its running magnitude, and the matrix to the Frobenius norm sqrt(min(R, C)).

        This needs only the squared norms of x's lines, so x is read twice and written once.
        """
        axis = 2 if x_KRC.size(1) >= x_KRC.size(2) else 1
        norms = torch.linalg.vector_norm(x_KRC, dim=axis, keepdim=True, dtype=torch.float32)
        wanted = math.sqrt(min(x_KRC.shape[1:]))
        to_size = wanted / frobenius(norms).clamp_min_(1e-10)
        squares = (norms * to_size).square_()
        scales = squares / x_KRC.size(axis)
        for name, line in zip(names, scales, strict=True):
            s = self.second.get(name)
            if s is None:
                s = self.second[name] = torch.zeros_like(line)
            line.copy_(s.lerp_(line, 1 - SECOND_MOMENT_BETA))
        scales.clamp_min_(1e-10).rsqrt_()
        before, after = squares.sum((1, 2), keepdim=True).sqrt_(), frobenius(squares.sqrt().mul_(scales))
        direction: Tensor = x_KRC * scales.mul_(to_size * before / after.clamp_min_(1e-10))
        return direction

    def apply(self, name: str, direction: Tensor, multiplier: float, weight_decay: float) -> None:
        """p -= lr*g, and lr*wd*p where it has the same sign."""
        p = self.parameters[name]
        rows, columns = p.shape
        lr = self.lr * multiplier * math.sqrt(max(1.0, rows / columns))
        kernels.muon_apply(p, direction, lr, lr * weight_decay)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"momentum_buffer": m, "second_momentum_buffer": self.second[name]}
            for name, m in self.momentum.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.momentum = {n: s["momentum_buffer"].clone() for n, s in state.items()}
        self.second = {n: s["second_momentum_buffer"].clone() for n, s in state.items()}


def muon_shapes(matrix: torch.Size) -> dict[str, torch.Size]:
    """The shapes of what Muon keeps of a matrix."""
    rows, columns = matrix
    return {MUON[0]: matrix, MUON[1]: torch.Size((rows, 1) if rows >= columns else (1, columns))}


def batches_by_shape(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names by shape, up to BATCH_ELEMENTS per group."""
    groups: dict[torch.Size, list[str]] = {}
    for name, matrix in matrices.items():
        groups.setdefault(matrix.shape, []).append(name)
    batches = []
    for shape, names in groups.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        batches += [names[start : start + size] for start in range(0, len(names), size)]
    return batches


def frobenius(g_KRC: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(g_KRC, dim=(1, 2), keepdim=True)
    return norms


def equilibrated(g_KRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale all rows to the same norm, and each matrix to a Frobenius norm just below 1; may overwrite g."""
    norms = torch.linalg.vector_norm(g_KRC, dim=2, keepdim=True)
    scales = frobenius(norms) / math.sqrt(g_KRC.size(1)) / norms.clamp_min(1e-6)
    scales.div_(frobenius(norms * scales).mul_(1.01).add_(1e-6))
    return torch.mul(g_KRC, scales, out=g_KRC if dtype == g_KRC.dtype else torch.empty_like(g_KRC, dtype=dtype))


def orthogonalized(x: Tensor) -> Tensor:
    """Five polynomial steps towards the nearest orthogonal matrices; x [K, R, C] of Frobenius norms below 1."""
    rows, columns = x.shape[1:]
    if max(rows, columns) < ELONGATED * min(rows, columns):
        x = polar_steps(x, POLAR_COEFFICIENTS)
    else:
        # Apply the first steps before computing the rest, because errors of a Gram matrix grow with each step.
        for coefficients in (POLAR_COEFFICIENTS[:2], POLAR_COEFFICIENTS[2:]):
            q = gram_steps(gram(x), coefficients)
            x = torch.bmm(x, q) if rows > columns else torch.bmm(q, x)
    return x


def gram(x: Tensor) -> Tensor:
    """The smaller one of X X' and X' X."""
    return torch.bmm(x.mT, x) if x.size(1) > x.size(2) else torch.bmm(x, x.mT)


def polar_steps(x: Tensor, coefficients: PolarCoefficients) -> Tensor:
    """X = a X + (b A + c A A) X with A = X X', for each (a, b, c)."""
    tall = x.size(1) > x.size(2)
    for a, b, c in coefficients:
        g = gram(x)
        q = torch.baddbmm(g, g, g, beta=b, alpha=c)
        x = torch.baddbmm(x, x, q, beta=a) if tall else torch.baddbmm(x, q, x, beta=a)
    return x


def gram_steps(g: Tensor, coefficients: PolarCoefficients) -> Tensor:
    """The matrix by which to multiply X for the same steps, from its Gram matrix alone; cheaper if X is elongated."""
    total: Tensor | None = None
    for number, (a, b, c) in enumerate(coefficients, start=1):
        q = torch.baddbmm(g, g, g, beta=b, alpha=c)
        q.diagonal(dim1=1, dim2=2).add_(a)
        total = q if total is None else torch.bmm(total, q)
        if number < len(coefficients):
            g = torch.bmm(q, torch.bmm(g, q))
    assert total is not None
    return total


class Optimizer:
    """All groups of one model. `steps` counts completed steps."""

    def __init__(self, model: GPT, rates: LearningRates, matmul: str = "fp32", head_rows: slice = ALL_ROWS) -> None:
        """matmul: as in TrainingPass, for Muon's products; head_rows: rows of a shared head that this rank updates."""
        parameters = self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        groups = adamw_groups(model, rates)
        self.adamw_names = list(groups)
        self.matrix_names = [name for name in parameters if name not in groups]
        if odd := [name for name in self.matrix_names if parameters[name].dim() != 2]:
            raise UserError(f"{', '.join(odd)}: no matrix, so it needs a group in adamw_groups of optim.py.", Cause.BUG)
        self.tables = {n: RowAdamW(parameters[n], g) for n, g in groups.items() if is_table(n)}
        parts = {HEAD: head_rows}
        self.dense = {
            n: DenseAdamW(parameters[n], g, parts.get(n, ALL_ROWS)) for n, g in groups.items() if not is_table(n)
        }
        self.muon = Muon({n: parameters[n] for n in self.matrix_names}, rates.matrix, MATMUL_TYPES[matmul])
        self.steps = 0
        self.schedule = StepSchedule(1.0, 0.0, 0.0)
        self.history: dict[int, float] = {}  # lr multiplier of the last REFRESH_STEPS steps
        self.undo: Undo | None = None  # set where an interrupted step is to be taken back
        self._before = (self.steps, self.schedule, self.history)

    @torch.no_grad()
    def prepare(self, token_ids: Tensor) -> None:
        """Bring up to date the rows that the coming step reads, and those whose turn it is."""
        for table in self.tables.values():
            table.advance(token_ids, self.history, self.steps)
            table.advance(table.rows_in_turn(self.steps), self.history, self.steps)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Bring all rows up to date, in slices that fit into the cache."""
        for table in self.tables.values():
            for rows in torch.arange(len(table.parameter)).split(CATCH_UP_ROWS):
                table.advance(rows, self.history, self.steps)

    def start_step(self, schedule: StepSchedule) -> None:
        if self.undo is not None:
            self.undo.kept.clear()
            self._before = (self.steps, self.schedule, dict(self.history))
        self.steps += 1
        self.schedule = schedule
        self.history[self.steps] = schedule.lr_multiplier
        self.history.pop(self.steps - REFRESH_STEPS - 1, None)

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo the step that has been started."""
        assert self.undo is not None
        self.undo.take_back()
        self.steps, self.schedule, self.history = self._before

    def undo_bytes(self) -> int:
        """Memory of the copies, without those of the rows used: weights, and AdamW's or Muon's state."""
        dense = sum(3 * self.parameters[name].nbytes for name in self.dense)
        return dense + sum(2 * self.parameters[name].nbytes for name in self.matrix_names)

    def _keep(self, rows: Tensor | None, *tensors: Tensor) -> None:
        """Copy what is about to change, if it may be taken back."""
        if self.undo is not None:
            self.undo.keep(rows, *tensors)

    @torch.no_grad()
    def update(self, name: str, gradient: Tensor, token_ids: Tensor, rows: slice = ALL_ROWS) -> None:
        """AdamW of one parameter; the gradient covers rows token_ids of a table, or `rows` of another parameter."""
        if name in self.tables:
            self._keep(token_ids, *(t for t in self.tables[name].table() if t is not None))
            self.tables[name].update_rows(token_ids, gradient, self.schedule.lr_multiplier, self.steps)
        else:
            self._keep(None, *self.dense[name].at(rows))
            self.dense[name].update(gradient, self.schedule.lr_multiplier, self.steps, rows)

    @torch.no_grad()
    def directions(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stores = (self.muon.momentum, self.muon.second)
        self._keep(None, *(store[name] for store in stores for name in gradients if name in store))
        return self.muon.directions(gradients, self.schedule.muon_momentum)

    @torch.no_grad()
    def apply(self, name: str, direction: Tensor) -> None:
        self._keep(None, self.parameters[name])
        self.muon.apply(name, direction, self.schedule.lr_multiplier, self.schedule.muon_weight_decay)

    def step(self, gradients: Mapping[str, Tensor], token_ids: Tensor, schedule: StepSchedule) -> None:
        """A whole step on one rank."""
        self.start_step(schedule)
        for name in self.adamw_names:
            self.update(name, gradients[name], token_ids)
        for name, direction in self.directions({name: gradients[name] for name in self.matrix_names}).items():
            self.apply(name, direction)

    def param_groups(self) -> list[dict[str, Any]]:
        """Like upstream's param_groups, in its order, with the last step's values; parameters by name."""
        constants = {name: state.group for name, state in (self.tables | self.dense).items()}
        groups: list[dict[str, Any]] = []
        for group, names in itertools.groupby(self.adamw_names, constants.__getitem__):
            values = {"betas": (group.beta1, group.beta2), "eps": EPSILON, "weight_decay": group.weight_decay}
            groups.append({"kind": "adamw", "params": list(names), **self._rates(group.lr), **values})
        muon = {"momentum": self.schedule.muon_momentum, "weight_decay": self.schedule.muon_weight_decay}
        muon |= {"beta2": SECOND_MOMENT_BETA, "ns_steps": len(POLAR_COEFFICIENTS)}
        for shape in sorted({tuple(self.parameters[name].shape) for name in self.matrix_names}):
            alike = [name for name in self.matrix_names if self.parameters[name].shape == shape]
            groups.append({"kind": "muon", "params": alike, **self._rates(self.muon.lr), **muon})
        return groups

    def _rates(self, lr: float) -> dict[str, float]:
        return {"lr": lr * self.schedule.lr_multiplier, "initial_lr": lr}

    def state_dict(self) -> dict[str, Any]:
        """By parameter name, with all rows up to date. "muon" has only matrices whose directions this rank computed, and a
        shared head only this rank's part: to resume, merge those of all ranks. The rest is equal on all ranks."""
        self.catch_up()
        adamw = {name: state.state_dict() for name, state in (self.tables | self.dense).items()}
        return {"steps": self.steps, "adamw": adamw, "muon": self.muon.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        for name, adamw in (self.tables | self.dense).items():
            adamw.load_state_dict(state["adamw"][name])
        for table in self.tables.values():
            table.current.fill_(self.steps)
        self.muon.load_state_dict(state["muon"])
