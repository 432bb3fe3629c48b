# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The mean of what ranks changed apart, and what packing leaves of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ranks
import torch

from nanochat.meeting import DenseMeeting
from nanochat.wire import WIRES

if TYPE_CHECKING:
    from nanochat.comm import Comm

HERE = "test_meeting"
MEETINGS = 12


def strayed(comm: Comm, given_up: str) -> float:
    """How far the weights are from where plain means would have led, after meetings of which each brings the same changes;
    given_up: what packing leaves that is not kept."""
    weights = torch.zeros(64, 128)
    dense = DenseMeeting(comm, {"w": weights}, [0.5, 0.5], WIRES["int4"][0], (1.0, 0.0))
    changes = [torch.randn(64, 128, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    dense.start()
    for dummy in range(MEETINGS):
        weights += changes[comm.rank]
        if given_up:
            dense.feedback[given_up].zero_()
        dense.send()
        dense.take()
    return float((weights - MEETINGS * (changes[0] + changes[1]) / 2).norm())


def compare(comm: Comm) -> None:
    print(json.dumps([strayed(comm, given_up) for given_up in ("", "change", "mean")]))


def test_what_packing_leaves_of_changes_and_of_their_mean_goes_with_the_next_meeting() -> None:
    outs = [json.loads(out) for out in ranks.passed(ranks.call(HERE, "compare", 2))]
    assert outs[0] == outs[1]
    with_all, *without = outs[0]
    assert with_all < 0.7 * min(without), outs
