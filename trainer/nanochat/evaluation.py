# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stage that only measures: the bits per byte of a base model on the validation shard, shared out over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.dataloader import START, BatchSource, NoRows
from nanochat.fine_tuning import take_base_model
from nanochat.run import Run
from nanochat.settings import EvalSettings
from nanochat.stage import Stage
from nanochat.train import evaluate, prove_identical


class Evaluation(Stage):
    """Of a base model."""

    folder = "evaluated_checkpoints"
    trains = False

    def __init__(self, settings: EvalSettings) -> None:
        self.settings = settings

    def begin(self, run: Run) -> None:
        folder = Path(self.settings.base_checkpoints)
        step = take_base_model(run, folder, self.settings.model_step, with_optimizer=False)
        run.progress.step = step
        run.plan = dataclasses.replace(run.plan, num_iterations=max(1, step))
        run.journal.say(f"Evaluating the base model of step {step} in {folder}")

    def training_loader(
        self, run: Run, position: Mapping[str, int] | None = None, states: Sequence[Mapping[str, Any]] | None = None
    ) -> BatchSource:
        return NoRows(START)


def measure(run: Run) -> str:
    """What stands in the place of the training loop."""
    prove_identical(run, "to be evaluated")
    return "stopped" if evaluate(run) else "finished"
