# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of a training run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nanochat.data.conversation import ChatLoader
from nanochat.data.dataloader import Loader, Pair
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import memory_available
from nanochat.kit.settings import Settings, rank_shares
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT
from nanochat.model.gradients import MATMUL_TYPES
from nanochat.model.kernels import KernelChoice
from nanochat.model.optim import ALL_ROWS, LearningRates, Optimizer, Undo
from nanochat.parallel.balance import Balancer, Shares
from nanochat.parallel.comm import Comm
from nanochat.parallel.shared_head import make_head
from nanochat.parallel.sync import Notice, Sync, make_sync
from nanochat.record.journal import Journal
from nanochat.rules.model_size import flops_per_token, parameters
from nanochat.rules.schedule import StepSchedule, TrainingPlan
from nanochat.rules.shares import passes_of
from nanochat.run.deadline import Deadline
from nanochat.run.resume import META_KEY
from nanochat.run.stage import RunStage

SMOOTHING = 0.9


@dataclasses.dataclass
class TrainingProgress:
    """A run's state from step to step besides weights and optimizer."""

    step: int = 0
    place: int = 0  # of a timed run: fraction of its time used, of schedule.WHOLE
    smooth_loss: float = 0.0
    training_seconds: float = 0.0
    min_val_bpb: float = math.inf
    val_bpb: float | None = None
    resumed_from: int | None = None

    def add_loss(self, loss: float) -> float:
        """Add a step's loss; returns the debiased running mean."""
        self.smooth_loss = SMOOTHING * self.smooth_loss + (1 - SMOOTHING) * loss
        return self.smooth_loss / (1 - SMOOTHING ** (self.step + 1))


