# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When each gradient of a step could leave: seconds of the processor from the start of the step, on one core.

    python bench/when_ready.py [d4 | d8]

Seconds of the processor are told, not those of the clock, so that a busy machine changes little. What is complete early
travels while the rest is worked on; nothing can arrive before the bytes up to there have been through the line.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainer")]

import torch  # noqa: E402
from two_nodes import MODELS  # noqa: E402

from nanochat.model import numerics  # noqa: E402
from nanochat.model.fused import TrainingPass  # noqa: E402
from nanochat.model.gpt import GPT, ModelConfig  # noqa: E402
from nanochat.model.gradients import unique_ids  # noqa: E402
from nanochat.model.optim import LearningRates, Optimizer  # noqa: E402
from nanochat.rules.schedule import StepSchedule  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from nanochat.model.gradients import Part

STEPS = 4  # the last of which is told
LINE = 1e9 / 8 * 0.94  # bytes a second that Gloo gets through 1 Gbit/s


def told_step(training: TrainingPass, optimizer: Optimizer, rows: Tensor) -> list[tuple[str, float, int]]:
    """A complete gradient: after how many seconds, and its bytes in float32."""
    ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    marks: list[tuple[str, float, int]] = []
    begun = time.thread_time()

    def on_ready(part: Part, gradient: Tensor) -> None:
        marks.append((part.label, time.thread_time() - begun, gradient.nbytes))

    token_ids = unique_ids([ids])
    optimizer.prepare(token_ids)
    training.start_step(token_ids)
    training.forward_backward(ids, targets, 1 / ids.numel(), on_ready)
    optimizer.step(training.gradients, token_ids, StepSchedule(0.5, 0.9, 0.01))
    return [*marks, ("the step", time.thread_time() - begun, 0)]


def main() -> None:
    size = MODELS[sys.argv[1] if len(sys.argv) > 1 else "d4"]
    numerics.setup()
    model = GPT(ModelConfig.from_depth(size.depth, head_dim=size.head_dim, sequence_len=size.length))
    model.init_weights()
    training, optimizer = TrainingPass(model), Optimizer(model, LearningRates().scaled(0.06))
    odds = 1 / (torch.arange(model.config.vocab_size) + 2.7)
    for dummy in range(STEPS):
        drawn = torch.multinomial(odds, size.rows * (size.length + 1), replacement=True)
        marks = told_step(training, optimizer, drawn.view(size.rows, -1))
    free = 0.0
    print("complete  through a line of 1 Gbit/s  MB")
    for label, seconds, size_bytes in marks:
        free = max(free, seconds) + size_bytes / LINE
        print(f"{seconds:8.3f}  {free:26.3f}  {size_bytes / 1e6:5.1f}  {label}")


if __name__ == "__main__":
    main()
