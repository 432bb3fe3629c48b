# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds a total batch that hides a slow link: a step of more passes sends little more. Pure functions.

nanochat's law limits the batch by the model's depth and the run's tokens; nothing here is taken unless the user sets it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import AUTO
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.budget import LEAST_STEPS, law_of
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import Link, Speed, StepJob, predict
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape

# A larger batch is suggested if the link takes more than this fraction of a step, until the hosts keep this much of their speed.
LINK_SHARE, KEPT = 0.2, 0.95


class Larger(NamedTuple):
    """A larger total batch, the steps for the same tokens, and the fraction of the hosts' speed kept now and with it."""

    total_batch: int
    iterations: int
    kept_now: float
    kept: float
    tokens_per_second: float


def law_batch(job: StepJob) -> int:
    """nanochat's total batch for this model and as many tokens as the run has."""
    shape = Shape(*(job.model[name] for name in Shape._fields))  # type: ignore[literal-required]
    return law_of(shape, job.total_batch * job.iterations).batch


def larger_batch(job: StepJob, speeds: Sequence[Speed], link: Link, rows: Sequence[int]) -> Optional[Larger]:
    """The smallest multiple of the batch that hides the link, or the largest that the law allows; None if the link takes
    little of a step or the law leaves no room."""
    if job.world < 2:
        return None
    kept_now, dummy = kept_and_speed(job, speeds, link, rows)
    if kept_now >= 1 - LINK_SHARE:
        return None
    found, times, head = None, 2, AUTO if job.head_open else job.head
    most = min(law_batch(job), job.total_batch * job.iterations // LEAST_STEPS)
    while times * job.total_batch <= most and (found is None or found.kept < KEPT):
        total, own = times * job.total_batch, tuple(times * count for count in job.rows)
        larger = dataclasses.replace(job, total_batch=total, rows=own).with_way(job.sync, head)
        kept, speed = kept_and_speed(larger, speeds, link, [times * count for count in rows])
        found = Larger(total, job.iterations // times, kept_now, kept, speed)
        times *= 2
    return found


def kept_and_speed(job: StepJob, speeds: Sequence[Speed], link: Link, rows: Sequence[int]) -> Tuple[float, float]:
    """The fraction of the hosts' speed that the link leaves, and tokens per second."""
    step, alone = (predict(job, speeds, one, rows) for one in (link, None))
    return alone.seconds / step.seconds, step.tokens_per_second
