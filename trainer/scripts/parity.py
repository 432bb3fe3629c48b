# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replay reference cases through the training path: `python -m scripts.parity CASES.json --write OUT.json`.

Reads only config, batch, optimizer_args and schedule of each case, and the description of each size. OUT has the
structure of CASES with everything else recomputed. Weights and tokens are generated from their names.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.model import numerics
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT
from nanochat.model.gradients import unique_ids
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.rules.model_size import ModelConfig, flops_per_token, parameters, windows
from nanochat.rules.schedule import StepSchedule

SIZE_KEYS = ("depth", "aspect_ratio", "head_dim", "sequence_len", "vocab_size", "window_pattern")


def generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=zlib.crc32(name.encode())))


def made_weights(model: GPT) -> dict[str, Tensor]:
    """Generate every parameter from its name."""
    weights = {}
    for name, parameter in model.named_parameters():
        values = np.float32(0.05) * generator(name).standard_normal(tuple(parameter.shape), dtype=np.float32)
        weights[name] = torch.from_numpy(values + np.float32(name == "resid_lambdas"))
    return weights


def made_ids(name: str, case: dict[str, Any]) -> Tensor:
    vocab_size = case["config"]["vocab_size"]
    return torch.from_numpy(generator(name).integers(0, vocab_size, size=case["batch"], dtype=np.int64))


def norms(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(torch.linalg.vector_norm(tensor.double())) for name, tensor in tensors.items()}


def replay_step(
    case: dict[str, Any], number: int, model: GPT, training: TrainingPass, optimizer: Optimizer
) -> dict[str, Any]:
    """One optimizer step, as in the training loop."""
    given = case["steps"][number]
    schedule = StepSchedule(given["lr_multiplier"], given["muon_momentum"], given["muon_weight_decay"])
    ids, targets = made_ids(f"x{number}", case), made_ids(f"y{number}", case)
    token_ids = unique_ids([ids])
    optimizer.prepare(token_ids)
    training.start_step(token_ids)
    loss = training.forward_backward(ids, targets, 1 / targets.numel())
    gradient_norms = norms(training.gradients)
    optimizer.step(training.gradients, token_ids, schedule)
    optimizer.catch_up()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "loss": float(loss),
        "lr_multiplier": schedule.lr_multiplier,
        "muon_momentum": schedule.muon_momentum,
        "muon_weight_decay": schedule.muon_weight_decay,
        "grad_norms": {name: gradient_norms[name] for name in parameters},
        "param_norms": norms(parameters),
    }


@torch.no_grad()
def replay(case: dict[str, Any]) -> dict[str, Any]:
    """Recompute the figures of a case."""
    model = GPT(ModelConfig(**case["config"]))
    model.load_state_dict(made_weights(model))
    args = case["optimizer_args"]
    rates = LearningRates(args["embedding_lr"], args["unembedding_lr"], args["matrix_lr"], args["scalar_lr"])
    training, optimizer = TrainingPass(model), Optimizer(model, rates)
    ids, targets = made_ids("eval_x", case), made_ids("eval_y", case)
    logits = model(ids)
    result = {
        "config": case["config"],
        "batch": case["batch"],
        **sizes_of(model.config),
        "keys": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
        "logits": {
            "sum": float(logits.double().sum()),
            "first_row_first8": logits[0, 0, :8].tolist(),
            "last_row_last8": logits[-1, -1, -8:].tolist(),
        },
        "eval_loss": float(model.losses(ids, targets).mean()),
        "optimizer_args": args,
    }
    steps = [replay_step(case, number, model, training, optimizer) for number in range(len(case["steps"]))]
    return {**result, "steps": steps, "final_eval_loss": float(model.losses(ids, targets).mean())}


def sizes_of(config: ModelConfig) -> dict[str, Any]:
    return {"param_counts": parameters(config), "flops_per_token": flops_per_token(config)}


def measure(size: dict[str, Any]) -> dict[str, Any]:
    """Counts, windows and FLOPs of a full-size model, without allocating it."""
    config = ModelConfig.from_depth(**{key: size[key] for key in SIZE_KEYS})
    return {
        **{key: size[key] for key in SIZE_KEYS},
        "n_embd": config.n_embd,
        "window_sizes": [[window, 0] for window in windows(config)],
        **sizes_of(config),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Replay reference cases through the training path.")
    parser.add_argument("cases", type=Path, help="a file like tests/trainer/golden/model.json")
    parser.add_argument("--write", type=Path, required=True, help="output file for the computed figures")
    args = parser.parse_args(argv)
    cases = json.loads(args.cases.read_text())
    numerics.setup()
    result = {
        "cases": [replay(case) for case in cases.get("cases", [])],
        "sizes": [measure(size) for size in cases.get("sizes", [])],
    }
    args.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
