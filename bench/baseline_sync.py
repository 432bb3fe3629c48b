# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The baseline of two_nodes.py: every gradient is sent whole, tables included, in buckets during the backward pass.

So does DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.model.gradients import Bucket, GradientPart, is_table
from nanochat.parallel.comm import Pending
from nanochat.parallel.sync import Sync
from nanochat.rules.schedule import StepSchedule

BUCKET_BYTES = 25 * 2**20


class WholeSync(Sync):
    """Sums whole tensors; both ranks then make the same update, since they run on one machine."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        shapes = {name: p.shape for name, p in self.training.model.named_parameters()}
        self.buckets = [Bucket(group) for group in grouped(self.training.ready_order, shapes, BUCKET_BYTES)]
        self.place = {name: view for bucket in self.buckets for name, view in bucket.views.items()}
        self.pending: list[Pending] = []
        self.missing: list[set[GradientPart]] = []

    def start_step(self, token_ids: Tensor) -> None:
        parts = self.training.step_gradients.parts
        self.pending = []
        self.missing = [{part for name in bucket.views for part in parts[name]} for bucket in self.buckets]

    def on_ready(self, part: GradientPart, gradient: Tensor) -> None:
        """Copy a gradient to its bucket, and send the buckets that are full, in the same order on both ranks."""
        place = self.place[part.name][part.rows]
        if is_table(part.name):
            place.zero_()
            place.index_copy_(0, self.training.token_ids, gradient)
        else:
            place.copy_(gradient)
        for missing in self.missing:
            missing.discard(part)
        while len(self.pending) < len(self.buckets) and not self.missing[len(self.pending)]:
            bucket = self.buckets[len(self.pending)]
            self.pending.append(self.comm.start_all_reduce(bucket.flat, "a bucket of gradients"))

    @torch.no_grad()
    def step(self, loss: Tensor, schedule: StepSchedule) -> float:
        self.comm.wait(*self.pending)
        for name, gradient in self.training.gradients.items():
            gradient.copy_(self.place[name][self.training.token_ids] if is_table(name) else self.place[name])
        total = self.comm.all_reduce(loss.detach().float().reshape(1).clone(), "the loss")
        super().step(loss, schedule)
        return float(total)


def grouped(names: Sequence[str], shapes: Mapping[str, torch.Size], limit: int) -> list[dict[str, torch.Size]]:
    """Shapes by name, in groups of at most so many bytes."""
    groups: list[dict[str, torch.Size]] = []
    size = 0
    for name in names:
        size += 4 * shapes[name].numel()
        if not groups or size > limit:
            groups.append({})
            size = 4 * shapes[name].numel()
        groups[-1][name] = shapes[name]
    return groups
