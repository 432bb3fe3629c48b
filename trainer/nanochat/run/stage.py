# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The differences between stages: initial model, data, checkpoints and evaluation.

RunStage is pretraining, and fine_tuning.py the other. setup.py and loop.py treat both alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.data import dataloader, dataset
from nanochat.data.chat_loader import ChatLoader
from nanochat.data.dataloader import BATCHES_AHEAD, Loader, Pair
from nanochat.data.streams import Streams
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import UserError
from nanochat.kit.settings import LIMITS, Settings
from nanochat.model.gpt import GPT, ModelConfig, counted
from nanochat.rules import stages
from nanochat.rules.schedule import REFERENCE_DEPTH, TrainingPlan, plan_training
from nanochat.rules.shares import stream_rows
from nanochat.run.engine import SAMPLE_PROMPTS, complete
from nanochat.run.loss_eval import deal_out, eval_steps

Place = Mapping[str, Any]  # a position in the data
BatchSource = Streams | ChatLoader  # of a rank's training batches
SHOWN_NAMES = 3


@dataclasses.dataclass(frozen=True)
class Reader:
    """A rank's means of reading its data."""

    settings: Settings
    tokenizer: Tokenizer
    data_dir: Path
    rank: int
    world: int
    interrupted: Callable[[], bool]  # whether to stop waiting for data

    @property
    def uses_every_token(self) -> bool:
        """Whether the data are our own shards."""
        return dataset.uses_every_token(dataset.split_paths(self.data_dir, "train")[0])

    def train_shards(self) -> list[dataset.Shard]:
        """The shards for training, verified for this run's ranks."""
        return dataset.inspect_split(self.data_dir, "train", 1 if self.uses_every_token else self.world)

    def shards(self, split: str, rows: int, rank: int, world: int, **more: Any) -> Loader:
        """One rank's batches from the shards."""
        return Loader(
            self.tokenizer, self.data_dir, split, rows, self.settings.max_seq_len, rank, world,
            patience=self.settings.timeout_seconds, interrupted=self.interrupted, **more,
        )  # fmt: skip


class BaseModel(NamedTuple):
    """Another run's model that a stage starts from."""

    folder: Path
    step: int  # -1: the newest
    optimizer: bool  # whether to use its momentum too


