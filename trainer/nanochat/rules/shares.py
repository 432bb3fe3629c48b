# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which rank takes which rows of a step, in how many passes, and which part of a split head.

Ranks take rows in order: the first rank the first rows of a step, the next rank the rows after that, and so on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

# A head's parts are measured in units of 1/1000; the smallest part is one.
HEAD_UNITS = 1000
# Parts begin at multiples of this many rows: whole vectors, but small enough to split small vocabularies.
GRANULE = 16


def spread(rows: int, parts: int) -> list[int]:
    """Split rows into parts that differ by at most one, larger ones first."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def passes_of(shares: Sequence[int], most: int, together: bool) -> list[list[int]]:
    """Number of rows in each pass of each rank, at most `most`.

    together: all ranks make the same number of passes, because they wait for each other in each; the last ones of a rank with
    few rows may be empty.
    """
    counts = [-(-rows // most) for rows in shares]
    return [spread(rows, max(counts) if together else count) for rows, count in zip(shares, counts)]


def share_rows(rows: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Rows per rank in proportion to the speeds, `least` at least; the sum is exact.

    Each further row goes to the rank that would finish it first, so that the slowest rank ends as early as possible.
    """
    shares = [least] * len(speeds)
    # When each rank would finish one more row.
    due = [((least + 1) / speed, at) for at, speed in enumerate(speeds)]
    heapq.heapify(due)
    for dummy in range(rows - least * len(speeds)):
        rank = due[0][1]
        shares[rank] += 1
        heapq.heapreplace(due, ((shares[rank] + 1) / speeds[rank], rank))
    return shares


def head_weights(speeds: Sequence[float]) -> list[int]:
    """Each rank's part of a split head, by speed."""
    return [max(1, round(HEAD_UNITS * speed / sum(speeds))) for speed in speeds]


def part_bounds(vocab_size: int, padded: int, weights: Sequence[int]) -> list[int]:
    """The parts' starts and the end; sizes follow the weights, and the last part includes the padding.

    Raises ValueError if a part would hold only padding.
    """
    sums = list(itertools.accumulate(weights, initial=0))
    bounds = [GRANULE * round(vocab_size * one / sums[-1] / GRANULE) if sums[-1] else 0 for one in sums]
    bounds[-1] = padded
    for rank, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        if min(stop, vocab_size) <= start:
            raise ValueError(f"rank {rank} would have no part of a vocabulary of {vocab_size}")
    return bounds
