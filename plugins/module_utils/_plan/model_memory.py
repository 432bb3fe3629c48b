# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model's memory and disk use on a host, and the plan's section about it."""

from __future__ import annotations

from .._contract.plan import Model
from .._contract.settings_table import RunSettings
from .._rules.model_size import ModelConfig, flops_per_token, parameters, value_layers
from .._rules.ways import packs

FLOAT = 4
# Resident memory of Python with torch, the tokenizer and the buffers of the data loader.
RUNTIME_BYTES = 500_000_000
# float32 values per token and unit of width that a layer keeps for its backward pass.
ACTIVATIONS_PER_LAYER = 30
# For logits: the trainer's chunk of gradients, and its working set in cache.
LOGIT_BYTES = 2**27 + 2**25


def shape_of(run: RunSettings) -> ModelConfig:
    """The sizes from the settings."""
    return ModelConfig.from_depth(
        run.depth, run.aspect_ratio, run.head_dim, run.sequence, run.vocab_size, run.window_pattern
    )


def memory(shape: ModelConfig, device_batch: int, sync: str = "exact", parts_of_head: int = 1) -> int:
    """Bytes of one rank, an estimate for float32. A head in parts has only that of this rank trained here; its weights, and its
    whole optimizer state during a save, are here anyway."""
    counts = parameters(shape)
    tables = counts["wte"] + counts["value_embeds"]
    tokens = device_batch * shape.sequence_len
    dense = counts["total"] - tables
    apart = counts["lm_head"] if parts_of_head > 1 else 0
    hidden = 4 * tokens * parts_of_head * shape.n_embd if apart else 0
    logits = FLOAT * tokens * shape.padded_vocab_size
    parts = {
        "weights": FLOAT * counts["total"],
        # Send buffers for the other ranks; only the used rows of the embeddings.
        "gradients": FLOAT * ((dense - apart) * 2 + apart // parts_of_head + hidden)
        + FLOAT * tokens * shape.n_embd * (1 + len(value_layers(shape))),
        "adamw": FLOAT * 2 * (tables + counts["lm_head"] + counts["scalars"]),
        "muon": FLOAT * 2 * counts["transformer_matrices"],
        "activations": FLOAT * tokens * shape.n_embd * shape.n_layer * ACTIVATIONS_PER_LAYER,
        "logits": min(2 * logits, LOGIT_BYTES),
        # Rounding errors of each matrix gradient.
        "feedback": FLOAT * (counts["lm_head"] - apart + counts["transformer_matrices"]) if packs(sync) else 0,
        "runtime": RUNTIME_BYTES,
    }
    return sum(parts.values())


def checkpoint_bytes(shape: ModelConfig, sync: str = "exact") -> int:
    """A checkpoint's size on one host: the weights, twice as much optimizer state, and the rounding errors."""
    counts = parameters(shape)
    feedback = counts["lm_head"] + counts["transformer_matrices"] if packs(sync) else 0
    return FLOAT * (3 * counts["total"] + feedback)


def describe(shape: ModelConfig, aspect_ratio: int) -> Model:
    """The plan's `model`."""
    return {
        "depth": shape.n_layer,
        "aspect_ratio": aspect_ratio,
        "head_dim": shape.head_dim,
        "sequence": shape.sequence_len,
        "window_pattern": shape.window_pattern.upper(),
        "vocab_size": shape.vocab_size,
        "n_embd": shape.n_embd,
        "n_head": shape.n_head,
        "parameters": parameters(shape),
        "flops_per_token": flops_per_token(shape),
    }
