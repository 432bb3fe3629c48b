# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The arithmetic of a batch: how the rows of one step are shared out among ranks."""

from __future__ import annotations

from typing import Sequence


class BatchError(ValueError):
    """The batch cannot be shared out; the text says what would do."""


def multiples_near(value: int, unit: int) -> str:
    """The nearest values that would do, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def total_rows(total_batch: int, sequence: int, device_batch: int, world: int, equal: bool) -> int:
    """Rows of a step over all ranks; refuses a batch that does not divide."""
    passes = world if equal else 1
    unit = sequence * device_batch * passes
    if total_batch % unit or total_batch < unit:
        times = f" x {world} hosts" if equal and world > 1 else ""
        product = f"{sequence} x {device_batch}" + (f" x {world}" if times else "")
        raise BatchError(
            f"ddp_total_batch {total_batch} is not a multiple of ddp_sequence x ddp_device_batch{times} = {product} = {unit}; "
            f"{multiples_near(total_batch, unit)} would do."
        )
    rows = total_batch // sequence
    if rows // device_batch < world:
        raise BatchError(
            f"ddp_total_batch {total_batch} has too few rows for {world} hosts of ddp_device_batch {device_batch}; "
            f"{sequence * device_batch * world} or more would do."
        )
    return rows


def share(rows: int, device_batch: int, weights: Sequence[float]) -> list[int]:
    """Rows of each rank in proportion to the weights: whole passes, at least one each, the sum exact.

    Every further pass goes to the rank that would be done first with it, so that the slowest rank ends as early as can be.
    """
    passes = [1] * len(weights)
    for _more in range(rows // device_batch - len(weights)):
        rank = min(range(len(weights)), key=lambda at: ((passes[at] + 1) / weights[at], at))
        passes[rank] += 1
    return [count * device_batch for count in passes]
