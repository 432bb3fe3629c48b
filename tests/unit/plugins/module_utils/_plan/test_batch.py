# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sharing out of a batch."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.batch import (
    BatchError,
    BatchRequest,
    SharedBatch,
    plan_batch,
)
from hypothesis import given
from hypothesis import strategies as st

SMOKE = BatchRequest(512, 2048, 2, False, False)


def told(total=None, device=None):
    return BatchRequest(512, total or 2048, device or 2, total is not None, device is not None)


def test_equal_shares():
    assert plan_batch(told(2048, 2), [1.0, 1.0], True) == SharedBatch([2, 2], 2, 2048)


@pytest.mark.parametrize(
    ("world", "rows", "device"),
    [(1, 4, 2), (2, 2, 2), (3, 2, 2), (4, 1, 1), (5, 1, 1), (6, 1, 1), (7, 1, 1), (12, 1, 1)],
)
def test_what_nobody_set_adapts_to_the_number_of_hosts(world, rows, device):
    assert plan_batch(SMOKE, [1.0] * world, True) == SharedBatch([rows] * world, device, rows * world * 512)


@pytest.mark.parametrize(
    ("speeds", "rows", "device"),
    [([3, 1], [3, 1], 3), ([1, 1], [2, 2], 2), ([2, 1], [3, 1], 3), ([4, 2, 1], [4, 1, 1], 4), ([1, 1.5], [2, 2], 2)],
)
def test_field_34_rows_are_shared_out_by_speed_and_each_share_goes_through_in_one_pass(speeds, rows, device):
    found = plan_batch(SMOKE, [float(one) for one in speeds])
    assert (found.rows, found.device_batch) == (rows, device)


def test_a_pass_is_never_larger_than_a_share():
    # The trainer refuses a total batch of less than one pass on every rank.
    assert plan_batch(BatchRequest(128, 1024, 8, True, True), [1.0, 1.0]) == SharedBatch([4, 4], 4, 1024)


def test_passes_of_unequal_hosts_have_a_limit():
    found = plan_batch(BatchRequest(512, 512 * 64, 8, True, False), [3.0, 1.0])
    assert (found.rows, found.device_batch) == ([48, 16], 16)
    assert plan_batch(BatchRequest(512, 512 * 64, 2, True, True), [3.0, 1.0]).device_batch == 2


def test_a_run_keeps_the_shares_that_it_has_had():
    assert plan_batch(SMOKE, [1.0, 1.0], kept=[3, 1]).rows == [3, 1]
    assert plan_batch(SMOKE, [3.0, 1.0], kept=[2, 2]) == SharedBatch([2, 2], 2, 2048)
    assert plan_batch(told(device=2), [3.0, 1.0], kept=[3, 1]) == SharedBatch([3, 1], 2, 2048)
    assert plan_batch(told(total=4096), [3.0, 1.0], kept=[3, 1]).rows == [6, 2]


@given(
    sequence=st.sampled_from([128, 512, 1024]),
    wanted=st.integers(1, 64),
    device=st.integers(1, 9),
    told_device=st.booleans(),
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=12),
    equal=st.booleans(),
)
def test_nothing_that_was_not_asked_for_is_ever_refused(sequence, wanted, device, told_device, weights, equal):
    weights = [1.0] * len(weights) if equal else weights
    found = plan_batch(BatchRequest(sequence, sequence * wanted, device, False, told_device), weights, equal)
    assert found.total_batch == sum(found.rows) * sequence
    assert all(rows > 0 for rows in found.rows)
    assert 1 <= found.device_batch <= max(found.rows)
    assert found.device_batch <= device or not told_device
    assert len(set(found.rows)) == 1 or not equal


@pytest.mark.parametrize(
    ("total", "device", "world", "equal", "sentence"),
    [
        (2000, 2, 2, True, "2000 is not a multiple of ddp_sequence x ddp_device_batch x 2 hosts = 512 x 2 x 2 = 2048"),
        (2000, 2, 2, True, "= 2048; use 2048."),
        (5000, 2, 2, True, "use 4096 or 6144."),
        (1000, 2, 1, True, "= 512 x 2 = 1024; use 1024."),
        (2048, None, 3, True, "of ddp_sequence x 3 hosts = 512 x 3 = 1536; use 1536 or 3072."),
        (1000, None, 1, True, "ddp_total_batch 1000 is not a multiple of ddp_sequence = 512; use 512 or 1024."),
        (1024, 2, 2, True, "1024 is not a multiple of ddp_sequence x ddp_device_batch x 2 hosts"),
        (512, None, 2, False, "has too few rows for 2 hosts; use 1024 or more."),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(total, device, world, equal, sentence):
    with pytest.raises(BatchError) as caught:
        plan_batch(told(total, device), [1.0] * world, equal)
    assert sentence in str(caught.value)