class Feed:
    """This rank's rows of each step, which all ranks read alike: so a step has the same rows for any number of ranks and any shares.

    Reads ahead if allowed, and then sends the token ids ahead too.
    """

    def __init__(self) -> None:
        self.sync: Sync
        self.loader: Loader | ChatLoader
        self.passes: list[int] = []
        self.mine = slice(0)
        self.seconds = 0.0
        self._batches: list[Pair] | None = None
        # The loader's last batch: of the coming step, and of the last finished one.
        self._taken: Any = None
        self._finished: Any = None

    def take_shares(self, sync: Sync, before: int, passes: Sequence[int]) -> None:
        """Change this rank's rows: so many per pass, after those of the ranks before it."""
        self.sync, self.passes = sync, [rows for rows in passes if rows]
        self.mine = slice(before, before + sum(passes))

    def offer(self, notice: Notice) -> None:
        """Read the coming step's batches and send their ids to the other ranks."""
        begun = time.perf_counter()
        inputs, targets = (rows[self.mine].split(self.passes) for rows in self.loader.next_batch())
        self._batches = list(zip(inputs, targets, strict=True))
        self.seconds += time.perf_counter() - begun
        self.sync.offer_ids([ids for ids, dummy in self._batches], notice)

    @property
    def offered(self) -> bool:
        """Whether the coming step's were offered."""
        return self._batches is not None

    def take(self) -> tuple[list[Pair], dict[str, int]]:
        """This step's batches and their position in the data."""
        batches, self._batches = self._batches, None
        self._taken = self.loader.last
        return batches or [], self.loader.position()

    def finish(self) -> None:
        """Finish the step whose batches were taken; what was read ahead does not count yet."""
        self._finished, self._taken = self._taken, None

    def state(self) -> dict[str, Any]:
        """The loader's state after the last finished step."""
        return self.loader.state(self._finished)

    def position(self) -> dict[str, int]:
        """The last finished step's position in the data."""
        return self._finished.cursor.position() if self._finished else self.loader.position()

    def take_seconds(self) -> float:
        """Seconds spent reading since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


@dataclasses.dataclass
class Run:
    """Everything that the loop works with."""

    settings: Settings
    stage: RunStage
    comm: Comm
    journal: Journal
    matmul: str
    kernels: KernelChoice
    tokenizer: Tokenizer
    token_bytes: Tensor
    data_dir: Path
    checkpoints: Path
    writer: int  # the rank that writes checkpoints into this rank's folder
    plan: TrainingPlan
    model: GPT
    # Set by rebuild: all that depends on the shares.
    shares: Shares = dataclasses.field(init=False)
    training: TrainingPass = dataclasses.field(init=False)
    optimizer: Optimizer = dataclasses.field(init=False)
    sync: Sync = dataclasses.field(init=False)
    balancer: Balancer = dataclasses.field(init=False)
    busy_seconds: float = 0.0  # in the last step; 0 if that does not predict the next ones
    progress: TrainingProgress = dataclasses.field(default_factory=TrainingProgress)
    feed: Feed = dataclasses.field(default_factory=Feed)
    saved: list[int] = dataclasses.field(default_factory=list)
    unproven: int | None = None  # the step of the last checkpoint, until its weights gave a finite loss
    stop_asked: bool = False
    training_id: str = ""  # see resume.py
    base: dict[str, Any] = dataclasses.field(default_factory=dict)  # training and step of the model it began with
    deadline: Deadline | None = None  # of a timed run, on the rank whose clock counts
    ends: float | None = None  # of a timed run: seconds since 1970 by this host's clock
    last_step: int = 0  # its number; in a timed run an estimate
    saved_at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def save_wanted(self) -> bool:
        """Whether the last checkpoint is too long ago; one rank's clock counts for all."""
        minutes = self.settings.save_minutes
        return self.comm.rank == 0 and 0 < minutes <= (time.monotonic() - self.saved_at) / 60

    @property
    def share_done(self) -> float:
        """Fraction of the schedule: of the time in a timed run, otherwise of the steps."""
        return (self.progress.place if self.plan.timed else self.progress.step) / self.plan.end

    def schedule(self) -> StepSchedule:
        """The schedule of the current step."""
        return StepSchedule.at(self.plan, self.progress.step, self.progress.place if self.plan.timed else None)

    def took(self, what: str, begun: float) -> None:
        """Record the time since `begun` (time.perf_counter) for work that also follows the last step."""
        if self.deadline is not None:
            self.deadline.took(what, time.perf_counter() - begun)

    def make_whole(self) -> None:
        """Bring all weights up to date on every rank; all ranks must call it together."""
        self.optimizer.catch_up()
        if self.sync.head is not None:
            self.sync.head.gather()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @property
    def passes(self) -> list[int]:
        """This rank's rows in each pass of a step."""
        return passes_of(self.shares.rows, self.settings.device_batch_size, self.sync.head is not None)[self.comm.rank]

    def configured_shares(self) -> list[list[int]]:
        """The shares according to the settings."""
        settings = self.settings
        rows = rank_shares(settings, self.plan.total_batch_size, self.comm.world)
        return [rows, list(settings.head_shares)]

    def rebuild(self, shares: Shares) -> None:
        """Build everything that depends on the shares, without its state."""
        settings, comm, model, matmul = self.settings, self.comm, self.model, self.matmul
        self.shares = shares
        rates = LearningRates(settings.embedding_lr, settings.unembedding_lr, settings.matrix_lr, settings.scalar_lr)
        head = make_head(settings, comm, model, shares, MATMUL_TYPES[matmul])
        self.training = TrainingPass(model, matmul, head)
        self.optimizer = Optimizer(model, rates.scaled(self.plan.lr_scale), matmul, head.rows if head else ALL_ROWS)
        tokens_of_ranks = [rows * settings.max_seq_len for rows in shares.rows]
        speeds = shares.head if len(set(shares.head)) > 1 else ()
        self.sync = make_sync(settings.sync, comm, self.training, self.optimizer, tokens_of_ranks, speeds)
        # Memory must suffice to copy what an update changes, and for what the first step allocates.
        available = memory_available()
        has_room = available is None or 2 * self.optimizer.undo_bytes() <= available
        if settings.save_on_loss and self.sync.undoable and has_room:
            self.optimizer.undo = Undo()
        head_work = 6 * parameters(model.config)["lm_head"] / flops_per_token(model.config)
        self.balancer, self.busy_seconds = Balancer(shares, head_work if shares.head else 0.0), 0.0
        self.feed.take_shares(self.sync, sum(shares.rows[: comm.rank]), self.passes)

    def meta(self) -> dict[str, Any]:
        """The content of a checkpoint's meta file, with upstream's names."""
        progress = self.progress
        return {
            "step": progress.step,
            META_KEY: self.training_id,
            **({"base": self.base} if self.base else {}),
            "val_bpb": progress.val_bpb,
            "model_config": dataclasses.asdict(self.model.config),
            "user_config": dataclasses.asdict(self.settings),
            "device_batch_size": self.settings.device_batch_size,
            "max_seq_len": self.settings.max_seq_len,
            "total_batch_size": self.plan.total_batch_size,
            "dataloader_state_dict": self.feed.position(),
            "loop_state": {
                "min_val_bpb": progress.min_val_bpb,
                "smooth_train_loss": progress.smooth_loss,
                "total_training_time": progress.training_seconds,
                **({"place": progress.place} if self.plan.timed else {}),
                **({"shares": [*self.shares, self.configured_shares()]} if self.settings.rebalance else {}),
            },
        }
