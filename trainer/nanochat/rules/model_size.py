# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Model size from depth and a few other numbers: width, padding, windows, parameters, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 64
# Input columns of the value embeddings' gates and of the smear's.
GATE_CHANNELS, SMEAR_CHANNELS = 12, 24
# The matrices of a layer, in squares of the width: c_q, c_k, c_v and c_proj of the attention, c_fc and c_proj of the MLP.
LAYER_MATRICES = (1, 1, 1, 1, 4, 4)


def heads(depth: int, aspect_ratio: int, head_dim: int) -> int:
    """Number of attention heads; the width, depth * aspect ratio, is rounded up to whole heads."""
    return -(-depth * aspect_ratio // head_dim)


def padded(vocab_size: int) -> int:
    """Rows of the embedding tables."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, stored in checkpoints as model_config."""

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"

    @classmethod
    def from_depth(
        cls,
        depth: int,
        aspect_ratio: int = 64,
        head_dim: int = 128,
        sequence_len: int = 2048,
        vocab_size: int = 32768,
        window_pattern: str = "SSSL",
    ) -> ModelConfig:
        n_head = heads(depth, aspect_ratio, head_dim)
        return cls(sequence_len, vocab_size, depth, n_head, n_head, n_head * head_dim, window_pattern)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return padded(self.vocab_size)

    @property
    def backout_layer(self) -> int:
        return self.n_layer // 2


def value_layers(sizes: ModelConfig) -> list[int]:
    """The layers with value embeddings: every other one, including the last."""
    return list(range((sizes.n_layer - 1) % 2, sizes.n_layer, 2))


def parameters(sizes: ModelConfig) -> dict[str, int]:
    """Number of parameters by group, as the trainer prints them."""
    table, gated = padded(sizes.vocab_size) * sizes.n_embd, len(value_layers(sizes))
    counts = {
        "wte": table,
        "value_embeds": gated * table,
        "lm_head": table,
        "transformer_matrices": sizes.n_layer * sum(LAYER_MATRICES) * sizes.n_embd**2
        + gated * sizes.n_head * GATE_CHANNELS,
        "scalars": 2 * sizes.n_layer + SMEAR_CHANNELS + 2,
    }
    counts["total"] = sum(counts.values())
    return counts


def windows(sizes: ModelConfig) -> list[int]:
    """How far back a query of each layer attends; the last layer sees everything."""
    pattern, sequence = sizes.window_pattern.upper(), sizes.sequence_len
    short = -(-sequence // (4 * 128)) * 128
    marks = [pattern[layer % len(pattern)] for layer in range(sizes.n_layer - 1)]
    return [sequence if mark == "L" else short for mark in marks] + [sequence]


def flops_per_token(sizes: ModelConfig) -> int:
    """FLOPs of forward and backward."""
    counts = parameters(sizes)
    linear = counts["transformer_matrices"] + counts["lm_head"] + SMEAR_CHANNELS
    attention = sum(12 * sizes.n_embd * min(one, sizes.sequence_len) for one in windows(sizes))
    return 6 * linear + attention
