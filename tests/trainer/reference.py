# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small models, random tokens, and gradients by autograd through the model itself, whose figures are those of upstream (test_parity.py)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from baseline_model import BaselineGPT

from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT
from nanochat.model.gradients import unique_ids
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.schedule import StepSchedule
from nanochat.run import checkpoint_manager

TINY = ModelConfig(sequence_len=40, vocab_size=100, n_layer=4, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")


def model_of(config: ModelConfig = TINY, **changes: Any) -> GPT:
    """A model whose every parameter matters: nothing is zero."""
    model = GPT(dataclasses.replace(config, **changes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name == "resid_lambdas" else 0.0, 0.1, generator=generator)
    return model


def talkative(depth: int, length: int, windows: str) -> GPT:
    """A model for the golden tokenizer, random enough that its text does not repeat itself."""
    torch.manual_seed(1)
    model = GPT(ModelConfig.from_depth(depth, 16, 16, sequence_len=length, vocab_size=512, window_pattern=windows))
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def save_model(folder: Path, step: int, model: GPT, **meta: Any) -> None:
    """A checkpoint of a model that was not trained."""
    known = {"model_config": dataclasses.asdict(model.config) | {"a_key_of_tomorrow": 1}, **meta}
    checkpoint_manager.save(folder, step, 0, {"state": {}, "param_groups": []}, None, model.state_dict(), known)


def baseline_of(model: GPT) -> BaselineGPT:
    """The same model, with upstream's modules and calls."""
    baseline = BaselineGPT(model.config)
    baseline.load_state_dict(model.state_dict())
    return baseline


def tokens(model: GPT, rows: int = 2, length: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, (length or model.config.sequence_len) + 1)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def autograd(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean over all batches."""
    loss = torch.stack([model.losses(*batch).sum() / (batch[1] >= 0).sum() for batch in batches]).mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return float(loss.detach()), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def trained(model: GPT, batches: list[tuple[Tensor, Tensor]], matmul: str = "fp32") -> tuple[float, dict[str, Tensor]]:
    """The same through the training pass, with gradients of whole tables."""
    training = TrainingPass(model, matmul)
    training.start_step(unique_ids([ids for ids, dummy in batches]))
    scale = 1 / sum(int((targets >= 0).sum()) for dummy, targets in batches)
    loss = sum(float(training.forward_backward(ids, targets, scale)) for ids, targets in batches)
    return loss, {name: whole(training, name, p) for name, p in model.named_parameters()}


def whole(training: TrainingPass, name: str, parameter: Tensor) -> Tensor:
    gradient = training.gradients[name]
    if gradient.shape == parameter.shape and "embeds" not in name and "wte" not in name:
        return gradient
    return torch.zeros_like(parameter).index_copy_(0, training.token_ids, gradient)


def close(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> None:
    """Each tensor within tolerance of the other, relative to the largest element."""
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        error = float((got[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-12))
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def train(model: GPT, optimizer: Optimizer, steps: int, seed: int = 0, length: int = 8) -> None:
    """A few steps on few tokens, so that they use few rows of the tables."""
    training = TrainingPass(model)
    for number in range(steps):
        ids, targets = tokens(model, 1, length, seed=seed + number)
        token_ids = unique_ids([ids])
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        training.forward_backward(ids, targets, 1 / targets.numel())
        optimizer.step(training.gradients, token_ids, schedule(seed + number))


def schedule(number: int) -> StepSchedule:
    """Different numbers in every step."""
    return StepSchedule(0.5 + 0.01 * number, 0.85 + 0.001 * number, 0.1 / (1 + number))


RATES = LearningRates(0.2, 0.004, 0.02, 0.5)
