# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cost of packing to a rank: the processor seconds of --sync int8 and int4 beside those of the step that they belong to.

    python bench/packing.py [--models d4 d8] [--rounds 5]

One thread packs and unpacks what one of two ranks does in a step: of each matrix of the layers it packs the gradient or the
update, reads the update, and of every second one adds the other rank's gradient; the head's gradient it packs, reads and
adds. Told apart from the head, which need not travel. A step is the training pass and the optimizer of one rank alone. All take
turns, and the least of the rounds counts, in seconds of the processor, so that a busy machine does not show.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))

from two_nodes import MODELS, Model

from nanochat.model import numerics
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT, ModelConfig
from nanochat.model.gradients import HEAD
from nanochat.model.optim import LearningRates, Optimizer
from nanochat.parallel.wire import Packed
from nanochat.rules.schedule import StepSchedule


def seconds(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


class Packing:
    """The messages of one rank in a step."""

    def __init__(self, bits: int, gradients: Sequence[Tensor], added: float) -> None:
        """added: of how many of them the other rank's gradient is added too."""
        self.wire, self.gradients, self.added = Packed(bits), gradients, round(added * len(gradients))
        self.messages = [torch.empty(self.wire.length(*g.shape), dtype=self.wire.dtype) for g in gradients]
        self.feedback = [torch.zeros_like(g) for g in gradients]

    def __call__(self) -> None:
        for number, (gradient, message) in enumerate(zip(self.gradients, self.messages, strict=True)):
            self.wire.write(gradient, message, self.feedback[number])
            self.wire.read(message, gradient)
            if number < self.added:
                self.wire.add(message, gradient)


def measure(model: Model, rounds: int) -> None:
    gpt = GPT(ModelConfig.from_depth(model.depth, head_dim=model.head_dim, sequence_len=model.length))
    gpt.init_weights()
    training, optimizer = TrainingPass(gpt), Optimizer(gpt, LearningRates().scaled(0.06))
    ids = torch.randint(0, gpt.config.vocab_size, (model.rows, model.length + 1))
    token_ids = torch.unique(ids)

    def step() -> None:
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        training.forward_backward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 1 / ids.numel())
        optimizer.step(training.gradients, training.token_ids, StepSchedule(1.0, 0.9, 0.01))

    step()
    matrices = [training.gradients[name].clone() for name in optimizer.matrix_names]
    head = [training.gradients[HEAD].clone()]
    calls: dict[str, Callable[[], None]] = {"step": step}
    for bits in (8, 4):
        calls[f"int{bits}, matrices"] = Packing(bits, matrices, 0.5)
        calls[f"int{bits}, head"] = Packing(bits, head, 1.0)
    turns = [{name: seconds(call) for name, call in calls.items()} for dummy in range(rounds)]
    found = {name: min(turn[name] for turn in turns) for name in calls}
    for name, took in found.items():
        share = f" {100 * took / found['step']:5.1f} % of the step" if name != "step" else ""
        print(f"{name:16} {took:7.4f} s{share}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What packing costs a rank.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["d4", "d8"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    numerics.setup()
    with torch.no_grad():
        for name in arguments.models:
            print(name)
            measure(MODELS[name], arguments.rounds)


if __name__ == "__main__":
    main()
