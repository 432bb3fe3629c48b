# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Number of steps, batch size, and the schedule of each step, from the settings.

Call `plan_training` once, then `StepSchedule.at(plan, step)` for every step. A run with a deadline (`timed`) does not know its
number of steps: its schedule follows its place between 0 and WHOLE (run/deadline.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

REFERENCE_BATCH = 524288
REFERENCE_DEPTH = 12
BATCH_EXPONENT = 0.383
# The place at which a timed run ends. It is sent as 28 bits along with the token ids.
WHOLE = 2**28
# Assumed until measured, to reserve time after the last step: work of an evaluation relative to a step of as many tokens
# (forward only), and bytes a second of a checkpoint.
EVAL_SHARE, SAVE_RATE = 1 / 3, 200e6
# More than any run sees; floats beyond it are not exact integers.
MOST_TOKENS = 2.0**53


class Momentum(NamedTuple):
    """Muon's momentum: from FIRST_MOMENTUM up to `most` in these steps, then down to `last` over the warmdown."""

    most: float
    steps: int
    last: float


FIRST_MOMENTUM = 0.85
PRETRAINING, FINE_TUNING = Momentum(0.97, 400, 0.90), Momentum(0.95, 300, 0.95)


@dataclass(frozen=True)
class TrainingPlan:
    """Batch, steps and scaling, from the settings and the model's size."""

    num_iterations: int
    total_batch_size: int
    warmup_steps: int
    warmdown_ratio: float
    final_lr_frac: float
    lr_scale: float
    weight_decay: float
    timed: bool = False  # num_iterations is an estimate only
    momentum: Momentum = PRETRAINING

    @property
    def end(self) -> int:
        """The place of the end, in steps or parts of WHOLE."""
        return WHOLE if self.timed else self.num_iterations

    @property
    def warmdown(self) -> int:
        """Length of the learning rate's decay, in the same unit."""
        return round(self.warmdown_ratio * self.end)


@dataclass(frozen=True)
class StepSchedule:
    """Learning rate, momentum and weight decay of one step."""

    lr_multiplier: float
    muon_momentum: float
    muon_weight_decay: float

    @classmethod
    def at(cls, plan: TrainingPlan, step: int, place: int | None = None) -> StepSchedule:
        """place: timed runs only; otherwise it is the step."""
        place = step if place is None else place
        return cls(lr_multiplier(plan, step, place), muon_momentum(plan, step, place), muon_weight_decay(plan, place))


def auto_batch_size(target_tokens: float, reference_tokens: float) -> int:
    """Total batch size for this many tokens, a power of two."""
    wanted = REFERENCE_BATCH * (max(1.0, target_tokens) / max(1.0, reference_tokens)) ** BATCH_EXPONENT
    return 1 << max(0, round(math.log2(wanted)))


def plan_training(
    *,
    scaling_parameters: int,
    reference_parameters: int,
    flops_per_token: int,
    num_iterations: int = -1,
    target_flops: float = -1,
    target_param_data_ratio: float = 12,
    total_batch_size: int = -1,
    weight_decay: float = 0.28,
    warmup_steps: int = 40,
    warmdown_ratio: float = 0.65,
    final_lr_frac: float = 0.05,
) -> TrainingPlan:
    """Scaling parameters are transformer matrices + lm_head; the reference is the same model family at depth 12.

    The number of steps is as given, else from the FLOP budget, else from the tokens.
    """
    target_tokens = int(min(target_param_data_ratio * scaling_parameters, MOST_TOKENS))
    reference_tokens = target_param_data_ratio * reference_parameters
    if total_batch_size <= 0:
        total_batch_size = auto_batch_size(target_tokens, reference_tokens)
    if num_iterations <= 0 and target_flops > 0:
        num_iterations = round(min(target_flops / (flops_per_token * total_batch_size), MOST_TOKENS))
    elif num_iterations <= 0:
        num_iterations = target_tokens // total_batch_size
    lr_scale = math.sqrt(total_batch_size / REFERENCE_BATCH)
    return TrainingPlan(
        num_iterations=num_iterations,
        total_batch_size=total_batch_size,
        warmup_steps=warmup_steps,
        warmdown_ratio=warmdown_ratio,
        final_lr_frac=final_lr_frac,
        lr_scale=lr_scale,
        weight_decay=weight_decay * lr_scale * reference_parameters / scaling_parameters,
    )


def lr_multiplier(plan: TrainingPlan, step: int, place: int) -> float:
    """Linear up, flat, linear down to final_lr_frac. A timed run that reaches its decay during the warm-up starts it there."""
    rising = (step + 1) / plan.warmup_steps if step < plan.warmup_steps else 1.0
    if (step < plan.warmup_steps and not plan.timed) or place <= plan.end - plan.warmdown:
        return rising
    left = (plan.end - place) / plan.warmdown
    return min(rising, left + (1 - left) * plan.final_lr_frac)


def muon_momentum(plan: TrainingPlan, step: int, place: int) -> float:
    """Up, flat, and down over the warmdown."""
    most, steps, last = plan.momentum
    rising = FIRST_MOMENTUM + (most - FIRST_MOMENTUM) * step / steps if step < steps else most
    start = plan.end - plan.warmdown
    if (step < steps and not plan.timed) or place < start or plan.warmdown == 0:
        return rising
    return min(rising, most - (most - last) * (place - start) / plan.warmdown)


def muon_weight_decay(plan: TrainingPlan, place: int) -> float:
    """Half a cosine, from full decay to zero."""
    return plan.weight_decay * (1 + math.cos(math.pi * place / plan.end)) / 2
