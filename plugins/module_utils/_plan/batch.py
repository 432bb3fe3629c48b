# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The arithmetic of a batch: how the rows of one step are shared out among ranks."""

from __future__ import annotations

import heapq
from typing import Iterator, NamedTuple, Sequence

# A total batch that nobody asked for may differ from the profile's by this much before passes are made smaller instead.
NEAR = 1.5
# Of a pass of unequal hosts that nobody has set: what it takes of memory is far below that of weights and optimizer.
MOST_PASS_TOKENS = 8192
HEAD_UNITS = 1000


class BatchError(ValueError):
    """The batch cannot be shared out; the text says what is possible."""


class Asked(NamedTuple):
    """What is wanted of a batch; total_batch and device_batch are those of the profile unless `told` says otherwise."""

    sequence: int
    total_batch: int
    device_batch: int
    told_total: bool
    told_device: bool


class Batch(NamedTuple):
    """Rows of each rank in a step, in passes of device_batch rows."""

    rows: list[int]
    device_batch: int
    total_batch: int


def plan_batch(asked: Asked, weights: Sequence[float], equal: bool = False, deployed: Sequence[int] = ()) -> Batch:
    """Share out a step by the ranks' weights; what nobody asked for adapts to the number of hosts.

    With `equal` no share may differ. `deployed` are the shares that a run has had so far, which it keeps where they fit.
    """
    rows = total_rows(asked, len(weights), equal)
    if deployed and sum(deployed) == rows:
        shares = list(deployed)
    elif len(set(weights)) == 1 and rows % len(weights) == 0:
        shares = [rows // len(weights)] * len(weights)
    else:
        shares = share(rows, weights)
    return Batch(shares, pass_rows(asked, shares), rows * asked.sequence)


def pass_rows(asked: Asked, shares: Sequence[int]) -> int:
    """The most rows of a pass: never more than the user allows, and a divisor of equal shares.

    Unequal hosts wait for each other in each pass, so without a limit of the user's they make as few as fit into memory.
    """
    if len(set(shares)) == 1:
        return max(size for size in range(1, asked.device_batch + 1) if shares[0] % size == 0)
    most = asked.device_batch if asked.told_device else max(asked.device_batch, MOST_PASS_TOKENS // asked.sequence)
    return min(max(shares), most)


def head_shares(weights: Sequence[float]) -> list[int]:
    """The parts of a head that is shared out, by the weights of the hosts."""
    return [max(1, round(HEAD_UNITS * weight / sum(weights))) for weight in weights]


def multiples_near(value: int, unit: int) -> str:
    """The nearest valid values, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def total_rows(asked: Asked, world: int, equal: bool) -> int:
    """Rows of a step over all ranks; refuses a batch that was asked for and does not divide."""
    if not asked.told_total:
        return adapted_rows(asked, world)
    total, sequence = asked.total_batch, asked.sequence
    # Unequal shares make do with a shorter last pass.
    device_batch = asked.device_batch if asked.told_device and equal else 1
    unit = sequence * device_batch * (world if equal else 1)
    if total % unit or total < unit:
        names = [("ddp_sequence", sequence), ("ddp_device_batch", device_batch), (f"{world} hosts", world)]
        told = asked.told_device and equal
        used = [names[0], *([names[1]] if told else []), *([names[2]] if equal and world > 1 else [])]
        product = " x ".join(str(number) for dummy, number in used) + (f" = {unit}" if len(used) > 1 else "")
        raise BatchError(
            f"ddp_total_batch {total} is not a multiple of {' x '.join(name for name, dummy in used)} = {product}; "
            f"use {multiples_near(total, unit)}."
        )
    rows = total // sequence
    if rows // device_batch < world:
        passes = f" of ddp_device_batch {device_batch}" if asked.told_device and equal else ""
        raise BatchError(
            f"ddp_total_batch {total} has too few rows for {world} hosts{passes}; "
            f"use {sequence * device_batch * world} or more."
        )
    return rows


def adapted_rows(asked: Asked, world: int) -> int:
    """The profile's rows, or the nearest number of them that this many hosts can share equally."""
    wanted = max(1, asked.total_batch // asked.sequence)
    found = 0
    for device_batch in pass_sizes(asked):
        unit = device_batch * world
        nearest = max(1, (wanted + unit // 2) // unit) * unit
        if found == 0 or _apart(nearest, wanted) < _apart(found, wanted):
            found = nearest
        if _apart(found, wanted) <= NEAR:
            break
    return found


def _apart(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


def pass_sizes(asked: Asked) -> Iterator[int]:
    """The sizes of a pass that may be taken, largest first."""
    yield asked.device_batch
    size = asked.device_batch // 2
    while size and not asked.told_device:
        yield size
        size //= 2


def share(rows: int, weights: Sequence[float]) -> list[int]:
    """Rows of each rank in proportion to the weights: at least one each, the sum exact.

    Every further row goes to the rank that would be done first with it, so that the slowest rank ends as early as can be.
    """
    shares = [1] * len(weights)
    # When each rank would be done with one row more.
    due = [(2 / weight, at) for at, weight in enumerate(weights)]
    heapq.heapify(due)
    for dummy in range(rows - len(weights)):
        rank = due[0][1]
        shares[rank] += 1
        heapq.heapreplace(due, ((shares[rank] + 1) / weights[rank], rank))
    return shares
