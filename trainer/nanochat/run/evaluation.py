# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evaluation stage: a base model's bits per byte on the validation shard, distributed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nanochat.data.dataloader import BatchSource, NoRows
from nanochat.kit.settings import EvalSettings
from nanochat.rules import stages
from nanochat.run.loop import evaluate
from nanochat.run.saving import prove_identical
from nanochat.run.stage import BaseModel, Place, Reader, RunStage
from nanochat.run.state import Run


class Evaluation(RunStage):
    """Evaluates a base model."""

    folder = stages.EVAL.folder
    trains = False
    activity = "Evaluating"

    def __init__(self, settings: EvalSettings) -> None:
        self.base = BaseModel(Path(settings.base_checkpoints), settings.model_step, optimizer=False)

    def training_loader(
        self,
        reader: Reader,
        shares: Sequence[int],
        position: Place | None = None,
        states: Sequence[Place] | None = None,
    ) -> BatchSource:
        return NoRows()


def measure(run: Run) -> str:
    """Replaces the training loop."""
    prove_identical(run, "to be evaluated")
    return "stopped" if evaluate(run) else "finished"
