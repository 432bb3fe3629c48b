# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Generates text token by token, with a cache of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import UserError
from nanochat.model.gpt import GPT, KVCache
from nanochat.rules.model_size import ModelConfig
from nanochat.run import checkpoint_manager

STOPS = ("<|bos|>", "<|assistant_end|>")


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token per row of logits [B, V]; temperature 0 picks the most likely."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.float() / temperature
    if top_k is not None and top_k < scaled.size(-1):
        values, places = scaled.topk(top_k, dim=-1)
        picked = torch.multinomial(values.softmax(dim=-1), 1, generator=generator)
        return places.gather(-1, picked).squeeze(-1)
    return torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
    stops: Collection[int] = (),
) -> Iterator[int]:
    """The tokens after the prompt, as they are generated; ends at a stop token, which is not yielded."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(model, 1, len(prompt) + max_tokens)
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    for dummy in range(max_tokens):
        chosen = choose(model(ids, cache=cache)[:, -1], temperature, top_k, generator)
        token = int(chosen)
        if token in stops:
            return
        yield token
        ids = chosen.view(1, 1)


def stops(tokenizer: Tokenizer) -> set[int]:
    """The tokens at which an answer ends."""
    return {tokenizer.special(name) for name in STOPS}


def load_model(folder: Path, step: int, tokenizer: Tokenizer) -> GPT:
    """A checkpoint's model, ready for generation and evaluation."""
    wanted = checkpoint_manager.load_meta(folder, step)["model_config"]
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    config = ModelConfig(**{name: value for name, value in wanted.items() if name in known})
    if config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"the model of step {step} in {folder} has {config.vocab_size} tokens, but the tokenizer has "
            f"{tokenizer.vocab_size}; use the tokenizer it was trained with."
        )
    model = GPT(config)
    checkpoint_manager.load_weights(model, folder, step)
    return model.eval()
