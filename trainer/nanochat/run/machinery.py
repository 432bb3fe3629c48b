# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of a run that compute, update and exchange, according to the settings; rebuilt when the shares change."""

from __future__ import annotations

from nanochat.kit.common import memory_available
from nanochat.kit.settings import Settings
from nanochat.model.fused import TrainingPass
from nanochat.model.gpt import GPT
from nanochat.model.gradients import MATMUL_TYPES
from nanochat.model.optim import ALL_ROWS, LearningRates, Optimizer, Undo
from nanochat.parallel.balance import Balancer, Shares
from nanochat.parallel.comm import Comm
from nanochat.parallel.shared_head import make_head
from nanochat.parallel.sync import Sync, make_sync
from nanochat.rules.model_size import flops_per_token, parameters
from nanochat.rules.schedule import TrainingPlan


def first_shares(settings: Settings, rows: list[int]) -> Shares:
    """The initial shares."""
    return Shares(rows, list(settings.head_shares) or [1] * len(rows) if settings.head == "shared" else [])


def make_machinery(
    settings: Settings, comm: Comm, model: GPT, plan: TrainingPlan, shares: Shares, matmul: str
) -> tuple[TrainingPass, Optimizer, Sync]:
    """Everything that depends on the shares."""
    tokens_of_ranks = [rows * settings.max_seq_len for rows in shares.rows]
    rates = LearningRates(settings.embedding_lr, settings.unembedding_lr, settings.matrix_lr, settings.scalar_lr)
    head = make_head(settings, comm, model, shares, MATMUL_TYPES[matmul])
    training = TrainingPass(model, matmul, head)
    optimizer = Optimizer(model, rates.scaled(plan.lr_scale), matmul, head.rows if head else ALL_ROWS)
    speeds = shares.head if len(set(shares.head)) > 1 else ()
    sync = make_sync(settings.sync, comm, training, optimizer, tokens_of_ranks, speeds)
    if settings.save_on_loss and sync.undoable and has_room_for_undo(optimizer):
        optimizer.undo = Undo()
    return training, optimizer, sync


def has_room_for_undo(optimizer: Optimizer) -> bool:
    """Whether memory suffices to copy what an update changes, and for what the first step allocates."""
    available = memory_available()
    return available is None or 2 * optimizer.undo_bytes() <= available


def new_balancer(model: GPT, shares: Shares) -> Balancer:
    head_work = 6 * parameters(model.config)["lm_head"] / flops_per_token(model.config)
    return Balancer(shares, head_work if shares.head else 0.0)
