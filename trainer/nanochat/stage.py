# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one stage of training does in its own way: where it begins, what it reads, what it saves and how it is judged.

Stage is pretraining; fine_tuning.py has the other one. All else (run.py, train.py) is the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanochat import dataset
from nanochat.common import UserError
from nanochat.dataloader import BATCHES_AHEAD, BatchSource, Loader, Pair
from nanochat.engine import SAMPLE_PROMPTS, complete
from nanochat.loss_eval import deal_out, eval_steps
from nanochat.model import GPT, ModelConfig
from nanochat.rescue import begun_places, dealt, replayed
from nanochat.schedule import REFERENCE_DEPTH, TrainingPlan, plan_training
from nanochat.settings import LIMITS, Settings
from nanochat.shares import stream_rows
from nanochat.streams import Streams

if TYPE_CHECKING:
    from nanochat.run import Run


class Stage:
    """Pretraining on the shards."""

    folder = "base_checkpoints"
    trains = True

    def plan(self, settings: Settings, config: ModelConfig) -> TrainingPlan:
        """Batch, steps and scaling."""
        return plan_for(settings, config)

    def facts(self, settings: Settings, data_dir: Path) -> dict[str, Any]:
        """What all ranks must have alike of what they learn from."""
        return {"shard": {path.name: f"{path.stat().st_size} bytes" for path in dataset.shard_paths(data_dir)}}

    def begin(self, run: Run) -> None:
        """There is no checkpoint to go on from: the weights are drawn, and that was done."""

    def training_loader(
        self, run: Run, position: Mapping[str, int] | None = None, states: Sequence[Mapping[str, Any]] | None = None
    ) -> BatchSource:
        """This rank's batches to train on; states: where the streams go on exactly, position: where they do so nearly."""
        return Streams(run.comm.rank, run.shares.rows, opener(run, position, states))

    def deal_again(self, run: Run, states: Sequence[Mapping[str, Any]]) -> None:
        """The shares have changed between two steps; states: where the streams are."""
        streams = run.feed.loader
        if isinstance(streams, Streams):
            streams.deal(run.shares.rows, opener(run, None, states))

    def begun_places(self, run: Run) -> list[dict[str, Any]]:
        """Where the ranks of a run that begins are in the data."""
        return begun_places(run.comm.world)

    def dealt(self, run: Run, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Where the ranks of this run go on exactly, by the places of those that made a checkpoint."""
        return dealt(run, states)

    def lost_place(self, run: Run, loader: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
        """Where a rank was that was lost, by what another one saved alone; None if that cannot be found again."""
        return replayed(run, loader, rank)

    def targets(self, run: Run, rows: int) -> int:
        """How many tokens the loss of the current step is the mean of, in so many rows."""
        return rows * run.settings.max_seq_len

    def is_judged(self, settings: Settings) -> bool:
        """Whether there is something to evaluate on."""
        return True

    def eval_batches(self, run: Run) -> int | None:
        """How many batches this rank evaluates; None where only their end tells."""
        settings = run.settings
        return -(-eval_steps(settings.eval_tokens, settings.device_batch_size, settings.max_seq_len) // run.comm.world)

    @contextlib.contextmanager
    def evaluation(self, run: Run) -> Iterator[Iterator[Pair]]:
        """This rank's part of the batches to evaluate on, in which all ranks take part."""
        settings = run.settings
        steps = eval_steps(settings.eval_tokens, settings.device_batch_size, settings.max_seq_len)
        # Every rank packs the rows of all: what is evaluated must not depend on how many they are.
        ahead = BATCHES_AHEAD * run.comm.world
        loader = shards_loader(run, "val", settings.device_batch_size, rank=0, world=1, ahead=ahead)
        try:
            yield deal_out((loader.next_batch() for dummy in range(steps)), run.comm.rank, run.comm.world)
        finally:
            loader.close()

    def samples(self, run: Run) -> Iterator[tuple[str, str]]:
        """Prompts, and what the model makes of each."""
        for prompt in SAMPLE_PROMPTS:
            yield prompt, complete(run.model, run.tokenizer, prompt)


def opener(
    run: Run, position: Mapping[str, int] | None, states: Sequence[Mapping[str, Any]] | None
) -> Callable[[int], Loader]:
    """What opens a stream of the shards for the rows that it gives to a step."""
    rows = stream_rows(run.shares.rows)

    def open_stream(stream: int) -> Loader:
        state = states[stream] if states else None
        return shards_loader(run, "train", rows[stream], stream, run.comm.world, position=position, state=state)

    return open_stream


def shards_loader(run: Run, split: str, rows: int, rank: int, world: int, **more: Any) -> Loader:
    """The batches of one rank of so many out of the shards."""
    return Loader(
        run.tokenizer, run.data_dir, split, rows, run.settings.max_seq_len, rank, world,
        patience=run.settings.timeout_seconds, interrupted=lambda: run.stop_asked, **more,
    )  # fmt: skip


def model_config(settings: Settings, vocab_size: int, depth: int | None = None) -> ModelConfig:
    """The model of these settings (or of the same family at another depth)."""
    return ModelConfig.from_depth(
        settings.depth if depth is None else depth,
        settings.aspect_ratio,
        settings.head_dim,
        settings.max_seq_len,
        vocab_size,
        settings.window_pattern,
    )


def counted(config: ModelConfig) -> tuple[dict[str, int], int]:
    """Parameter counts and FLOPs per token, without the memory."""
    with torch.device("meta"):
        model = GPT(config)
    return model.parameter_counts(), model.flops_per_token()


def plan_for(settings: Settings, config: ModelConfig) -> TrainingPlan:
    """Batch, steps and scaling of these settings."""

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
            f"the horizon asked for is less than one step of {plan.total_batch_size} tokens; "
            "give --num-iterations, or a larger --target-flops or --target-param-data-ratio."
        )
    return plan
