# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds a total batch that hides a slow link: a step of more passes sends little more. Pure functions.

nanochat's law limits the batch by the model's depth and the run's tokens; nothing here is taken unless the user sets it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import AUTO
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.budget import LEAST_STEPS, TARGET_RATIO
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    FELT_SHARE,
    HIDDEN_SHARE,
    WIRE_SHARE,
    Job,
    Link,
    Speed,
    bytes_sent,
    passes_of,
    predict,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape, parameters
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.schedule import REFERENCE_DEPTH, auto_batch_size

# The link may take this fraction of a step before a larger batch is suggested; sufficient fraction of the hosts' own speeds.
LINK_SHARE, KEPT = 0.2, 0.95


class Larger(NamedTuple):
    """A larger total batch, the steps for the same tokens, and the fraction of the hosts' speed kept now and with it."""

    total_batch: int
    iterations: int
    kept_now: float
    kept: float
    tokens_per_second: float


def law_batch(job: Job) -> int:
    """nanochat's total batch for this model and as many tokens as the run has."""
    model = job.model
    sizes = [model["depth"], REFERENCE_DEPTH]
    names = ("aspect_ratio", "head_dim", "sequence", "window_pattern", "vocab_size")
    counts = [parameters(Shape(depth, *(model[name] for name in names))) for depth in sizes]  # type: ignore[literal-required]
    own, reference = (count["transformer_matrices"] + count["lm_head"] for count in counts)
    tokens = min(job.total_batch * job.iterations, TARGET_RATIO * own)
    return auto_batch_size(tokens, TARGET_RATIO * reference)


def larger_batch(job: Job, speeds: Sequence[Speed], link: Link, rows: Sequence[int]) -> Optional[Larger]:
    """The smallest multiple of the batch that hides the link, or the largest that the law allows; None if the link takes
    little of a step or the law leaves no room."""
    if job.world < 2:
        return None
    now, alone = (predict(job, speeds, one, rows).seconds for one in (link, None))
    computing = max(speed.compute(count) for speed, count in zip(speeds, passes_of(job, rows)))
    if 1 - alone / now <= LINK_SHARE:
        return None
    found, times = None, 2
    most = min(law_batch(job), job.total_batch * job.iterations // LEAST_STEPS)
    while times * job.total_batch <= most and (found is None or found.kept < KEPT):
        more = (times - 1) * computing
        # Gradients leave in the last pass only, so all other passes hide no more than what they send themselves.
        sent = (bytes_sent(_of_size(job, times)) - bytes_sent(job)) * 8 / (link.mbit * WIRE_SHARE * 1e6)
        seconds = now + more + max(FELT_SHARE * sent, sent - HIDDEN_SHARE * more)
        batch = times * job.total_batch
        found = Larger(batch, job.iterations // times, alone / now, (alone + more) / seconds, batch / seconds)
        times *= 2
    return found


def _of_size(job: Job, times: int) -> Job:
    larger = dataclasses.replace(
        job, total_batch=times * job.total_batch, rows=tuple(times * count for count in job.rows)
    )
    return larger.with_way(job.sync, AUTO if job.head_open else job.head)
