# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory and disk that a model takes on a host, and the plan's section about it."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Model
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import RunSettings
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape, flops_per_token, parameters
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS, packs

FLOAT = 4
# Resident memory of Python with torch, the tokenizer and the buffers of the data loader.
RUNTIME_BYTES = 500_000_000
# float32 values a token and unit of width that one layer keeps for its backward pass.
ACTIVATIONS_PER_LAYER = 30
# Of logits that exist at a time: the trainer's chunk of gradients, and what it works on in the cache. Other trainers hold
# all of them: values, gradient and a scratch copy.
LOGIT_BYTES = 2**27 + 2**25
LOGIT_COPIES = 3


def shape_of(run: RunSettings) -> Shape:
    """The sizes that the settings say."""
    return Shape(run.depth, run.aspect_ratio, run.head_dim, run.sequence, run.window_pattern, run.vocab_size)


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
    rows = ours and sync in WAYS
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
