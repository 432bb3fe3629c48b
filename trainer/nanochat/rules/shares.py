# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which rank takes which rows of a step, in how many passes, and which part of a head that is shared out.

The rows of a step come from as many streams as there are ranks, from each the same number in every step, whoever takes them: so
what a step learns from does not depend on how the rows are shared out. In the order of the streams, the first rank takes the
first rows, the next rank those that follow, and so on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

# Number of units of a head's parts; the smallest part is one.
HEAD_UNITS = 1000
# They begin at multiples of this many rows: whole vectors, but few enough to divide small vocabularies.
GRANULE = 16


class Piece(NamedTuple):
    """Rows of a stream, of those that it gives to a step."""

    stream: int
    start: int
    stop: int


def stream_rows(shares: Sequence[int]) -> list[int]:
    """The rows that each stream gives to a step of all these rows."""
    return spread(sum(shares), len(shares))


def spread(rows: int, parts: int) -> list[int]:
    """Rows in parts that differ by at most one, the larger ones first."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def pieces(shares: Sequence[int], rank: int) -> list[Piece]:
    """The rows that a rank takes of each stream."""
    start = sum(shares[:rank])
    stop = start + shares[rank]
    found = []
    ends = list(itertools.accumulate(stream_rows(shares), initial=0))
    for stream, (begin, end) in enumerate(zip(ends, ends[1:])):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            found.append(Piece(stream, first - begin, last - begin))
    return found


def passes_of(shares: Sequence[int], most: int, together: bool) -> list[list[int]]:
    """The rows of each rank in each of its passes, `most` at most.

    Together: all ranks make the same number of passes, since they wait for one another in each of them; a rank with few rows has
    none in the last ones then.
    """
    counts = [-(-rows // most) for rows in shares]
    return [spread(rows, max(counts) if together else count) for rows, count in zip(shares, counts)]


def share_rows(rows: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Rows of each rank in proportion to the speeds: at least so many each, the sum exact.

    Every further row goes to the rank that would be done first with it, so that the slowest rank ends as early as can be.
    """
    shares = [least] * len(speeds)
    # When each rank would be done with one row more.
    due = [((least + 1) / speed, at) for at, speed in enumerate(speeds)]
    heapq.heapify(due)
    for dummy in range(rows - least * len(speeds)):
        rank = due[0][1]
        shares[rank] += 1
        heapq.heapreplace(due, ((shares[rank] + 1) / speeds[rank], rank))
    return shares


def head_weights(speeds: Sequence[float]) -> list[int]:
    """The parts of a head that is shared out, by the speeds of the ranks."""
    return [max(1, round(HEAD_UNITS * speed / sum(speeds))) for speed in speeds]


def part_bounds(vocab_size: int, padded: int, weights: Sequence[int]) -> list[int]:
    """Where the parts begin, and the end: sizes go by the weights, the last part takes the padding, too.

    Raises ValueError where a part would have nothing of the vocabulary.
    """
    sums = list(itertools.accumulate(weights, initial=0))
    bounds = [GRANULE * round(vocab_size * one / sums[-1] / GRANULE) if sums[-1] else 0 for one in sums]
    bounds[-1] = padded
    for rank, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        if min(stop, vocab_size) <= start:
            raise ValueError(f"rank {rank} would have no part of a vocabulary of {vocab_size}")
    return bounds
