# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows of made-up text, shared out among the ranks; each batch is read into the memory of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanochat.common import get_dist_info


def batches(rows: int, length: int, split: str, state: dict[str, int] | None) -> Iterator[tuple[Tensor, Tensor, Any]]:
    _ddp, rank, _local_rank, world = get_dist_info()
    x = torch.empty(rows, length, dtype=torch.int32)
    y = torch.empty(rows, length, dtype=torch.int64)
    number = state["rg_idx"] if state else 0
    while True:
        for row in range(rows):
            # The same rows make up a step, whatever the number of ranks.
            seed = (number * world + rank) * rows + row + (10**6 if split == "val" else 0)
            drawn = torch.randint(0, 12, (length + 1,), generator=torch.Generator().manual_seed(seed)).cumsum(0) % 90
            x[row], y[row] = drawn[:-1], drawn[1:]
        number += 1
        yield x, y, {"pq_idx": 0, "rg_idx": number, "epoch": 1}
