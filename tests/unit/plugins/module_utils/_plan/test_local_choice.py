# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After how many steps apart auto lets the ranks meet: over links from fast to hopeless, and in runs long and short."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.local_choice import (
    STEPS,
    SyncChoice,
    choose_way,
    chosen,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import describe
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    Job,
    Link,
    Speed,
    choose_sync,
    job_of,
    mean_step,
    predict,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS

ROWS = (8, 8)
BOTH = [Speed("desktop", 0.3, 0.02, 0.1), Speed("laptop", 0.3, 0.02, 0.1)]
KINDS = list(WAYS)
LEAST = KINDS[-1]
ENOUGH = 0.95


def job(sync: str = "auto", iterations: int = 4000, local_steps: str = "auto") -> Job:
    shape = Shape(4, 64, 64, 512, "SSSL", 32768)
    training = {"total_batch": sum(ROWS) * shape.sequence, "device_batch": 2, "iterations": iterations}
    asked = {"sync": sync, "head": "auto", "local_steps": local_steps}
    return job_of(
        {
            "model": describe(shape),
            "training": {**training, "sync": "exact" if sync == "auto" else sync, "asked": asked},
            "nodes": [{"host": one.host, "rows": rows} for one, rows in zip(BOTH, ROWS, strict=True)],
        }
    )


def way(mbit: float, **settings: Any) -> SyncChoice:
    return choose_way(job(**settings), BOTH, Link(mbit, 1.0), ROWS)


def keeps(mbit: float, count: int, kind: str = LEAST, **settings: Any) -> float:
    """The share of their own speed that hosts keep with this many local steps."""
    document = job(**settings)
    alone = predict(document, BOTH, None, ROWS, kind, 1).seconds
    return alone / predict(document, BOTH, Link(mbit, 1.0), ROWS, kind, count).seconds


def test_over_a_fast_link_all_steps_are_made_together():
    found = way(1000.0)
    assert (found.sync, found.local_steps) == ("exact", 0)
    assert f"in lockstep (exact) the hosts keep {keeps(1000.0, 0):.0%} of their speed" == found.why


@pytest.mark.parametrize(
    ("sync", "mbit", "steps"), [("auto", 10.0, 50), ("auto", 25.0, 20), ("exact", 50.0, 50), ("exact", 100.0, 20)]
)
def test_the_fewest_steps_apart_that_are_enough_are_taken(sync, mbit, steps):
    found, kind = way(mbit, sync=sync), LEAST if sync == "auto" else sync
    assert found.local_steps == steps
    assert keeps(mbit, steps, kind, sync=sync) >= ENOUGH
    assert all(keeps(mbit, count, kind, sync=sync) < ENOUGH for count in [0, *STEPS[: STEPS.index(steps)]])
    assert found.sync == (choose_sync(job(), BOTH, Link(mbit, 1.0), ROWS, steps) if sync == "auto" else sync)


def test_where_no_distance_is_enough_the_longest_is_taken_and_what_it_keeps_is_told():
    found = way(0.3)
    document, link = job(), Link(0.3, 1.0)
    assert found.local_steps == 100 and keeps(0.3, 100) < ENOUGH
    alone = predict(document, BOTH, None, ROWS, LEAST, 1).seconds
    apart, whole = (step(document, BOTH, link, ROWS, found.sync, 100).seconds for step in (predict, mean_step))
    said = f"with 100 local steps ({found.sync}) {alone / apart:.0%}, and {alone / whole:.0%} over the whole run"
    assert said in found.why


@pytest.mark.parametrize(
    ("iterations", "steps"), [(59, 5), (117, 5), (118, 10), (236, 20), (354, 30), (589, 50), (1149, 50), (1150, 100)]
)
def test_a_run_has_at_least_ten_meetings(iterations, steps):
    # Of 59 steps 6 and 3 are made together, which leaves ten times five.
    assert way(2.0, iterations=iterations).local_steps == steps


@pytest.mark.parametrize(("world", "steps"), [(2, 100), (3, 30), (4, 30), (5, 0)])
def test_the_more_hosts_the_more_often_they_meet(world, steps):
    hosts = [*BOTH, *[BOTH[1]._replace(host=f"c{number}") for number in range(world - 2)]]
    rows = (*ROWS, *[ROWS[1]] * (world - 2))
    larger = dataclasses.replace(job(), hosts=tuple(one.host for one in hosts), rows=rows)
    found = choose_way(larger, hosts, Link(0.3, 1.0), rows)
    assert found.local_steps == steps
    assert steps or "with 5 hosts local steps would cost the model more than they gain" in found.why


def test_a_run_too_short_for_ten_meetings_stays_together():
    found = way(2.0, iterations=58)
    assert found.local_steps == 0 and "a run of 58 steps is too short for 10 meetings" in found.why


def test_what_hardly_gains_is_left_alone():
    # The link at which the hosts keep just less than enough with what is taken for steps together.
    mbit = next(rate for rate in range(1000, 1, -1) if "hardly more" in way(float(rate)).why)
    assert max(keeps(mbit, 0, kind) for kind in KINDS) < ENOUGH <= max(keeps(mbit + 5, 0, kind) for kind in KINDS)
    found = way(mbit)
    assert found.local_steps == 0 and "local steps hardly more" in found.why


@pytest.mark.parametrize("kind", KINDS)
def test_a_way_that_was_asked_for_is_kept(kind):
    found = way(5.0, sync=kind)
    assert found.sync == kind and found.local_steps in STEPS
    assert all(keeps(5.0, count, kind, sync=kind) < ENOUGH for count in STEPS if count < found.local_steps)


def test_nothing_is_chosen_that_was_set_or_where_there_is_no_link():
    link = Link(5.0, 1.0)
    assert chosen(job(), BOTH, None, ROWS) is None
    assert chosen(dataclasses.replace(job(), hosts=("desktop",), rows=ROWS[:1]), BOTH[:1], link, ROWS[:1]) is None
    assert chosen(job(sync="bf16", local_steps="0"), BOTH, link, ROWS) is None
    assert chosen(job(local_steps="30"), BOTH, link, ROWS) == SyncChoice(LEAST, 0)
    document = dataclasses.replace(job(local_steps="30"), local_steps=30)
    assert chosen(document, BOTH, link, ROWS) == SyncChoice(choose_sync(document, BOTH, link, ROWS, 30), 30)
    assert chosen(job(), BOTH, link, ROWS) == choose_way(job(), BOTH, link, ROWS)