class RunStage:
    """Pretraining on the shards."""

    folder = stages.BASE.folder
    activity = "Training"
    base: BaseModel | None = None

    def plan(self, settings: Settings, config: ModelConfig) -> TrainingPlan:
        """Batch, steps and scaling."""
        return plan_for(settings, config)

    def facts(self, settings: Settings, data_dir: Path) -> dict[str, Any]:
        """Facts about the data that must be equal on all ranks."""
        return {"shard": {path.name: f"{path.stat().st_size} bytes" for path in dataset.shard_paths(data_dir)}}

    def training_loader(
        self,
        reader: Reader,
        shares: Sequence[int],
        position: Place | None = None,
        states: Sequence[Place] | None = None,
    ) -> BatchSource:
        """This rank's training batches; shares: the rows of all ranks; states: where the streams resume exactly,
        position: where they resume approximately."""
        return Streams(reader.rank, shares, opener(reader, shares, position, states), reader.uses_every_token)

    def exact_positions(self, reader: Reader, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Exact positions for this run's ranks, from those of the ranks that made a checkpoint; None
        if these are useless here."""
        old, shards = [state for state in states if "cursor" in state], reader.train_shards()
        if reader.uses_every_token:
            return [old[0]] * reader.world if old and dataloader.is_of(old[0], 0, 1, shards) else None
        if not old or not all(dataloader.is_of(state, number, len(old), shards) for number, state in enumerate(old)):
            return None
        if len(old) == reader.world:
            return old
        return [dataloader.deal(old, shards, number, reader.world) for number in range(reader.world)]

    def place_notice(self, reader: Reader, states: Sequence[dict[str, Any]]) -> str:
        """Why the exact positions of a checkpoint are useless here, for the user."""
        state = next((state for state in states if "cursor" in state), None)
        if state is None:
            return "it does not say which documents were read, so some may be read twice or left out"
        if names := dataloader.changed(state, reader.train_shards()):
            return f"the data have changed since ({some_of(names)}), and training continues with what is there now"
        return "it was made with other settings of the data, so some documents may be read twice or left out"

    def reconstructed_position(self, reader: Reader, loader: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
        """A lost rank's data position, from what another one saved alone; None if its last one is unknown."""
        if reader.uses_every_token:
            return dict(loader["mine"])
        if loader["ranks"] is None:
            return None
        last, rows = loader["ranks"][rank], loader["rows"][rank]
        return dataloader.replayed(reader.tokenizer, reader.data_dir, last, rows, reader.settings.max_seq_len)

    def targets(self, tokens: int, batch: Any) -> int:
        """Number of tokens in a step's mean loss; tokens: in its rows, batch: the loader's last one."""
        return tokens

    def has_evaluation(self) -> bool:
        """Whether there is data to evaluate on."""
        return True

    @contextlib.contextmanager
    def evaluation(self, reader: Reader) -> Iterator[tuple[Iterator[Pair], int | None]]:
        """This rank's part of the evaluation batches, and their number, if known in advance."""
        settings = reader.settings
        rows = settings.device_batch_size
        steps = eval_steps(settings.eval_tokens, rows, settings.max_seq_len)
        # Every rank packs all rows: the result must not depend on the number of ranks.
        loader = reader.shards("val", rows, rank=0, world=1, ahead=BATCHES_AHEAD * reader.world)
        try:
            batches = (loader.next_batch() for dummy in range(steps))
            yield deal_out(batches, reader.rank, reader.world), -(-steps // reader.world)
        finally:
            loader.close()

    def samples(self, model: GPT, reader: Reader) -> Iterator[tuple[str, str]]:
        """Prompts, and the model's continuations."""
        for prompt in SAMPLE_PROMPTS:
            yield prompt, complete(model, reader.tokenizer, prompt)


def some_of(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    return ", ".join(names[:SHOWN_NAMES]) + (
        f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    )


def opener(
    reader: Reader, shares: Sequence[int], position: Place | None, states: Sequence[Place] | None
) -> Callable[[int], Loader]:
    """Opens a stream of the shards with its rows per step."""

    def open_stream(stream: int) -> Loader:
        world, rows = (1, [sum(shares)]) if reader.uses_every_token else (reader.world, stream_rows(shares))
        state = states[stream] if states else None
        return reader.shards("train", rows[stream], stream, world, position=position, state=state)

    return open_stream


def model_config(settings: Settings, vocab_size: int, depth: int | None = None) -> ModelConfig:
    """The model for these settings (or of the same family at another depth)."""
    return ModelConfig.from_depth(
        settings.depth if depth is None else depth,
        settings.aspect_ratio,
        settings.head_dim,
        settings.max_seq_len,
        vocab_size,
        settings.window_pattern,
    )


def plan_for(settings: Settings, config: ModelConfig) -> TrainingPlan:
    """Batch, steps and scaling for these settings."""

    def scaling_parameters(counts: Mapping[str, int]) -> int:
        return counts["transformer_matrices"] + counts["lm_head"]

    counts, flops = counted(config)
    reference, dummy = counted(model_config(settings, config.vocab_size, REFERENCE_DEPTH))
    plan = plan_training(
        scaling_parameters=scaling_parameters(counts),
        reference_parameters=scaling_parameters(reference),
        flops_per_token=flops,
        num_iterations=settings.num_iterations,
        target_flops=settings.target_flops,
        target_param_data_ratio=settings.target_param_data_ratio,
        total_batch_size=settings.total_batch_size,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        warmdown_ratio=settings.warmdown_ratio,
        final_lr_frac=settings.final_lr_frac,
    )
    if plan.total_batch_size > LIMITS["total_batch_size"]:
        raise UserError(
            f"the scaling law gives a batch of {plan.total_batch_size} tokens for --target-param-data-ratio "
            f"{settings.target_param_data_ratio}; give a smaller ratio, or --total-batch-size."
        )
    if plan.num_iterations < 1:
        raise UserError(
            f"the training length is less than one step of {plan.total_batch_size} tokens; "
            "give --num-iterations, or a larger --target-flops or --target-param-data-ratio."
        )
    return dataclasses.replace(plan, timed=settings.timed)
