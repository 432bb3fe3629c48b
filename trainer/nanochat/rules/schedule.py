# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the settings to how many steps there are, how large they are, and how each of them is scheduled. No torch here.

How it goes: `plan_training` once, then `StepSchedule.at(plan, step)` for every step. A run that has a time to end at (`timed`) does
not know its steps: its schedule goes by the share of the time that is used, its place between 0 and WHOLE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE_BATCH = 524288
REFERENCE_DEPTH = 12
BATCH_EXPONENT = 0.383
# The place at which the time of a timed run is used up. A place travels in 28 bits of a number beside the token ids.
WHOLE = 2**28
# What follows the last step of a timed run, as long as none of it was measured: an evaluation only makes the forward pass, a
# third of a step's work for as many tokens; and bytes a second of a checkpoint.
EVAL_SHARE, SAVE_RATE = 1 / 3, 200e6
# No run ever sees more, and floating point numbers beyond it are no whole numbers.
MOST_TOKENS = 2.0**53
# Lockstep parts of a run with local steps: the first tenth and last twentieth, at most this many steps.
COMMON_FIRST, COMMON_LAST = 10, 20
MOST_FIRST, MOST_LAST = 100, 50
# Rate and momentum of a meeting's step by number of ranks, from MuLoCo for Muon
# (https://arxiv.org/abs/2505.23725); between them by the logarithm of the ranks.
FEW, OUTER_OF_FEW = 2, (0.9, 0.8)
MANY, OUTER_OF_MANY = 16, (1.0, 0.9)


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
    target_tokens: int
    timed: bool = False  # num_iterations is an estimate only

    @property
    def end(self) -> int:
        """The place at which the run ends, in steps or in parts of its time."""
        return WHOLE if self.timed else self.num_iterations

    @property
    def warmdown(self) -> int:
        """How long before the end the learning rate falls, in the same unit."""
        return round(self.warmdown_ratio * self.end)


@dataclass(frozen=True)
class StepSchedule:
    """Learning rate, momentum and weight decay of one step."""

    lr_multiplier: float
    muon_momentum: float
    muon_weight_decay: float

    @classmethod
    def at(cls, plan: TrainingPlan, step: int, place: int | None = None) -> StepSchedule:
        """place: of a timed run; that of all others is the step."""
        place = step if place is None else place
        return cls(lr_multiplier(plan, step, place), muon_momentum(plan, step, place), muon_weight_decay(plan, place))


def auto_batch_size(target_tokens: float, reference_tokens: float) -> int:
    """The total batch that a training of target_tokens wants, a power of two."""
    wanted = REFERENCE_BATCH * (max(1.0, target_tokens) / max(1.0, reference_tokens)) ** BATCH_EXPONENT
    return 1 << max(0, round(math.log2(wanted)))


def lr_scale(total_batch_size: int) -> float:
    return math.sqrt(total_batch_size / REFERENCE_BATCH)


def iterations(
    total_batch_size: int, target_tokens: int, flops_per_token: int, num_iterations: int = -1, target_flops: float = -1
) -> int:
    """The number of steps: as given, else from the FLOPs to spend, else from the tokens to see."""
    if num_iterations > 0:
        return num_iterations
    if target_flops > 0:
        return round(min(target_flops / (flops_per_token * total_batch_size), MOST_TOKENS))
    return target_tokens // total_batch_size


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
    """Scaling parameters are transformer matrices + lm_head; the reference is the same family at depth 12."""
    target_tokens = int(min(target_param_data_ratio * scaling_parameters, MOST_TOKENS))
    reference_tokens = target_param_data_ratio * reference_parameters
    if total_batch_size <= 0:
        total_batch_size = auto_batch_size(target_tokens, reference_tokens)
    return TrainingPlan(
        num_iterations=iterations(total_batch_size, target_tokens, flops_per_token, num_iterations, target_flops),
        total_batch_size=total_batch_size,
        warmup_steps=warmup_steps,
        warmdown_ratio=warmdown_ratio,
        final_lr_frac=final_lr_frac,
        lr_scale=lr_scale(total_batch_size),
        weight_decay=weight_decay * lr_scale(total_batch_size) * reference_parameters / scaling_parameters,
        target_tokens=target_tokens,
    )


def lr_multiplier(plan: TrainingPlan, step: int, place: int) -> float:
    """Linear up, flat, linear down to final_lr_frac. A timed run may come to its end before it has warmed up, and goes down then."""
    rising = (step + 1) / plan.warmup_steps if step < plan.warmup_steps else 1.0
    if (step < plan.warmup_steps and not plan.timed) or place <= plan.end - plan.warmdown:
        return rising
    left = (plan.end - place) / plan.warmdown
    return min(rising, left + (1 - left) * plan.final_lr_frac)


def muon_momentum(plan: TrainingPlan, step: int, place: int) -> float:
    """0.85 to 0.97 over the first 400 steps, and down to 0.90 over the warmdown."""
    rising = 0.85 + (0.97 - 0.85) * step / 400 if step < 400 else 0.97
    start = plan.end - plan.warmdown
    if (step < 400 and not plan.timed) or place < start or plan.warmdown == 0:
        return rising
    return min(rising, 0.97 - (0.97 - 0.90) * (place - start) / plan.warmdown)


def muon_weight_decay(plan: TrainingPlan, place: int) -> float:
    """Half a cosine, from the whole decay to none."""
    return plan.weight_decay * (1 + math.cos(math.pi * place / plan.end)) / 2


def steps_apart(steps: int) -> range:
    """The steps of a run that its ranks make apart, if it has local steps: all but those at the begin and at the end."""
    first, last = min(-(-steps // COMMON_FIRST), MOST_FIRST), min(-(-steps // COMMON_LAST), MOST_LAST)
    return range(first, steps - last)


def outer_rates(world: int) -> tuple[float, float]:
    """Rate and momentum of the step that this many ranks take along the mean of their changes."""
    way = (math.log2(world) - math.log2(FEW)) / (math.log2(MANY) - math.log2(FEW))
    share = min(1.0, max(0.0, way))
    rate, momentum = (few + share * (many - few) for few, many in zip(OUTER_OF_FEW, OUTER_OF_MANY))
    return rate, momentum
