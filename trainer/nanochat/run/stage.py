# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The differences between stages: initial model, data, checkpoints and evaluation.

RunStage is pretraining, and fine_tuning.py the other. setup.py and loop.py treat both alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanochat.data import dataset
from nanochat.data.conversation import ChatLoader
from nanochat.data.dataloader import BATCHES_AHEAD, Loader, Pair, why_not_exact
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import UserError
from nanochat.kit.settings import MOST_BATCH, ChatSettings, Settings
from nanochat.model.gpt import GPT
from nanochat.parallel.balance import Shares
from nanochat.parallel.comm import Comm
from nanochat.rules import stages
from nanochat.rules.model_size import ModelConfig, flops_per_token, parameters
from nanochat.rules.schedule import REFERENCE_DEPTH, TrainingPlan, plan_training
from nanochat.rules.shares import spread
from nanochat.run import engine

Place = Mapping[str, Any]  # a position in the data
# Prompts for --sample-every: simple, with answers that are easy to check, and beginnings of any text.
SAMPLE_PROMPTS = (
    "The capital of Italy is",
    "Water boils at a temperature of",
    "The opposite of small is",
    "If the",
    "Two plus three equals",
    "Once upon a time",
)
SAMPLE_TOKENS = 16


class Reader(Protocol):
    """The parts of a run that its stage needs for its data."""

    settings: Settings
    tokenizer: Tokenizer
    data_dir: Path
    comm: Comm
    model: GPT
    shares: Shares
    stop_asked: bool


class RunStage:
    """Pretraining on the shards."""

    folder = stages.BASE.folder
    base: ChatSettings | None = None  # of the model that it starts from

    def plan(self, settings: Settings, config: ModelConfig) -> TrainingPlan:
        """Batch, steps and scaling."""

        def scaling_parameters(config: ModelConfig) -> int:
            counts = parameters(config)
            return counts["transformer_matrices"] + counts["lm_head"]

        plan = plan_training(
            scaling_parameters=scaling_parameters(config),
            reference_parameters=scaling_parameters(model_config(settings, config.vocab_size, REFERENCE_DEPTH)),
            flops_per_token=flops_per_token(config),
            num_iterations=settings.num_iterations,
            target_flops=settings.target_flops,
            target_param_data_ratio=settings.target_param_data_ratio,
            total_batch_size=settings.total_batch_size,
            weight_decay=settings.weight_decay,
            warmup_steps=settings.warmup_steps,
            warmdown_ratio=settings.warmdown_ratio,
            final_lr_frac=settings.final_lr_frac,
        )
        if plan.total_batch_size > MOST_BATCH:
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

    def facts(self, settings: Settings, data_dir: Path) -> dict[str, Any]:
        """Facts about the data that must be equal on all ranks."""
        return {f"shard {path.name}": f"{path.stat().st_size} bytes" for path in dataset.shard_paths(data_dir)}

    def training_loader(
        self, run: Reader, position: Place | None = None, state: Place | None = None
    ) -> Loader | ChatLoader:
        """The rows of each step; state: where they resume exactly, position: where they resume approximately."""
        return self.shards(run, "train", sum(run.shares.rows), position=position, state=state)

    @staticmethod
    def shards(run: Reader, split: str, rows: int, **more: Any) -> Loader:
        """Batches of this many rows from the shards."""
        return Loader(
            run.tokenizer, run.data_dir, split, rows, run.settings.max_seq_len, patience=run.settings.timeout_seconds,
            interrupted=lambda: run.stop_asked, **more,
        )  # fmt: skip

    def why_not_exact(self, run: Reader, state: Place) -> str:
        """Why training cannot continue exactly at this state of a loader, for the user; empty if it can."""
        return why_not_exact(state, dataset.inspect_split(run.data_dir, "train"))

    def targets(self, tokens: int, batch: Any) -> int:
        """Number of tokens in a step's mean loss; tokens: in its rows, batch: the loader's last one."""
        return tokens

    @contextlib.contextmanager
    def evaluation(self, run: Reader) -> Iterator[tuple[Iterator[Pair], int | None]]:
        """This rank's part of the evaluation batches, and their number, if known in advance."""
        rows, world = run.settings.device_batch_size, run.comm.world
        steps = max(1, run.settings.eval_tokens // (rows * run.settings.max_seq_len))
        # Every rank packs all rows: the result must not depend on the number of ranks.
        loader = self.shards(run, "val", rows, ahead=BATCHES_AHEAD * world)
        try:
            batches = (loader.next_batch() for dummy in range(steps))
            yield deal_out(batches, run.comm.rank, world), -(-steps // world)
        finally:
            loader.close()

    def samples(self, run: Reader) -> Iterator[tuple[str, str]]:
        """Prompts, and the model's continuations."""
        for prompt in SAMPLE_PROMPTS:
            ids = run.tokenizer.encode(prompt, bos=True)
            added = engine.generate(run.model, ids, SAMPLE_TOKENS, 0, stops=engine.stops(run.tokenizer))
            yield prompt, run.tokenizer.decode([*ids[1:], *added])


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


# -- evaluation


def deal_out(batches: Iterable[Pair], rank: int, world: int) -> Iterator[Pair]:
    """One rank's rows of batches that all ranks read alike: a batch per rank, and equal parts of the last few.

    So the ranks together evaluate what one rank alone would, whatever their number.
    """
    source = iter(batches)
    while taken := list(itertools.islice(source, world)):
        ids, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
        sizes = spread(len(ids), world)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        if sizes[rank]:
            yield ids[mine], targets[mine]


@torch.no_grad()
def nats_and_bytes(
    losses_of: Callable[[Tensor, Tensor], Tensor], batches: Iterable[Pair], token_bytes: Tensor
) -> Tensor:
    """The nats of all targets that represent bytes, and those bytes; totals that add up over the ranks."""
    totals = torch.zeros(2, dtype=torch.float64)
    for ids, targets in batches:
        losses = losses_of(ids, targets).flatten()
        flat = targets.flatten()
        # Special tokens have no bytes, and a target of -1 is no token.
        sizes = torch.where(flat >= 0, token_bytes[flat.clamp(min=0)], 0)
        counted = sizes > 0
        totals[0] += losses[counted].double().sum()
        totals[1] += sizes.sum()
    return totals


def bits_per_byte(totals: Tensor) -> float:
    """The result from all ranks' totals."""
    nats, size = totals.tolist()
    return nats / (math.log(2) * size) if size else math.inf
