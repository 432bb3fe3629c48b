# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows and parts of the head go by speed."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._rules.shares import head_weights, share_rows
from hypothesis import given
from hypothesis import strategies as st


def test_parts_of_the_head_are_finer_than_rows():
    assert head_weights([3.0, 1.0]) == [750, 250]
    assert head_weights([1.0, 1.0]) == [500, 500]
    assert head_weights([10000.0, 1.0]) == [1000, 1]


def test_equal_ranks_take_the_same():
    assert share_rows(4, [1, 1]) == [2, 2]
    assert share_rows(5, [1, 1], least=0) == [3, 2]


def test_field_17_faster_hosts_take_more_rows():
    assert share_rows(6, [8, 4]) == [4, 2]
    assert share_rows(16, [3.0, 1.0]) == [12, 4]
    assert share_rows(8, [100, 1]) == [7, 1]


@given(
    weights=st.lists(st.floats(0.01, 1000), min_size=1, max_size=12),
    more=st.integers(0, 60),
)
def test_shares_add_up_and_none_could_end_sooner(weights, more):
    rows = len(weights) + more
    shares = share_rows(rows, weights)
    assert sum(shares) == rows
    assert min(shares) >= 1
    slowest = max(range(len(weights)), key=lambda at: shares[at] / weights[at])
    if shares[slowest] > 1:
        # Handing one row of the slowest to any other would make that one at least as slow.
        time = shares[slowest] / weights[slowest]
        others = [(shares[at] + 1) / weights[at] for at in range(len(weights)) if at != slowest]
        assert all(other >= time * (1 - 1e-9) for other in others)
