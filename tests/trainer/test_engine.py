# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bits per byte and generation, on a small model with random weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from reference import save_model, talkative

from nanochat.data import tokenizer
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import UserError
from nanochat.model.gpt import GPT
from nanochat.run import engine


@pytest.fixture(scope="module")
def model() -> GPT:
    """A model with windows shorter than the generated text."""
    return talkative(3, 128, "SL")


@pytest.fixture
def base(base_folder: Path, model: GPT) -> Path:
    for step in (5, 10):
        save_model(base_folder / "base_checkpoints/d3", step, model)
    return base_folder


def test_sampling_follows_seed_and_top_k(model: GPT) -> None:
    def draw(seed: int, top_k: int | None = None) -> list[int]:
        return list(engine.generate(model, [503, 1, 2], 20, temperature=1.5, top_k=top_k, seed=seed))

    assert draw(1) == draw(1) != draw(2)
    assert draw(1, top_k=1) == list(engine.generate(model, [503, 1, 2], 20, temperature=0.0))


def test_top_k_draws_among_the_likeliest_by_probability() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -1.0, -5.0]]).expand(4000, 4)
    drawn = engine.choose(logits, 1.0, 2, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=4).tolist()
    assert counts[2:] == [0, 0]
    assert abs(counts[1] / 4000 - 0.75) < 0.03


def test_generation_ends_at_a_stop_token(model: GPT) -> None:
    free = list(engine.generate(model, [503, 7], 30, temperature=0.0))
    stop = free[4]
    assert list(engine.generate(model, [503, 7], 30, temperature=0.0, stops={stop})) == free[: free.index(stop)]


def test_a_model_of_another_vocabulary_or_shape_is_refused(base: Path, tokens: Tokenizer) -> None:
    folder = base / "base_checkpoints/d3"
    with pytest.raises(UserError, match="has 512 tokens, but the tokenizer has 280"):
        engine.load_model(folder, 5, tokenizer.train(["a b c d e f g h i j k l m n o p " * 9], 280))
    path = folder / "meta_000005.json"
    path.write_text(path.read_text().replace('"n_layer": 3', '"n_layer": 4'))
    with pytest.raises(UserError, match=r"the weights of step 5 in .* do not match this model: .*Missing key"):
        engine.load_model(folder, 5, tokens)
