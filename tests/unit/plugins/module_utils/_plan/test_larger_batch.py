# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The batch that hides a slow link, within nanochat's law."""

from __future__ import annotations

import dataclasses

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.larger_batch import larger_batch, law_batch
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import describe
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import Link, Speed, StepJob
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.schedule import REFERENCE_BATCH

SPEEDS = [Speed(host, 0.6, 0.05, 0.3) for host in ("desktop", "laptop")]


def job(depth: int = 8, iterations: int = 10_000, **changes) -> StepJob:
    model = describe(Shape(depth, 64, 128, 1024, "SSSL", 32768))
    made = StepJob(("desktop", "laptop"), (2, 2), model, "cpu", 4096, 2, iterations, True, head_open=True)
    return dataclasses.replace(made.with_way("int4", "auto"), **changes)


def test_the_law_is_nanochats():
    reference = job(12, 10**9)
    assert law_batch(reference) == REFERENCE_BATCH
    assert law_batch(job(8, 10**9)) < REFERENCE_BATCH
    assert law_batch(job(8, 100)) < law_batch(job(8, 10_000))


def test_the_smallest_batch_that_hides_the_link_is_found():
    now = job(8, 200_000).with_way("bf16", "whole")
    found = larger_batch(now, SPEEDS, Link(1000.0, 1.0), (2, 2))
    assert (found.total_batch, found.iterations) == (131072, 6250)
    assert found.kept_now < 0.8 < 0.95 <= found.kept
    assert found.total_batch < law_batch(now)


def test_where_none_hides_it_the_largest_that_leaves_enough_steps_is_told():
    found = larger_batch(job(), SPEEDS, Link(20.0, 1.0), (2, 2))
    assert (found.total_batch, found.iterations) == (65536, 625)
    assert found.kept_now < found.kept < 0.5


@pytest.mark.parametrize(("changes", "mbit"), [({}, 940.0), ({"iterations": 750}, 20.0)])
def test_nothing_is_said_where_the_link_is_hidden_or_the_law_leaves_no_room(changes, mbit):
    assert larger_batch(job(**changes), SPEEDS, Link(mbit, 1.0), (2, 2)) is None
