# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A batch is shared out among any number of hosts; tests/pins has how unequal hosts share one."""

from __future__ import annotations

import dataclasses

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import Asked, resolve
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.decided import plan_batch
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import lan
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("split", [None, "auto", "equal", "threads", "speed"])
@pytest.mark.parametrize("profile", ["smoke", "real"])
@pytest.mark.parametrize("speeds", [(), (900.0, 300.0), (400.0, 200.0, 100.0)])
def test_field_34_any_number_of_hosts_with_nothing_set_is_fine(profile, split, speeds):
    for count in range(1, 13):
        settings = {"ddp_profile": profile, **({"ddp_batch_split": split} if split else {})}
        training = make_plan(lan(count, settings, speeds)).plan["training"]
        sequence = 512 if profile == "smoke" else 1024
        assert len(training["rows"]) == count
        assert training["total_batch"] == sum(training["rows"]) * sequence
        assert all(rows > 0 for rows in training["rows"]) and training["device_batch"] > 0
        assert 4 / 1.5 <= sum(training["rows"]) <= max(6, count)


# The sharing out of a batch

BASE = resolve([("desktop", {})])


def told(sequence: int, rows: int, device: int, is_given: bool) -> Asked:
    """Settings with a batch of so many rows, and a device batch that the user wrote or the profile has."""
    run = dataclasses.replace(BASE.run, sequence=sequence, total_batch=rows * sequence, device_batch=device)
    return dataclasses.replace(BASE, run=run, given=frozenset({"ddp_device_batch"} if is_given else ()))


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
    found = plan_batch(told(sequence, wanted, device, told_device), weights, equal)
    assert found.total_batch == sum(found.rows) * sequence
    assert all(rows > 0 for rows in found.rows)
    assert 1 <= found.device_batch <= max(found.rows)
    assert found.device_batch <= device or not told_device
    assert len(set(found.rows)) == 1 or not equal
