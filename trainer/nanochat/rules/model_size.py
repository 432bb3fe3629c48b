# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Model size from depth and a few other numbers: width, padding, windows, parameters, FLOPs."""

from __future__ import annotations

from typing import NamedTuple

VOCAB_MULTIPLE = 64
# Input columns of the value embeddings' gates and of the smear's.
GATE_CHANNELS, SMEAR_CHANNELS = 12, 24


def heads(depth: int, aspect_ratio: int, head_dim: int) -> int:
    """Number of attention heads; the width, depth * aspect ratio, is rounded up to whole heads."""
    return -(-depth * aspect_ratio // head_dim)


def padded(vocab_size: int) -> int:
    """Rows of the embedding tables."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def has_value_embeds(layer: int, depth: int) -> bool:
    """True for every other layer, including the last."""
    return layer % 2 == (depth - 1) % 2


def window(layer: int, depth: int, pattern: str, sequence: int) -> int:
    """How far back a query attends; the last layer sees everything."""
    if pattern[layer % len(pattern)].upper() == "L" or layer == depth - 1:
        return sequence
    return -(-sequence // (4 * 128)) * 128


class Shape(NamedTuple):
    """The sizes that determine all others."""

    depth: int
    aspect_ratio: int
    head_dim: int
    sequence: int
    window_pattern: str
    vocab_size: int

    @property
    def n_embd(self) -> int:
        return self.n_head * self.head_dim

    @property
    def n_head(self) -> int:
        return heads(self.depth, self.aspect_ratio, self.head_dim)

    @property
    def padded_vocab(self) -> int:
        return padded(self.vocab_size)

    @property
    def value_layers(self) -> list[int]:
        return [layer for layer in range(self.depth) if has_value_embeds(layer, self.depth)]


def parameters(shape: Shape) -> dict[str, int]:
    """Number of parameters by group, as the trainer prints them."""
    table = shape.padded_vocab * shape.n_embd
    gates = len(shape.value_layers) * shape.n_head * GATE_CHANNELS
    counts = {
        "wte": table,
        "value_embeds": len(shape.value_layers) * table,
        "lm_head": table,
        "transformer_matrices": shape.depth * 12 * shape.n_embd**2 + gates,
        "scalars": 2 * shape.depth + SMEAR_CHANNELS + 2,
    }
    counts["total"] = sum(counts.values())
    return counts


def windows(shape: Shape) -> list[int]:
    """The attention window of each layer."""
    return [window(layer, shape.depth, shape.window_pattern, shape.sequence) for layer in range(shape.depth)]


def flops_per_token(shape: Shape) -> int:
    """FLOPs of forward and backward."""
    counts = parameters(shape)
    linear = counts["transformer_matrices"] + counts["lm_head"] + SMEAR_CHANNELS
    attention = sum(12 * shape.n_embd * min(one, shape.sequence) for one in windows(shape))
    return 6 * linear + attention
