# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Time a training step on this host alone, by part: one pass of the device batch, AdamW, Muon.

Of several ranks, each makes the passes of its rows and computes the updates of its part of the matrices, but each makes all of AdamW's
updates and applies those of all matrices. Small matrices are cheaper together, so Muon is also timed as one of two ranks has it:
muon_half_seconds, for the updates of every second matrix.

    OMP_NUM_THREADS=4 python -m scripts.measure_step --vocab-size 32768 --seconds 10 -- --depth 8 --max-seq-len 1024 ...

Flags of scripts.base_train follow the two dashes. Tokens are random, with the frequencies of text; no files are read
or written. Prints one JSON object: the result with the first precision of --products, and each one's if there are several.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.kit.common import UserError, matmul_type, pin_to_cores
from nanochat.kit.settings import Settings, parse
from nanochat.model import kernels, numerics
from nanochat.model.fused import TrainingPass, kernel_shape
from nanochat.model.gpt import GPT
from nanochat.model.gradients import unique_ids
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.rules.schedule import StepSchedule
from nanochat.run.stage import model_config

WARMUP_STEPS = 1
SCHEDULE = StepSchedule(1.0, 0.95, 0.0)
# Small enough that random tokens do not blow up the weights, which could slow the arithmetic.
RATES = LearningRates(1e-3, 1e-4, 1e-4, 1e-4)


def made_up_tokens(vocab_size: int, rows: int, length: int, seed: int) -> Tensor:
    """Rows of token ids with Zipf frequencies."""
    weights = 1.0 / (torch.arange(vocab_size, dtype=torch.float64) + 2.7)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, rows * (length + 1), replacement=True, generator=generator).view(rows, length + 1)


def measure_each(
    products: Sequence[str], settings: Settings, vocab_size: int, seconds: float, steps: int
) -> dict[str, Any]:
    """Measure with each of these precisions of products, for a part of the time; one that fails is left out beside others."""
    found, failed = {}, UserError("no precision of products to measure")
    for matmul in products:
        try:
            tried = dataclasses.replace(settings, matmul=matmul)
            found[matmul] = measure(tried, vocab_size, seconds / len(products), steps)
        except UserError as error:
            failed = error
    if not found:
        raise failed
    return {**next(iter(found.values())), **({"products": found} if len(products) > 1 else {})}


def measure(settings: Settings, vocab_size: int, seconds: float, steps: int) -> dict[str, Any]:
    """Make steps until a count or time limit, at least one after the warm-up."""
    matmul, config = matmul_type(settings.matmul), model_config(settings, vocab_size)
    shape = kernel_shape(config, settings.device_batch_size, matmul)
    route, used = numerics.setup().route, kernels.setup(settings.kernels, shape)
    model = GPT(config)
    model.init_weights()
    training, optimizer = TrainingPass(model, matmul), Optimizer(model, RATES, matmul)
    begin, each = time.monotonic(), list[tuple[float, ...]]()
    while len(each) <= WARMUP_STEPS or (len(each) < WARMUP_STEPS + steps and time.monotonic() - begin < seconds):
        tokens = made_up_tokens(vocab_size, settings.device_batch_size, settings.max_seq_len, len(each))
        each.append(timed_step(training, optimizer, tokens))
    passes, adamw, muon, half = (statistics.median_high(part) for part in zip(*each[WARMUP_STEPS:], strict=True))
    return {
        "pass_seconds": round(passes, 5),
        "adamw_seconds": round(adamw, 5),
        "muon_seconds": round(muon, 5),
        "muon_half_seconds": round(half, 5),
        "tokens_per_second": round(settings.device_batch_size * settings.max_seq_len / passes, 2),
        "steps": len(each) - WARMUP_STEPS,
        "threads": torch.get_num_threads(),
        "matmul": matmul,
        "route": route,
        "kernels": used.on,
        "no_kernels_because": used.why,
        "torch": torch.__version__,
    }


def timed_step(training: TrainingPass, optimizer: Optimizer, tokens: Tensor) -> tuple[float, ...]:
    """One step of one pass: the seconds of the pass, of AdamW, of Muon, and of Muon for one of two ranks."""
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    token_ids = unique_ids([ids])
    clock = [time.perf_counter()]
    optimizer.prepare(token_ids)
    training.start_step(token_ids)
    training.forward_backward(ids, targets, 1.0 / targets.numel())
    clock.append(time.perf_counter())
    optimizer.start_step(SCHEDULE)
    for name in optimizer.adamw_names:
        optimizer.update(name, training.gradients[name], token_ids)
    clock.append(time.perf_counter())
    matrices = {name: training.gradients[name] for name in optimizer.matrix_names}
    directions = optimizer.directions(matrices)
    clock.append(time.perf_counter())
    for name, direction in directions.items():
        optimizer.apply(name, direction)
    clock.append(time.perf_counter())
    optimizer.directions({name: matrices[name] for name in optimizer.matrix_names[::2]})
    clock.append(time.perf_counter())
    return clock[1] - clock[0], clock[2] - clock[1], clock[4] - clock[2], clock[5] - clock[3]


def main(argv: list[str] | None = None) -> int:
    pin_to_cores()
    words = sys.argv[1:] if argv is None else argv
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="Measure a training step on this host alone.")
    parser.add_argument("--vocab-size", type=int, default=32768, help="size of the vocabulary")
    parser.add_argument("--seconds", type=float, default=10.0, help="maximum seconds to measure")
    parser.add_argument("--steps", type=int, default=5, help="maximum steps to measure")
    parser.add_argument("--products", nargs="*", help="precisions of matrix products to try in turn; default: --matmul")
    options = parser.parse_args(words[:at])
    try:
        settings = parse(words[at + 1 :])
        products = options.products or [settings.matmul]
        print(json.dumps(measure_each(products, settings, options.vocab_size, options.seconds, options.steps)))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
