# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which part of the vocabulary each rank has of a head that is shared out, and whether that saves bytes. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# Parts begin at multiples of so many rows: of whole vectors, and of few enough that small vocabularies divide.
GRANULE = 16
STATISTICS_BYTES = 8  # of a token and a part: the sum of its exponentials, and that of the target
TARGET_BYTES = 4
# Bytes of a number of the head's gradient and of a hidden state, by --sync.
ELEMENTS = {"exact": (4.0, 4), "bf16": (2.0, 2), "int8": (1 + 2 / 128, 2), "int4": (0.5 + 2 / 128, 2)}


def part_bounds(vocab_size: int, padded: int, weights: Sequence[int]) -> list[int]:
    """Where the parts begin, and the end: sizes go by the weights, the last part takes the padding, too.

    Raises ValueError where a part would have nothing of the vocabulary.
    """
    sums = list(itertools.accumulate(weights, initial=0))
    bounds = [GRANULE * round(vocab_size * one / sums[-1] / GRANULE) if sums[-1] else 0 for one in sums]
    bounds[-1] = padded
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if min(stop, vocab_size) <= start:
            raise ValueError(f"rank {rank} would have no part of a vocabulary of {vocab_size}")
    return bounds


def whole_bytes(vocabulary: int, width: int, world: int, element: float = 4) -> int:
    """What a rank sends of the head's gradient in a step; element: bytes of a number on the wire."""
    if world == 2:
        return int(vocabulary * width * element)
    return int(2 * (world - 1) * vocabulary * width * element / world)


def shared_bytes(tokens: Sequence[int], width: int, rank: int, element: int = 4) -> int:
    """What a rank sends in a step in which the ranks take so many tokens, if the head is shared out."""
    others, mine, every = len(tokens) - 1, tokens[rank], sum(tokens)
    hidden = others * mine * (width * element + TARGET_BYTES)
    gradients = (every - mine) * width * element
    return hidden + gradients + others * every * STATISTICS_BYTES


def sharing_saves(vocabulary: int, tokens: Sequence[int], width: int, sync: str = "exact") -> bool:
    """Whether the rank that sends most sends less with the head shared out than with the whole gradient."""
    world = len(tokens)
    if world < 2 or sync not in ELEMENTS:
        return False
    of_gradient, of_state = ELEMENTS[sync]
    shared = max(shared_bytes(tokens, width, rank, of_state) for rank in range(world))
    return shared < whole_bytes(vocabulary, width, world, of_gradient)
