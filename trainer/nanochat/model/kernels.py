# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Operations between the large matrix products, each as torch operations (its twin) and as a kernel in kernels.c.

`setup()` builds the kernels, compares each with its twin on random tensors of the run's shapes and times both. Kernels
that differ or are slower stay off, and all without a compiler. Importing this file changes nothing.

A twin and its kernel read and write the same tensors. Kernels marked exact give the same bits, because every rank computes
them itself, and ranks with and without kernels must end with the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.model import native, ops

ENDINGS = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of kernels for either type
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # relative to a value plus the mean magnitude
ROUNDS = 5
TRIAL_ROWS = 64  # of logits
FEW = 128
EPSILON = 1e-10  # of AdamW
ADAMW_ELEMENTS = 2**15  # per thread at a time, few enough to stay in its cache
Rotary = tuple[Tensor, Tensor]
Call = native.Library | None  # calls the kernel, if that is what runs


class KernelShape(NamedTuple):
    """Tensor sizes with which kernels are tried."""

    rows: int  # tokens in one pass
    tokens: int
    width: int
    heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype  # of the operands of the large products


@dataclass(eq=False)
class Kernel:
    """Calls the twin or, if proven right and faster, the kernel."""

    operation: Callable[..., None]
    exact: bool = False
    scratch: int = 0  # leading arguments with undefined contents afterwards
    only_narrow: bool = False  # used only with bf16 products
    on: bool = False
    right: bool = False

    @property
    def name(self) -> str:
        return self.operation.__name__

    def __call__(self, *args: Any) -> None:
        self.operation(_library if self.on else None, *args)


class KernelChoice(NamedTuple):
    """Names of the active kernels, the inactive ones with reasons, and the reason if there are none at all."""

    on: list[str]
    off: dict[str, str]
    why: str

    def summary(self) -> str:
        """A clause for the log."""
        if self.why:
            return f"none ({self.why})"
        off = "".join(f"; not {name} ({reason})" for name, reason in self.off.items())
        return f"{', '.join(self.on) or 'none'}{off}"


_library: native.Library


# -- the head


@Kernel
def exponentials(call: Call, t: Tensor, g: Tensor, columns: Tensor, sums: Tensor, at_target: Tensor) -> None:
    """For logits 15 t with exponentials e: the sums of e by row; g = e (1 - t^2); [e, t] at one column of each row."""
    if call:
        sizes = (t.size(1), at_target.stride(0))
        call(f"exponentials_{ENDINGS[t.dtype]}", len(t), (t, g, columns, sums, at_target), sizes, (ops.SOFTCAP,))
        return
    e = torch.mul(t, ops.SOFTCAP, out=g).exp_()
    # A float32 sum of bf16 would first copy all of it. Sums of so few in bf16 add less error than that of the elements.
    few = e.unflatten(1, (-1, math.gcd(e.size(1), FEW))).sum(2) if e.dtype == torch.bfloat16 else e
    torch.sum(few, 1, dtype=torch.float32, out=sums)
    at = columns[:, None]
    at_target[0] = e.gather(1, at).squeeze(1).float()
    at_target[1] = t.gather(1, at).squeeze(1).float()
    torch.ops.aten.tanh_backward.grad_input(e, t, grad_input=e)


# -- norms


class Mix(NamedTuple):
    """The norm's input, u = a x + b start."""

    start: Tensor
    u: Tensor
    a: float
    b: float


@Kernel
def norm(call: Call, x: Tensor, mix: Mix | None, y: Tensor, operand: Tensor, factor: Tensor) -> None:
    """y = norm(x); factor [N, 1]: multiplier of each row; operand: y in the type of products, or y itself."""
    if call:
        start, u, a, b = mix or (None, None, 1.0, 0.0)
        narrow = None if operand is y else operand
        call(f"norm_{ENDINGS[operand.dtype]}", len(x), (x, start, u, y, narrow, factor), factors=(a, b))
        return
    if mix is not None:
        x = torch.mul(x, mix.a, out=mix.u).add_(mix.start, alpha=mix.b)
    torch.mul(x, factor.copy_(ops.norm_factor(x)), out=y)
    if operand is not y:
        operand.copy_(y)


