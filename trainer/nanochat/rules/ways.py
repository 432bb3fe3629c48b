# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modes of --sync: how ranks sum gradients, the number format on the wire, and the bytes sent.

To add one, add a row to WAYS here and its wire in the trainer's parallel/wire.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Packed values that share a scale, if it divides the matrix's columns. If LEAST_BLOCK does not divide a model's width, the
# scales would cost as much as packing saves.
BLOCK, LEAST_BLOCK = 128, 16
SCALE_BYTES = 2
STATISTICS_BYTES = 8  # per token and part of the head: the sum of exponentials, and the target's exponential
TARGET_BYTES = 4


class Way(NamedTuple):
    """A mode that sends matrices to the ranks that sum them, and only the embedding rows used."""

    name: str
    summary: str  # for --help
    value_bytes: float  # on the wire, per matrix value
    row_bytes: float  # per value of an embedding row
    hidden_bytes: float  # per value of a shared head's input and its gradient
    packs: bool = False  # values share scales, and the sender keeps the rounding error (error feedback)


def packed_bytes(bits: int) -> float:
    """Bytes per packed value, including its part of the scale."""
    return bits / 8 + SCALE_BYTES / BLOCK


_FED = "on the wire, with error feedback"
# Most precise first: `auto` takes the first that is nearly as fast as the fastest.
_WAYS = (
    Way("exact", "only the used embedding rows, float32", 4.0, 4, 4.0),
    Way("bf16", "the same, bf16 on the wire", 2.0, 2, 2.0),
    Way("int8", f"the same, 8 bits {_FED}", packed_bytes(8), 2, 2.0, packs=True),
    Way("int4", f"the same, 4 bits {_FED}", packed_bytes(4), packed_bytes(8), packed_bytes(8), packs=True),
)
WAYS = {way.name: way for way in _WAYS}
SUMMARY = ", ".join(f"{way.name} ({way.summary})" for way in _WAYS)


def packs(sync: str) -> bool:
    """Whether this mode packs values, with error feedback."""
    return WAYS[sync].packs


def fits(sync: str, width: int) -> bool:
    """Whether this mode can send a model of this width."""
    return not packs(sync) or width % LEAST_BLOCK == 0


# The head: its gradient is sent, or the head is split among the ranks


def whole_bytes(vocabulary: int, width: int, world: int, element: float = 4) -> int:
    """Bytes of the head's gradient that a rank sends per step; element: bytes per number on the wire."""
    return int(2 * (world - 1) * vocabulary * width * element / world)


def shared_bytes(tokens: Sequence[int], width: int, rank: int, element: float = 4) -> int:
    """Bytes that a rank sends per step for a shared head; tokens: of each rank."""
    others, mine, every = len(tokens) - 1, tokens[rank], sum(tokens)
    hidden = others * mine * (width * element + TARGET_BYTES)
    gradients = (every - mine) * width * element
    return int(hidden + gradients) + others * every * STATISTICS_BYTES


def most_bytes(tokens: Sequence[int], width: int, element: float) -> int:
    """Bytes sent by the rank that sends most."""
    return max(shared_bytes(tokens, width, rank, element) for rank in range(len(tokens)))


def choose_head(wanted: str, vocabulary: int, width: int, tokens: Sequence[int], sync: str) -> str:
    """Shared or whole; auto takes the one that sends fewer bytes. tokens: of each rank in a step."""
    if len(tokens) < 2:
        return "whole"
    if wanted != "auto":
        return wanted
    way = WAYS[sync]
    saves = most_bytes(tokens, width, way.hidden_bytes) < whole_bytes(vocabulary, width, len(tokens), way.value_bytes)
    return "shared" if saves else "whole"
