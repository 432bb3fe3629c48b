# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How big a model is, counted rather than guessed from its name: parameters, FLOPs, memory of a rank, bytes of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Model

FLOAT = 4
# Bytes of a value of a matrix on the wire with each way that sends rows of the embeddings, and of those rows. What is packed
# has two bytes more for each 128 values.
WIRE_BYTES = {"exact": (4.0, 4), "bf16": (2.0, 2), "int8": (1 + 2 / 128, 2), "int4": (0.5 + 2 / 128, 2)}
# The same of the rows of the embeddings where hosts meet after local steps.
MEETING_ROW_BYTES = {"exact": 4.0, "bf16": 2.0, "int8": 1 + 2 / 128, "int4": 1 + 2 / 128}
LEAST_BLOCK = 16  # what the width of a model must divide by to be packed
VOCAB_MULTIPLE = 64
GATE_INPUTS = 12
SMEAR_INPUTS = 24
# Resident memory of Python with torch, the tokenizer and the buffers of the data loader.
RUNTIME_BYTES = 500_000_000
# float32 values a token and unit of width that one layer keeps for its backward pass.
ACTIVATIONS_PER_LAYER = 30
# Of logits that exist at a time: the trainer's chunk of gradients, and what it works on in the cache. Other trainers hold
# all of them: values, gradient and a scratch copy.
LOGIT_BYTES = 2**27 + 2**25
LOGIT_COPIES = 3


class Shape(NamedTuple):
    """The sizes that settle all others."""

    depth: int
    aspect_ratio: int
    head_dim: int
    sequence: int
    window_pattern: str
    vocab_size: int

    @property
    def n_embd(self) -> int:
        return -(-self.depth * self.aspect_ratio // self.head_dim) * self.head_dim

    @property
    def n_head(self) -> int:
        return self.n_embd // self.head_dim

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def value_layers(self) -> list[int]:
        """Layers with value embeddings: every other one, the last included."""
        return [layer for layer in range(self.depth) if layer % 2 == (self.depth - 1) % 2]


def parameters(shape: Shape) -> dict[str, int]:
    """Counted parameters by group, as the trainer prints them."""
    table = shape.padded_vocab * shape.n_embd
    gates = len(shape.value_layers) * shape.n_head * GATE_INPUTS
    counts = {
        "wte": table,
        "value_embeds": len(shape.value_layers) * table,
        "lm_head": table,
        "transformer_matrices": shape.depth * 12 * shape.n_embd**2 + gates,
        "scalars": 2 * shape.depth + SMEAR_INPUTS + 2,
    }
    counts["total"] = sum(counts.values())
    return counts


def windows(shape: Shape) -> list[int]:
    """The attention window of each layer."""
    short = -(-shape.sequence // (4 * 128)) * 128
    pattern = shape.window_pattern.upper()
    letters = [pattern[layer % len(pattern)] for layer in range(shape.depth)]
    letters[-1] = "L"
    return [shape.sequence if letter == "L" else short for letter in letters]


def flops_per_token(shape: Shape) -> int:
    """Forward and backward."""
    counts = parameters(shape)
    linear = counts["transformer_matrices"] + counts["lm_head"] + SMEAR_INPUTS
    attention = sum(12 * shape.n_embd * min(window, shape.sequence) for window in windows(shape))
    return 6 * linear + attention


def head_work(model: Model) -> float:
    """The head's part of the work of a step."""
    return 6 * model["parameters"]["lm_head"] / model["flops_per_token"]


def memory(
    shape: Shape, device_batch: int, sync: str = "exact", ours: bool = True, local: bool = False, parts_of_head: int = 1
) -> dict[str, int]:
    """Bytes of one rank by purpose, an estimate for float32. A head in parts has only that of this rank trained here; its
    weights, and in a save the whole of its optimizer's state, are here all the same."""
    counts = parameters(shape)
    tables = counts["wte"] + counts["value_embeds"]
    tokens = device_batch * shape.sequence
    rows = ours and sync in WIRE_BYTES
    dense = counts["total"] - (tables if rows else 0)
    apart = counts["lm_head"] if parts_of_head > 1 else 0
    hidden = 4 * tokens * parts_of_head * shape.n_embd if apart else 0
    logits = FLOAT * tokens * shape.padded_vocab
    parts = {
        "weights": FLOAT * counts["total"],
        # Their own buffer on the way to the other ranks; only the rows of the embeddings that a step touches.
        "gradients": FLOAT * ((dense - apart) * 2 + apart // parts_of_head + hidden)
        + (FLOAT * tokens * shape.n_embd * (1 + len(shape.value_layers)) if rows else 0),
        "adamw": FLOAT * 2 * (tables + counts["lm_head"] + counts["scalars"]),
        "muon": FLOAT * 2 * counts["transformer_matrices"],
        "activations": FLOAT * tokens * shape.n_embd * shape.depth * ACTIVATIONS_PER_LAYER,
        "logits": min(2 * logits, LOGIT_BYTES) if ours else LOGIT_COPIES * logits,
        # Where the ranks meet after local steps: what was, what changed, the mean and its momentum; of rows of the tables what
        # they were before they were touched, and while a mean is under way what they would be and what they are.
        "meeting": FLOAT * (4 * (counts["total"] - tables) + 3 * tables) if local else 0,
        # What packing has left of each gradient of a matrix.
        "feedback": FLOAT * (counts["lm_head"] - apart + counts["transformer_matrices"]) if packs(sync) else 0,
        "runtime": RUNTIME_BYTES,
    }
    parts["total"] = sum(parts.values())
    return parts


def packs(sync: str) -> bool:
    """Whether this way packs what travels, and keeps what rounding leaves."""
    return sync in ("int8", "int4")


def checkpoint_bytes(shape: Shape, sync: str = "exact") -> int:
    """One checkpoint on one host: the weights, as much again twice for the optimizers' state, and what packing has left."""
    counts = parameters(shape)
    feedback = counts["lm_head"] + counts["transformer_matrices"] if packs(sync) else 0
    return FLOAT * (3 * counts["total"] + feedback)


def describe(shape: Shape) -> Model:
    """The plan's `model`."""
    return {
        "depth": shape.depth,
        "aspect_ratio": shape.aspect_ratio,
        "head_dim": shape.head_dim,
        "sequence": shape.sequence,
        "window_pattern": shape.window_pattern.upper(),
        "vocab_size": shape.vocab_size,
        "n_embd": shape.n_embd,
        "n_head": shape.n_head,
        "parameters": parameters(shape),
        "flops_per_token": flops_per_token(shape),
    }
