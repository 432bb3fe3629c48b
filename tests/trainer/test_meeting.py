# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The mean of what ranks changed apart, and what packing leaves of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ranks
import torch

from nanochat.parallel import meeting
from nanochat.parallel.meeting import DenseMeeting
from nanochat.parallel.wire import WIRES, Plain

if TYPE_CHECKING:
    from nanochat.parallel.comm import Comm

HERE = "test_meeting"
MEETINGS = 12


def strayed(comm: Comm, given_up: str) -> float:
    """How far the weights are from where plain means would have led, after meetings of which each brings the same changes;
    given_up: what packing leaves that is not kept."""
    weights = torch.zeros(64, 128)
    dense = DenseMeeting(comm, {"w": weights}, [0.5, 0.5], WIRES["int4"].matrices, (1.0, 0.0))
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


def by_the_book(comm: Comm) -> None:
    """Meetings in several pieces, of ranks with unlike shares, against the mean worked out by hand: matrices by Nesterov's
    momentum, scalars by their mean, and what a rank has changed behind a meeting on top of both."""
    meeting.PIECE = 1024
    shares, rate, momentum = [0.75, 0.25], 0.7, 0.9
    matrix, scalars = torch.zeros(64, 128), torch.ones(8)
    dense = DenseMeeting(comm, {"scalars": scalars, "matrix": matrix}, shares, Plain(torch.float32), (rate, momentum))
    dense.start()
    anchor, velocity, small = torch.zeros(64, 128), torch.zeros(64, 128), torch.ones(8)
    own = 0.0
    for number, overlap in enumerate((False, True, False)):
        each = [torch.full((64, 128), float(rank + 1 + number)) for rank in range(2)]
        matrix += each[comm.rank] - own
        scalars += each[comm.rank][0, :8] - own
        dense.send()
        mean = sum(share * change for share, change in zip(shares, each, strict=True))
        velocity = momentum * velocity + mean
        anchor = anchor + rate * (mean + momentum * velocity)
        small = small + mean[0, :8]
        own = 0.5 if overlap else 0.0
        matrix += own
        scalars += own
        (dense.land if overlap else dense.take)()
        assert torch.allclose(matrix, anchor + own, atol=1e-5), number
        assert torch.allclose(scalars, small + own, atol=1e-5), number


def test_a_meeting_ends_at_the_mean_by_the_ranks_shares() -> None:
    ranks.passed(ranks.call(HERE, "by_the_book", 2))
