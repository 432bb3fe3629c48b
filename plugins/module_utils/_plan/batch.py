# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batch arithmetic: splits the rows of a step among ranks."""

from __future__ import annotations

import math
from typing import Iterator, NamedTuple, Sequence

from .._rules.shares import share_rows

# A default total batch may differ from the profile's by this factor before passes are made smaller instead.
NEAR = 1.5
# Default maximum of rows per pass for unequal hosts: its memory is far below that of weights and optimizer.
MOST_PASS_TOKENS = 8192


class BatchError(ValueError):
    """The batch cannot be split; the text says what is possible."""


class BatchRequest(NamedTuple):
    """The requested batch; total_batch and device_batch are the profile's unless the user set them."""

    sequence: int
    total_batch: int
    device_batch: int
    set_total: bool
    set_device: bool


class SharedBatch(NamedTuple):
    """Each rank's rows per step, in passes of device_batch rows."""

    rows: list[int]
    device_batch: int
    total_batch: int


def plan_batch(
    wanted: BatchRequest, weights: Sequence[float], equal: bool = False, kept: Sequence[int] = ()
) -> SharedBatch:
    """Split a step by the ranks' weights; sizes that nobody set adapt to the number of hosts.

    `equal` forbids different shares. `kept` are the resumed run's shares, which stay if they fit.
    """
    rows = total_rows(wanted, len(weights), equal)
    shares = list(kept) if kept and sum(kept) == rows else share_rows(rows, weights)
    return SharedBatch(shares, pass_rows(wanted, shares), rows * wanted.sequence)


def pass_rows(wanted: BatchRequest, shares: Sequence[int]) -> int:
    """Maximum rows per pass: within the user's limit, and a divisor of equal shares.

    Unequal hosts wait for each other in each pass, so without a user limit they make as few as memory allows.
    """
    if len(set(shares)) == 1:
        return max(size for size in range(1, wanted.device_batch + 1) if shares[0] % size == 0)
    most = wanted.device_batch if wanted.set_device else max(wanted.device_batch, MOST_PASS_TOKENS // wanted.sequence)
    return min(max(shares), most)


def multiples_near(value: int, unit: int) -> str:
    """The nearest valid values, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def total_rows(wanted: BatchRequest, world: int, equal: bool) -> int:
    """Rows per step over all ranks; rejects a user's batch that cannot be divided."""
    if not wanted.set_total:
        return adapted_rows(wanted, world)
    total, factors = wanted.total_batch, {"ddp_sequence": wanted.sequence}
    # Unequal shares have a shorter last pass.
    if equal and wanted.set_device:
        factors["ddp_device_batch"] = wanted.device_batch
    if equal and world > 1:
        factors[f"{world} hosts"] = world
    unit, least = math.prod(factors.values()), wanted.sequence * world
    if total % unit or total < unit:
        product = " x ".join(map(str, factors.values())) + (f" = {unit}" if len(factors) > 1 else "")
        raise BatchError(
            f"ddp_total_batch {total} is not a multiple of {' x '.join(factors)} = {product}; "
            f"use {multiples_near(total, unit)}."
        )
    if total < least:
        raise BatchError(f"ddp_total_batch {total} has too few rows for {world} hosts; use {least} or more.")
    return total // wanted.sequence


def adapted_rows(wanted: BatchRequest, world: int) -> int:
    """The profile's rows, or the nearest number that this many hosts can share equally."""
    profile = max(1, wanted.total_batch // wanted.sequence)
    found = 0
    for device_batch in pass_sizes(wanted):
        unit = device_batch * world
        nearest = max(1, (profile + unit // 2) // unit) * unit
        if found == 0 or _apart(nearest, profile) < _apart(found, profile):
            found = nearest
        if _apart(found, profile) <= NEAR:
            break
    return found


def _apart(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


def pass_sizes(wanted: BatchRequest) -> Iterator[int]:
    """Possible rows per pass, largest first."""
    yield wanted.device_batch
    size = wanted.device_batch // 2
    while size and not wanted.set_device:
        yield size
        size //= 2
