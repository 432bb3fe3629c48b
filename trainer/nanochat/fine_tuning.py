# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stage after pretraining: a base model learns from conversations to say what the assistant says in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat import checkpoint_manager, common, conversation, engine, lineage, tokenizer
from nanochat.agreement import file_digest
from nanochat.chat_loader import START, ChatBatch, ChatLoader, Talks, epoch_batches
from nanochat.common import BadCheckpoint, UserError
from nanochat.dataloader import BatchSource, Pair
from nanochat.lineage import BASE_TRAINING
from nanochat.loss_eval import deal_out
from nanochat.model import ModelConfig
from nanochat.resume import choose_step, fetch, find_training, folder_leader
from nanochat.run import Run, check_same_model, load_weights, restore_optimizer, understood
from nanochat.schedule import TrainingPlan, lr_scale
from nanochat.settings import ChatSettings, Settings
from nanochat.stage import Stage

SAMPLES, SAMPLE_TOKENS = 3, 48
# Settings that a fine-tuning has from its base model unless it is told otherwise.
INHERITED = (
    "depth", "aspect_ratio", "head_dim", "max_seq_len", "window_pattern", "device_batch_size", "total_batch_size",
    "embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr",
)  # fmt: skip


class FineTuning(Stage):
    """On conversations."""

    folder = "chatsft_checkpoints"

    def __init__(self, settings: ChatSettings) -> None:
        self.settings = settings
        tokens = tokenizer.load(common.tokenizer_dir())
        self.talks = Talks(Path(settings.conversations), tokens)
        self.val_talks = Talks(Path(settings.val_conversations), tokens) if settings.val_conversations else None

    def plan(self, settings: Settings, config: ModelConfig) -> TrainingPlan:
        batch, length, steps = settings.total_batch_size, settings.max_seq_len, settings.num_iterations
        rows = max(1, batch // length)
        if steps < 1:
            # Rows end with padding, so only packing tells how many an epoch takes.
            steps = sum(1 for dummy in epoch_batches(self.talks, rows, length))
        return TrainingPlan(
            num_iterations=steps,
            total_batch_size=batch,
            warmup_steps=settings.warmup_steps,
            warmdown_ratio=settings.warmdown_ratio,
            final_lr_frac=settings.final_lr_frac,
            lr_scale=lr_scale(batch) * self.settings.init_lr_frac,
            weight_decay=settings.weight_decay,
            target_tokens=rows * length * steps,
        )

    def facts(self, settings: Settings, data_dir: Path) -> dict[str, Any]:
        files = [talks.path for talks in (self.talks, self.val_talks) if talks is not None]
        return {"conversations": {f"file {number}": file_digest(path) for number, path in enumerate(files, start=1)}}

    def begin(self, run: Run) -> None:
        """With the base model, which every rank is given that lacks it."""
        settings = self.settings
        step = take_base_model(run, Path(settings.base_checkpoints), settings.model_step, bool(settings.load_optimizer))
        run.journal.say(f"Fine-tuning the base model of step {step} in {settings.base_checkpoints}")

    def training_loader(
        self, run: Run, position: Mapping[str, int] | None = None, states: Sequence[Mapping[str, Any]] | None = None
    ) -> BatchSource:
        length = run.settings.max_seq_len
        return ChatLoader(self.talks, lambda: run.shares.rows, run.comm.rank, length, position or START)

    def deal_again(self, run: Run, states: Sequence[Mapping[str, Any]]) -> None:
        """The loader asks for the shares in every step."""

    def dealt(self, run: Run, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """A place in the conversations is the same for all ranks, however many they are: the meta file says it."""
        return None

    def lost_place(self, run: Run, loader: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
        """The same as that of whoever saved."""
        return dict(loader["mine"])

    def targets(self, run: Run, rows: int) -> int:
        batch: ChatBatch = run.feed.loader.last
        return max(1, batch.counted_here if run.apart else batch.counted)

    def is_judged(self, settings: Settings) -> bool:
        return self.val_talks is not None

    def eval_batches(self, run: Run) -> int | None:
        return None

    @contextlib.contextmanager
    def evaluation(self, run: Run) -> Iterator[Iterator[Pair]]:
        if self.val_talks is None:
            raise RuntimeError("there are no conversations to evaluate on")
        micro, length = run.settings.device_batch_size, run.settings.max_seq_len
        yield deal_out(epoch_batches(self.val_talks, micro, length), run.comm.rank, run.comm.world)

    def samples(self, run: Run) -> Iterator[tuple[str, str]]:
        """The first questions of the file, and the answers."""
        stops = {run.tokenizer.special(name) for name in engine.STOPS}
        for number in range(min(SAMPLES, len(self.talks))):
            messages = conversation.merged(self.talks.messages(number))[:1]
            prompt = conversation.to_answer(run.tokenizer, messages)[-run.settings.max_seq_len :]
            answer = run.tokenizer.decode(list(engine.generate(run.model, prompt, SAMPLE_TOKENS, 0, stops=stops)))
            yield messages[0]["content"], f"{messages[0]['content']}\n{answer}"


def take_base_model(run: Run, folder: Path, wanted: int, with_optimizer: bool) -> int:
    """Have every rank begin with a base model that at least one of them has; returns its step."""
    comm = run.comm
    leader = folder_leader(comm, folder)
    training = find_training(comm, folder, lineage.wanted(run.journal.folder, BASE_TRAINING), BASE_TRAINING)
    found = choose_step(comm, folder, wanted, training)
    if found is None:
        raise BadCheckpoint(
            f"no rank has a base checkpoint in {folder}; train a base model with python -m scripts.base_train, or name "
            "the folder of one with --base-checkpoints."
        )
    if leader == comm.rank and found.step not in training.steps:
        # One of another training would be written over.
        checkpoint_manager.set_aside(folder, [found.step])
    files = fetch(comm, folder, found, leader)
    with understood(folder, found.step):
        check_same_model(run, checkpoint_manager.load_meta(folder, found.step), folder, found.step)
        load_weights(run, folder, found.step)
        if with_optimizer:
            restore_optimizer(run, folder, found, files)
    run.base = {"training": training.id or None, "step": found.step}
    return found.step


def inherited(folder: Path, step: int) -> dict[str, Any]:
    """The settings of a base model, as far as a checkpoint here tells them."""
    steps = [one for one in checkpoint_manager.steps_in(folder) if step in (-1, one)]
    for one in reversed(steps):
        with contextlib.suppress(UserError):
            told = checkpoint_manager.load_meta(folder, one).get("user_config")
            return {name: told[name] for name in INHERITED if name in told} if isinstance(told, dict) else {}
    return {}
