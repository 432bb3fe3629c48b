# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ways of --sync: how ranks come to the sum of their gradients, in what form it travels, and what they send.

A new way is a row of WAYS here, and in the trainer its wire in parallel/wire.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Packed values that share a scale, in a matrix whose columns divide by it. In models whose width does not divide by
# LEAST_BLOCK the scales would cost what the packing saves.
BLOCK, LEAST_BLOCK = 128, 16
SCALE_BYTES = 2
STATISTICS_BYTES = 8  # of a token and a part of the head: the sum of its exponentials, and that of the target
TARGET_BYTES = 4


class Way(NamedTuple):
    """One way that sends matrices to those who sum, and of the embeddings the rows that were touched."""

    name: str
    told: str  # for --help
    value_bytes: float  # of a value of a matrix on the wire
    row_bytes: int  # of a value of a row of the embeddings, and of a hidden state for a shared head
    meeting_bytes: float  # of a value of such a row where ranks meet after local steps
    packs: bool = False  # values share scales, and the sender keeps what rounding leaves (error feedback)
    joins: bool = True  # whether the joined ranks of a checkout have it, too


def packed_bytes(bits: int) -> float:
    """Bytes of a value that is packed, with its part of a scale."""
    return bits / 8 + SCALE_BYTES / BLOCK


# By how little they round: `auto` takes the first of those that are nearly as fast as the fastest.
_WAYS = (
    Way("exact", "only the used embedding rows, float32", 4.0, 4, 4.0),
    Way("bf16", "the same, bf16 on the wire", 2.0, 2, 2.0),
    Way("int8", "the same, 8 bits on the wire, with error feedback", packed_bytes(8), 2, packed_bytes(8), packs=True),
    Way(
        "int4",
        "the same, 4 bits on the wire, with error feedback",
        packed_bytes(4),
        2,
        packed_bytes(8),
        packs=True,
        joins=False,
    ),
)
WAYS = {way.name: way for way in _WAYS}
# Those that send every tensor whole.
WHOLE = {"dense": "every tensor whole", "ddp": "DistributedDataParallel"}
NAMES = (*WAYS, *WHOLE)
TOLD = ", ".join(f"{name} ({told})" for name, told in [*((way.name, way.told) for way in _WAYS), *WHOLE.items()])
# What joined ranks have.
JOINED = (*(way.name for way in _WAYS if way.joins), "dense")


def packs(sync: str) -> bool:
    """Whether this way packs what travels, and keeps what rounding leaves."""
    return sync in WAYS and WAYS[sync].packs


def fits(sync: str, width: int) -> bool:
    """Whether a model of this width can be sent so."""
    return not packs(sync) or width % LEAST_BLOCK == 0


# The head, which may travel as a gradient or be shared out among the ranks


def whole_bytes(vocabulary: int, width: int, world: int, element: float = 4) -> int:
    """Bytes of the head's gradient that a rank sends in a step; element: bytes of a number on the wire."""
    if world == 2:
        return int(vocabulary * width * element)
    return int(2 * (world - 1) * vocabulary * width * element / world)


def shared_bytes(tokens: Sequence[int], width: int, rank: int, element: int = 4) -> int:
    """Bytes that a rank sends for a shared head in a step with these tokens per rank."""
    others, mine, every = len(tokens) - 1, tokens[rank], sum(tokens)
    hidden = others * mine * (width * element + TARGET_BYTES)
    gradients = (every - mine) * width * element
    return hidden + gradients + others * every * STATISTICS_BYTES


def most_bytes(tokens: Sequence[int], width: int, element: int = 4) -> int:
    """Those of the rank that sends most."""
    return max(shared_bytes(tokens, width, rank, element) for rank in range(len(tokens)))


def can_share(device: str, sync: str) -> bool:
    """Whether ranks can share the head; with local steps, in the lockstep parts."""
    return device == "cpu" and sync in WAYS


def choose_head(wanted: str, able: bool, vocabulary: int, width: int, tokens: Sequence[int], sync: str) -> str:
    """Shared or whole; auto takes what sends fewer bytes. tokens: of each rank in a step."""
    if len(tokens) < 2 or not able:
        return "whole"
    if wanted != "auto":
        return wanted
    way = WAYS[sync]
    saves = most_bytes(tokens, width, way.row_bytes) < whole_bytes(vocabulary, width, len(tokens), way.value_bytes)
    return "shared" if saves else "whole"
