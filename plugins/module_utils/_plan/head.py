# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the head is shared out among the hosts, and the bytes of either way: as the trainer's head_parts.py counts them."""

from __future__ import annotations

from typing import Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import WIRE_BYTES

STATISTICS_BYTES = 8
TARGET_BYTES = 4


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


def most_bytes(tokens: Sequence[int], width: int, element: int = 4) -> int:
    """Those of the rank that sends most."""
    return max(shared_bytes(tokens, width, rank, element) for rank in range(len(tokens)))


def can_share(device: str, sync: str, ours: bool = True) -> bool:
    """With local steps too: in the steps that the hosts make together all the same."""
    return ours and device == "cpu" and sync in WIRE_BYTES


def choose(wanted: str, able: bool, vocabulary: int, width: int, tokens: Sequence[int], sync: str) -> str:
    """The plan's `head`: shared or whole; auto takes what sends fewer bytes."""
    if len(tokens) < 2 or not able:
        return "whole"
    if wanted != "auto":
        return wanted
    of_gradient, of_state = WIRE_BYTES[sync]
    saves = most_bytes(tokens, width, of_state) < whole_bytes(vocabulary, width, len(tokens), of_gradient)
    return "shared" if saves else "whole"
