# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sharing out of a batch."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.batch import BatchError, share, total_rows
from hypothesis import given
from hypothesis import strategies as st


def test_equal_shares():
    assert total_rows(2048, 512, 2, 2, True) == 4
    assert share(4, 2, [1, 1]) == [2, 2]


def test_field_17_faster_hosts_take_more_rows():
    assert share(6, 2, [8, 4]) == [4, 2]
    assert share(16, 2, [3.0, 1.0]) == [12, 4]
    assert share(8, 2, [100, 1]) == [6, 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (2000, 512, 2, 2, True),
            "ddp_total_batch 2000 is not a multiple of ddp_sequence x ddp_device_batch x 2 hosts = 512 x 2 x 2",
        ),
        ((2000, 512, 2, 2, True), "= 2048; 2048 would do."),
        ((5000, 512, 2, 2, True), "4096 or 6144 would do."),
        ((1000, 512, 2, 1, True), "= 512 x 2 = 1024; 1024 would do."),
        ((1024, 512, 2, 2, False), "has too few rows for 2 hosts of ddp_device_batch 2; 2048 or more would do."),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(arguments, sentence):
    with pytest.raises(BatchError) as caught:
        total_rows(*arguments)
    assert sentence in str(caught.value)


@given(
    device_batch=st.integers(1, 8),
    weights=st.lists(st.floats(0.01, 1000), min_size=1, max_size=12),
    more=st.integers(0, 60),
)
def test_shares_are_whole_passes_that_add_up_and_none_could_end_sooner(device_batch, weights, more):
    rows = device_batch * (len(weights) + more)
    shares = share(rows, device_batch, weights)
    assert sum(shares) == rows
    assert all(part >= device_batch and part % device_batch == 0 for part in shares)
    slowest = max(range(len(weights)), key=lambda at: shares[at] / weights[at])
    if shares[slowest] > device_batch:
        # Handing one pass of the slowest to any other would make that one at least as slow.
        time = shares[slowest] / weights[slowest]
        others = [(shares[at] + device_batch) / weights[at] for at in range(len(weights)) if at != slowest]
        assert all(other >= time * (1 - 1e-9) for other in others)
