# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fine-tuning stage: a base model learns the assistant's part in conversations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanochat.data import tokenizer
from nanochat.data.conversation import ChatLoader, PackedRows, Talks, epoch_batches, merged, to_answer
from nanochat.data.dataloader import Pair
from nanochat.kit import common
from nanochat.kit.common import UserError
from nanochat.kit.settings import ChatSettings, Settings
from nanochat.model.ops import IGNORED
from nanochat.rules import schedule, stages
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.schedule import TrainingPlan
from nanochat.run import checkpoint_manager, engine
from nanochat.run.stage import Place, Reader, RunStage, deal_out

SAMPLES, SAMPLE_TOKENS = 3, 48
# Settings inherited from the base model by default.
INHERITED = (
    "depth", "aspect_ratio", "head_dim", "max_seq_len", "window_pattern", "device_batch_size", "total_batch_size",
    "embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr",
)  # fmt: skip


class FineTuning(RunStage):
    """Fine-tuning on conversations."""

    folder = stages.SFT.folder

    def __init__(self, settings: ChatSettings) -> None:
        self.settings = self.base = settings
        tokens = tokenizer.load(common.tokenizer_dir())
        self.talks = Talks(Path(settings.conversations), tokens)
        self.val_talks = Talks(Path(settings.val_conversations), tokens) if settings.val_conversations else None

    def plan(self, settings: Settings, config: ModelConfig) -> TrainingPlan:
        batch, length, steps = settings.total_batch_size, settings.max_seq_len, settings.num_iterations
        rows = max(1, batch // length)
        if steps < 1:
            # Rows end with padding, so only packing shows how many make an epoch.
            steps = sum(1 for dummy in epoch_batches(self.talks, rows, length))
        return TrainingPlan(
            num_iterations=steps,
            total_batch_size=batch,
            warmup_steps=settings.warmup_steps,
            warmdown_ratio=settings.warmdown_ratio,
            final_lr_frac=settings.final_lr_frac,
            # As nanochat's: the rates do not depend on the batch.
            lr_scale=self.settings.init_lr_frac,
            weight_decay=settings.weight_decay,
            momentum=schedule.FINE_TUNING,
        )

    def facts(self, settings: Settings, data_dir: Path) -> dict[str, Any]:
        files = [talks.path for talks in (self.talks, self.val_talks) if talks is not None]
        return {
            f"conversations file {number}": checkpoint_manager.file_digest(path)
            for number, path in enumerate(files, start=1)
        }

    def training_loader(self, run: Reader, position: Place | None = None, state: Place | None = None) -> ChatLoader:
        return ChatLoader(self.talks, sum(run.shares.rows), run.settings.max_seq_len, position)

    def why_not_exact(self, run: Reader, state: Place) -> str:
        """A position in the conversations is always exact."""
        return ""

    def targets(self, tokens: int, batch: PackedRows) -> int:
        return max(1, int((batch.targets != IGNORED).sum()))

    @contextlib.contextmanager
    def evaluation(self, run: Reader) -> Iterator[tuple[Iterator[Pair], int | None]]:
        assert self.val_talks is not None
        batches = epoch_batches(self.val_talks, run.settings.device_batch_size, run.settings.max_seq_len)
        yield deal_out(batches, run.comm.rank, run.comm.world), None

    def samples(self, run: Reader) -> Iterator[tuple[str, str]]:
        """The file's first questions, and the answers."""
        tokenizer = run.tokenizer
        stops = engine.stops(tokenizer)
        for number in range(min(SAMPLES, len(self.talks))):
            messages = merged(self.talks.messages(number))[:1]
            prompt = to_answer(tokenizer, messages)[-run.settings.max_seq_len :]
            answer = tokenizer.decode(list(engine.generate(run.model, prompt, SAMPLE_TOKENS, 0, stops=stops)))
            yield messages[0]["content"], f"{messages[0]['content']}\n{answer}"


def inherited(folder: Path, step: int) -> dict[str, Any]:
    """The base model's settings, if a checkpoint here has them."""
    steps = [one for one in checkpoint_manager.steps_in(folder) if step in (-1, one)]
    for one in reversed(steps):
        with contextlib.suppress(UserError):
            known = checkpoint_manager.load_meta(folder, one).get("user_config")
            return {name: known[name] for name in INHERITED if name in known} if isinstance(known, dict) else {}
    return {}
