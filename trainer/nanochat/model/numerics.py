# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chooses the library for float32 matrix products on this CPU, MKL or oneDNN, whichever is accurate and faster, and keeps
freed memory.

`setup()` decides once per process and sets the global switches; importing this file changes nothing. The libraries round
differently, and on a busy machine either may win, so checkpoints record the choice and `keep()` restores it. The same
applies to kernels.py: a route is "mkl" or "onednn", followed by "+" and the name of each active kernel that changes rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from dataclasses import dataclass

import torch

from nanochat.model import kernels, ops

ROUTES = {"mkl": "none", "onednn": "bf16"}  # torch's names for them
WORST_ERROR = 5e-6  # relative to float64; rounding to bf16 anywhere gives 1e-3
TRIAL_SHAPE = (512, 256, 1024)
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_MAX = -1, -4  # from malloc.h


@dataclass(frozen=True)
class Trial:
    """One route measured."""

    route: str
    error: float
    seconds: float


def select_route(route: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = ROUTES[route]  # type: ignore[attr-defined]


def try_route(route: str) -> Trial:
    """Worst relative error of a product, with and without a fused tanh, and best time."""
    rows, inner, columns = TRIAL_SHAPE
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator) / math.sqrt(inner)
    b = torch.randn(columns, inner, generator=generator)
    exact = a.double() @ b.double().t()
    select_route(route)
    seconds = []
    for dummy in range(8):
        start = time.perf_counter()
        product = a @ b.t()
        seconds.append(time.perf_counter() - start)
    errors = (product - exact).abs().max() / exact.abs().max(), (ops.tanh_product(a, b) - exact.tanh()).abs().max()
    return Trial(route, float(max(errors)), min(seconds))


def choose(trials: list[Trial]) -> Trial:
    """The fastest accurate one; MKL if none is."""
    accurate = [trial for trial in trials if trial.error <= WORST_ERROR]
    return min(accurate, key=lambda trial: trial.seconds) if accurate else trials[0]


def route() -> str:
    """The current library and kernels."""
    return "+".join([library(), *kernels.in_use()])


def library() -> str:
    """The current library."""
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return next((name for name, value in ROUTES.items() if value == precision), "mkl")


def keep(wanted: str) -> bool:
    """Take a checkpoint's route, to continue bit-identically, if it is accurate here."""
    wanted, *names = wanted.split("+")
    kept, before = kernels.keep(names), library()
    if wanted == before or wanted not in ROUTES or not torch.backends.mkldnn.is_available():
        return kept and wanted == before
    accurate = try_route(wanted).error <= WORST_ERROR
    select_route(wanted if accurate else before)
    return kept and accurate


def setup() -> Trial:
    """Keep freed memory; measure both routes and use the better one from now on."""
    # glibc would return freed memory to the system, and fresh pages cost a fault each. (GLIBC_TUNABLES could do the same before the
    # start.)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MALLOPT_MMAP_MAX, 0)
        mallopt(MALLOPT_TRIM_THRESHOLD, 2**31 - 1)
    if not torch.backends.mkldnn.is_available():
        return Trial("mkl", 0.0, 0.0)
    best = choose([try_route(route) for route in ROUTES])
    select_route(best.route)
    return best