def norm_backward_(dy: Tensor, y: Tensor, factor: Tensor, gain: float = 1.0) -> Tensor:
    """Turn the gradient of y = gain * norm(x) into that of x, in place; factor includes the gain."""
    along = torch.linalg.vecdot(dy, y).unsqueeze_(-1).mul_(1 / (y.size(-1) * gain * gain))
    return dy.sub_(y * along).mul_(factor)


@partial(Kernel, scratch=1)
def norm_backward(call: Call, dy: Tensor, y: Tensor, factor: Tensor, d: Tensor) -> None:
    """d += the gradient of x, given the gradient dy of y = norm(x); dy may be overwritten."""
    if call:
        call("norm_backward", len(y), (dy, y, factor, d))
    else:
        d.add_(norm_backward_(dy, y, factor))


# -- rotary


@Kernel
def rotate(call: Call, x: Tensor, out: Tensor, factor: Tensor, rotary: Rotary, gain: float) -> None:
    """out [B, H, T, D] = gain * norm(rotated x [N, H * D]); factor [N, H]. Rotation does not change the norm."""
    rows, heads, tokens, size = out.shape
    if call:
        call("rotate", len(x), (x, out, factor, *rotary), (x.stride(0), heads, tokens, size // 2), (gain,))
        return
    x = x.unflatten(1, (heads, size)).unflatten(0, (rows, tokens))
    by_row = factor.view(rows, tokens, heads, 1).copy_(ops.norm_factor(x).mul_(gain))
    ops.rotate_into(x, *rotary, out.transpose(1, 2)).mul_(by_row)


@partial(Kernel, scratch=1)
def rotate_backward(
    call: Call, dy: Tensor, y: Tensor, factor: Tensor, rotary: Rotary, gain: float, out: Tensor
) -> None:
    """out [N, H * D] = the gradient of x, given the gradient dy [B, H, T, D] of y; dy may be overwritten."""
    rows, heads, tokens, size = y.shape
    if call:
        sizes = (out.stride(0), heads, tokens, size // 2)
        call("rotate_backward", len(out), (out, dy, y, factor, *rotary), sizes, (gain,))
        return
    by_row = factor.view(rows, tokens, heads, 1)
    dx = norm_backward_(dy.transpose(1, 2), y.transpose(1, 2), by_row, gain)
    cos, sin = rotary
    ops.rotate_into(dx, cos, -sin, out.unflatten(1, (heads, size)).unflatten(0, (rows, tokens)))


# -- attention


@Kernel
def probabilities(call: Call, q: Tensor, k: Tensor, mask: Tensor, window: int, out: Tensor) -> None:
    """out [M, Q, K] = softmax(q k'), with the last query aligned with the last key; mask: from ops.window_mask."""
    if call:
        torch.bmm(q, k.mT, out=out)
        queries, keys = mask.shape
        call("softmax", out.size(0) * queries, (out,), (queries, keys, keys - queries, window))
    else:
        torch.baddbmm(mask, q, k.mT, out=out)
        torch.ops.aten._softmax.out(out, -1, False, out=out)


# -- sums of products


@partial(Kernel, only_narrow=True)
def accumulate(call: Call, out: Tensor, product: Tensor) -> None:
    """out += product, which has the narrow type."""
    if call:
        call("accumulate", len(out), (out, product))
    else:
        out.add_(product)


# -- optimizer


@partial(Kernel, exact=True)
def muon_apply(call: Call, p: Tensor, direction: Tensor, rate: float, decay: float) -> None:
    """p -= rate*g, and decay*p where that points the same way; each operation rounds once, so all CPUs agree."""
    if call:
        call("muon_apply", len(p), (p, direction.contiguous()), factors=(rate, decay))
        return
    shrink = (p * direction).ge_(0).mul_(p).mul_(decay)
    p.sub_(direction * rate).sub_(shrink)


class AdamWConstants(NamedTuple):
    """AdamW's constants for one parameter; `at` gives those of a step, which count from 1."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    step: int = 0

    def at(self, multiplier: float, step: int) -> AdamWConstants:
        return self._replace(lr=self.lr * multiplier, step=step)

    def figures(self) -> tuple[float, ...]:
        """The kernel's arguments."""
        root = math.sqrt(1 - self.beta2**self.step)
        size = -self.lr / (1 - self.beta1**self.step)
        keep = 1 - self.lr * self.weight_decay
        return keep, 1 - self.beta1, self.beta2, 1 - self.beta2, root, EPSILON, size


def adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, now: AdamWConstants) -> None:
    """One AdamW update in place; steps count from 1. Each operation rounds once, so all CPUs agree (torch's own kernel uses
    fused multiply-adds where a CPU has them)."""
    keep, toward, beta2, square, root, epsilon, size = now.figures()
    count = ADAMW_ELEMENTS * torch.get_num_threads()
    flat = (tensor.reshape(-1).split(count) for tensor in (p, g, m, v))
    for x, gradient, first, second in zip(*flat, strict=True):
        first.add_(torch.sub(gradient, first).mul_(toward))
        second.mul_(beta2).add_(torch.mul(gradient, square).mul_(gradient))
        # MKL's float32 root may be off by its last bit; one in float64 that is rounded never is.
        below = second.double().sqrt_().float().div_(root).add_(epsilon)
        x.mul_(keep).add_(torch.mul(first, size).div_(below))


class AdamWTable(NamedTuple):
    """A parameter with its AdamW state: its moments and, unless all rows are up to date, each row's current step."""

    p: Tensor
    m: Tensor
    v: Tensor
    current: Tensor | None = None


@partial(Kernel, exact=True)
def adamw(
    call: Call, table: AdamWTable, rows: Tensor | None, gradient: Tensor | None, steps: Sequence[AdamWConstants]
) -> None:
    """Apply the missed steps of some rows or all up to the last; gradient: of that step, if it is the only one missed."""
    if call:
        figures = [figure for step in steps for figure in step.figures()]
        sizes = (table.p.size(-1), steps[0].step - 1, steps[-1].step)
        tensors = (table.p, table.m, table.v, rows, table.current, None if gradient is None else gradient.contiguous())
        call("adamw", table.p.numel() // sizes[0] if rows is None else len(rows), tensors, sizes, figures)
        return
    if rows is None or table.current is None:
        assert gradient is not None
        adamw_(table.p, gradient, table.m, table.v, steps[-1])
        return
    behind, last = table.current[rows], steps[-1].step
    if gradient is None:
        order = torch.argsort(behind, stable=True)
        order = order[: int((behind < last).sum())]
        if len(order) == 0:
            return
        rows, behind = rows[order], behind[order]
    p, m, v = (tensor.index_select(0, rows) for tensor in table[:3])
    if gradient is None:
        # Their steps ascend, so those that lack a step are the first ones.
        zero, missed = torch.zeros_like(p), torch.arange(int(behind[0]) + 1, last + 1, dtype=torch.int32)
        counts = torch.searchsorted(behind, missed).tolist()
        for now, count in zip(steps[-len(missed) :], counts, strict=True):
            adamw_(p[:count], zero[:count], m[:count], v[:count], now)
    else:
        adamw_(p, gradient, m, v, steps[-1])
    for tensor, values in zip(table[:3], (p, m, v), strict=True):
        tensor.index_copy_(0, rows, values)
    table.current[rows] = last


ALL = (exponentials, norm, norm_backward, rotate, rotate_backward, probabilities, accumulate, muon_apply, adamw)


# -- proof and choice


def trials(shape: KernelShape) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Each kernel, with random arguments of this shape for it and its twin."""

    def random(*size: int) -> Tensor:
        return torch.randn(size or (shape.rows, shape.width))

    t = torch.tanh(random(TRIAL_ROWS, shape.vocabulary)).to(shape.dtype)
    columns = torch.randint(shape.vocabulary, (TRIAL_ROWS,))
    yield exponentials, (t, torch.empty_like(t), columns, torch.empty(TRIAL_ROWS), torch.empty(2, TRIAL_ROWS))
    y = random()
    operand = y if shape.dtype == y.dtype else y.to(shape.dtype)
    yield norm, (random(), Mix(random(), torch.empty_like(y), 0.9, 0.2), y, operand, torch.empty(shape.rows, 1))
    yield norm_backward, (random(), random(), random(shape.rows, 1).abs_(), random())
    batch = (shape.rows // shape.tokens, shape.heads, shape.tokens, shape.head_dim)
    rotary, factor = ops.rotary_tables(0, shape.tokens, shape.head_dim), torch.ones(shape.rows, shape.heads)
    part = random(shape.rows, 3 * shape.width)[:, : shape.width]
    yield rotate, (part, torch.empty(batch), factor, rotary, 1.7)
    yield rotate_backward, (random(*batch), random(*batch), factor, rotary, 1.7, part)
    queries = min(128, shape.tokens)
    keys, many = min(2 * queries, shape.tokens), shape.heads * (shape.rows // shape.tokens)
    q, mask = random(many, queries, shape.head_dim), ops.window_mask(queries, keys, keys - queries)
    q.div_(math.sqrt(shape.head_dim))
    yield probabilities, (q, random(many, keys, shape.head_dim), mask, keys - queries, torch.empty(many, queries, keys))
    size = 4 * shape.width, shape.width
    yield accumulate, (random(*size), random(*size).bfloat16())
    yield muon_apply, (random(*size), random(*size), 0.013, 0.0007)
    count = min(512, shape.vocabulary)
    p, m, v = (random(count, shape.width) for dummy in range(3))
    steps = [AdamWConstants(0.2 + 0.01 * step, 0.8, 0.995, 0.01, step) for step in range(3, 8)]
    current = torch.randint(2, 7, (count,), dtype=torch.int32)
    yield adamw, (AdamWTable(p, m.mul_(0.1), v.square_(), current), torch.randperm(count), None, steps)


def _copied(args: Any, wide: bool = False) -> Any:
    """Copy the arguments, keeping strides; wide: as float32."""
    if isinstance(args, Tensor):
        dtype = torch.float32 if wide and args.is_floating_point() else args.dtype
        return torch.empty_strided(args.shape, args.stride(), dtype=dtype).copy_(args)
    if isinstance(args, tuple):
        seen = {id(one): _copied(one, wide) for one in args}
        copies = [seen[id(one)] for one in args]
        return type(args)(*copies) if hasattr(args, "_fields") else tuple(copies)
    return args


def _tensors(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    return [tensor for one in args for tensor in _tensors(one)] if isinstance(args, tuple) else []


def _agree(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    a, b = mine.to(theirs.dtype), theirs
    if torch.equal(a, b) or not tolerance or not a.is_floating_point():
        return torch.equal(a, b)
    size = b.abs()
    return bool(((a - b).abs() <= tolerance * (size + size.mean())).all())


def prove(kernel: Kernel, args: tuple[Any, ...], tolerance: float) -> str:
    """Try a kernel and switch it on, or return why it stays off."""
    mine, theirs = _copied(args), _copied(args, wide=True)
    kernel.operation(_library, *mine)
    kernel.operation(None, *theirs)
    pairs = zip(_tensors(mine[kernel.scratch :]), _tensors(theirs[kernel.scratch :]), strict=True)
    kernel.right = all(_agree(a, b, 0.0 if kernel.exact else tolerance) for a, b in pairs)
    if not kernel.right:
        return "differs"
    best: dict[Call, float] = {_library: math.inf, None: math.inf}
    for dummy in range(ROUNDS):
        for call in best:
            copies = _copied(args)
            start = time.perf_counter()
            kernel.operation(call, *copies)
            best[call] = min(best[call], time.perf_counter() - start)
    kernel.on = best[_library] < best[None]
    return "" if kernel.on else "slower"


def setup(choice: str, shape: KernelShape) -> KernelChoice:
    """Once per process: build, prove, switch on. choice: auto, torch (no kernels) or zig (its compiler)."""
    global _library
    for kernel in ALL:
        kernel.on = kernel.right = False
    if choice == "torch":
        return KernelChoice([], {}, "as --kernels says")
    try:
        _library = native.Library(native.built(choice))
    except (native.BuildError, OSError) as error:
        return KernelChoice([], {}, str(error))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        reasons = {
            kernel.name: prove(kernel, args, TOLERANCE[shape.dtype])
            for kernel, args in trials(shape)
            if shape.dtype != torch.float32 or not kernel.only_narrow
        }
    off = {name: reason for name, reason in reasons.items() if reason}
    return KernelChoice([name for name in reasons if name not in off], off, "")


def in_use() -> list[str]:
    """The active kernels that change a step's rounding."""
    return [kernel.name for kernel in ALL if kernel.on and not kernel.exact]


def keep(names: Sequence[str]) -> bool:
    """Of the kernels that change rounding, use exactly these, if right here; returns whether all are."""
    for kernel in ALL:
        if not kernel.exact:
            kernel.on = kernel.right and kernel.name in names
    return set(names) <= {kernel.name for kernel in ALL if kernel.right}
