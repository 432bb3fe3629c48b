# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The model's sizes, its forward pass and its cache."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from reference import TINY, model_of, tokens

from nanochat.kit.common import UserError
from nanochat.model.fused import TrainingPass, check_gradients
from nanochat.model.gpt import GPT, MLP, KVCache, Weight
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.rules.model_size import ModelConfig

GOLDEN = json.loads((Path(__file__).parent / "golden" / "model.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['config']['n_layer']} layers")
def test_state_dict_has_the_keys_shapes_and_order_of_upstream(case: dict) -> None:
    model = GPT(ModelConfig(**case["config"]))
    assert [(name, list(t.shape)) for name, t in model.state_dict().items()] == list(case["keys"].items())


def test_a_parameter_without_a_gradient_is_refused_when_the_pass_is_made() -> None:
    model = model_of()
    model.transformer.block(1).mlp.made_up = torch.nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(UserError, match=r"parameters without a gradient: transformer\.h\.1\.mlp\.made_up; "):
        TrainingPass(model)


def test_a_parameter_that_nobody_fills_or_updates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = GPT.init_weights
    # All but one, which keeps what was in memory.
    monkeypatch.setattr(
        GPT,
        "init_weights",
        lambda self: [kept := self.smear_lambda.clone(), filled(self), self.smear_lambda.copy_(kept)],
    )
    with pytest.raises(UserError, match=r"^init_weights leaves smear_lambda unfilled; "):
        check_gradients()
    model = model_of()
    model.transformer.block(1).mlp.made_up = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(
        UserError, match=r"^transformer\.h\.1\.mlp\.made_up: no matrix, so it needs a group in adamw_groups"
    ):
        Optimizer(model, LearningRates())


def test_a_parameter_that_nobody_counts_is_refused_when_the_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_more(self: MLP, config: ModelConfig) -> None:
        made(self, config)
        self.made_up = Weight(config.n_embd, 8)

    made = MLP.__init__
    monkeypatch.setattr(MLP, "__init__", with_more)
    with pytest.raises(UserError, match=r"has 66,642 parameters, but rules/model_size.py counts 65,618; "):
        GPT(TINY)


def test_the_width_is_rounded_up_to_whole_heads() -> None:
    assert ModelConfig.from_depth(3, aspect_ratio=43, head_dim=64).n_embd == 3 * 64


def test_heads_that_share_keys_are_refused() -> None:
    with pytest.raises(UserError, match="4 heads and 2 for keys and values is not supported"):
        GPT(dataclasses.replace(TINY, n_head=4))


def test_initial_weights() -> None:
    config = dataclasses.replace(TINY, vocab_size=1000, n_embd=96)
    model, again, other = GPT(config), GPT(config), GPT(config)
    for filled, seed in ((model, 42), (again, 42), (other, 43)):
        filled.init_weights(seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    model.requires_grad_(False)
    block, bound = model.transformer.block(3), math.sqrt(3 / 96)
    assert model.transformer.wte.weight.std() == pytest.approx(0.8, rel=0.02)
    assert model.lm_head.weight.std() == pytest.approx(0.001, rel=0.02)
    for weight, limit in (
        (block.attn.c_q.weight, bound),
        (block.attn.c_v.weight, bound),
        (block.mlp.c_fc.weight, 0.4 * bound),
        (model.value_table(3), bound),
    ):
        assert weight.abs().max() == pytest.approx(limit, rel=0.01)
    assert not block.attn.c_proj.weight.any()
    assert not block.mlp.c_proj.weight.any()
    assert 0 <= block.attn.ve_gate.weight.min() <= block.attn.ve_gate.weight.max() <= 0.02
    assert model.resid_lambdas.tolist() == pytest.approx([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    assert model.x0_lambdas.tolist() == pytest.approx([0.20, 0.15, 0.10, 0.05])
    assert (model.smear_lambda.item(), model.backout_lambda.item()) == (0.0, pytest.approx(0.2))


@pytest.mark.parametrize("changes", [{}, {"sequence_len": 300, "window_pattern": "SL"}], ids=str)
@pytest.mark.parametrize("first", [1, 7])
def test_cache_gives_what_the_whole_sequence_gives(first: int, changes: dict) -> None:
    model = model_of(**changes)
    ids = tokens(model)[0]
    whole = model(ids)
    cache = KVCache(model, len(ids), ids.size(1))
    pieces = [model(ids[:, :first], cache=cache)]
    for start in range(first, ids.size(1), 23):
        pieces.append(model(ids[:, start : start + 23], cache=cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=2e-5)
