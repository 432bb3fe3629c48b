# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which rank takes which rows of a step, and in how many passes. No torch here.

The rows of a step come from as many streams as there are ranks, from each the same number in every step, whoever takes them: so
what a step learns from does not depend on how the rows are shared out. In the order of the streams, the first rank takes the
first rows, the next rank those that follow, and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows of a stream, of those that it gives to a step."""

    stream: int
    start: int
    stop: int


def stream_rows(shares: Sequence[int]) -> list[int]:
    """The rows that each stream gives to a step of all these rows."""
    return spread(sum(shares), len(shares))


def spread(rows: int, parts: int) -> list[int]:
    """Rows in so many parts that differ by one at most, the larger ones first."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def pieces(shares: Sequence[int], rank: int) -> list[Piece]:
    """What a rank takes of each stream."""
    start = sum(shares[:rank])
    stop = start + shares[rank]
    found = []
    for stream, (begin, end) in enumerate(itertools.pairwise(itertools.accumulate(stream_rows(shares), initial=0))):
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
    return [spread(rows, max(counts) if together else count) for rows, count in zip(shares, counts, strict=True)]
