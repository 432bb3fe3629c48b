# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ddp_sync auto in a plan follows the measurements, or the value that the run started with."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import with_precision
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    desktop,
    hosts,
    laptop,
    planned,
)

# What rounds most of all that auto may take.
LAST = list(WAYS)[-1]


def measured(mbit: float, **settings: Any) -> dict[str, Any]:
    """The measurements that a rehearsal with these settings leaves on a host."""
    plan = planned(settings)
    training = plan["training"]
    return {
        "tokens_per_second": 2000.0,
        "pass_seconds": 0.5,
        "adamw_seconds": 0.02,
        "muon_seconds": 0.1,
        "link": {"mbit": mbit, "latency_ms": 0.3},
        "model": plan["model"],
        "device_batch": training["device_batch"],
    }


def taken(settings: dict[str, Any], one: Any = None, two: Any = None, run: Any = None) -> str:
    """The plan's way, which is also the one that the ranks are started with."""
    facts = [{"measured": found, **({"run": run} if run else {})} for found in (one, two)]
    plan = planned(settings, *facts)
    way = str(plan["training"]["sync"])
    assert all(f"--sync={way}" in node["argv"] for node in plan["nodes"])
    assert plan["training"]["asked"]["sync"] == settings.get("ddp_sync", "auto")
    return way


LOSING = {"ddp_sync": "exact", "ddp_restarts": 3, "ddp_min_hosts": 1}
NOBODY, EITHER = "no host may be away: the others wait", "desktop or laptop may be away"
STEPS = "a step or two"
SINCE_SAVE = "up to 5 steps or 30 minutes (with ddp_head whole: a step or two)"


@pytest.mark.parametrize(
    ("settings", "mbit", "head", "cost"),
    [
        ({**LOSING, "ddp_min_hosts": 0}, None, "shared", f"{NOBODY}; losing one repeats {SINCE_SAVE}"),
        (LOSING, None, "whole", f"{EITHER}; losing one repeats {STEPS}"),
        (LOSING, 9400.0, "whole", f"{EITHER}; losing one repeats {STEPS}"),
        # The gradient of the whole head would take most of each step.
        (LOSING, 20.0, "shared", f"{EITHER}; losing one repeats {SINCE_SAVE}"),
        ({**LOSING, "ddp_head": "whole"}, 20.0, "whole", f"{EITHER}; losing one repeats {STEPS}"),
        ({**LOSING, "ddp_head": "shared"}, 9400.0, "shared", f"{EITHER}; losing one repeats {SINCE_SAVE}"),
    ],
)
def test_a_run_that_may_lose_hosts_keeps_its_head_whole_unless_that_is_slow(settings, mbit, head, cost):
    facts = {"measured": measured(mbit, **settings)} if mbit else {}
    plan = planned(settings, facts, facts)
    assert (plan["training"]["head"], all(f"--head={head}" in node["argv"] for node in plan["nodes"])) == (head, True)
    assert f"{cost}\n" in render(plan)


CABLE, SLOW = measured(9400.0), measured(3.0)
OF_ANOTHER = measured(3.0, ddp_depth=8)
RUN = {"rows": {}, "sync": "bf16", "checkpoints": [5]}


@pytest.mark.parametrize(
    ("settings", "one", "two", "run", "way"),
    [
        # One host alone says nothing of a link, nor does what was measured of another model.
        ({}, None, None, None, "exact"),
        ({}, SLOW, None, None, "exact"),
        ({}, OF_ANOTHER, OF_ANOTHER, None, "exact"),
        # The slower direction counts.
        ({}, CABLE, CABLE, None, "exact"),
        ({}, CABLE, SLOW, None, LAST),
        # A run keeps what it began with, unless the settings rule that out: a model 264 wide cannot be packed.
        ({}, SLOW, SLOW, RUN, "bf16"),
        ({"ddp_sync": "int8"}, SLOW, SLOW, RUN, "int8"),
        ({"ddp_fresh": True}, SLOW, SLOW, RUN, LAST),
        ({}, SLOW, SLOW, {**RUN, "sync": "nonsense"}, LAST),
        ({"ddp_head_dim": 24}, None, None, {**RUN, "sync": "int8"}, "exact"),
    ],
)
def test_sync_follows_settings_the_resumed_run_and_measurements(settings, one, two, run, way):
    assert taken(settings, one, two, run) == way


def with_products(fp32: float, bf16: float) -> dict[str, Any]:
    """Measurements of a rehearsal that timed a step with both."""
    of_both = {
        "fp32": {"tokens_per_second": fp32, "matmul": "fp32"},
        "bf16": {"tokens_per_second": bf16, "matmul": "bf16"},
    }
    return {**of_both["fp32"], "products": of_both}


FASTER, SLOWER = with_products(1000.0, 1600.0), with_products(1000.0, 700.0)


def products(
    settings: dict[str, Any], native: tuple[bool, bool], run: Any = None, found: tuple[Any, Any] = (FASTER, FASTER)
) -> str:
    """The plan's ddp_matmul by measurements, for CPUs with and without bf16."""
    facts = [
        {"cpu": {**machine()["cpu"], "native_bf16": able}, "measured": measured, **({"run": run} if run else {})}
        for machine, able, measured in zip((desktop, laptop), native, found)
    ]
    plan = planned({"ddp_matmul": "auto", **settings}, *facts)
    precision = str(plan["training"]["matmul"])
    assert all(f"--matmul={precision}" in node["argv"] for node in plan["nodes"])
    return precision


BEGAN = {"rows": {}, "sync": "exact", "matmul": "fp32"}


@pytest.mark.parametrize(
    ("settings", "native", "run", "found", "precision"),
    [
        ({}, (True, True), None, (FASTER, FASTER), "bf16"),
        ({}, (True, True), None, (SLOWER, SLOWER), "fp32"),
        ({}, (True, True), None, (FASTER, SLOWER), "bf16"),
        ({}, (True, True), None, (with_products(1000.0, 1040.0),) * 2, "fp32"),
        # Until every host has measured both.
        ({}, (True, True), None, (FASTER, None), "fp32"),
        ({}, (True, False), None, (FASTER, FASTER), "fp32"),
        # As the run began, unless a host without the instructions joined.
        ({}, (True, True), BEGAN, (FASTER, FASTER), "fp32"),
        ({"ddp_fresh": True}, (True, True), BEGAN, (FASTER, FASTER), "bf16"),
        ({}, (True, True), {**BEGAN, "matmul": "bf16"}, (SLOWER, SLOWER), "bf16"),
        ({}, (True, False), {**BEGAN, "matmul": "bf16"}, (FASTER, FASTER), "fp32"),
    ],
)
def test_products_are_of_bf16_where_every_cpu_has_instructions_for_it_and_they_are_faster(
    settings, native, run, found, precision
):
    assert products(settings, native, run, found) == precision


def test_a_plan_goes_by_what_was_measured_with_its_own_products():
    """The second host is slow with bf16 alone, so it has fewer rows only where products are of bf16."""
    slow = with_products(1000.0, 400.0)
    for settings, rows in (({}, [3, 1]), ({"ddp_fresh": True, "ddp_matmul": "fp32"}, [2, 2])):
        facts = [
            {"cpu": {**machine()["cpu"], "native_bf16": True}, "measured": found}
            for machine, found in ((desktop, with_products(1000.0, 2600.0)), (laptop, slow))
        ]
        given = {"ddp_matmul": "auto", "ddp_batch_split": "auto", "ddp_total_batch": 2048, "ddp_device_batch": 1}
        assert planned({**given, **settings}, *facts)["training"]["rows"] == rows
    assert with_precision(slow, "bf16")["tokens_per_second"] == 400.0
    assert with_precision({"matmul": "fp32", "tokens_per_second": 1.0}, "bf16") == {}
    # What was measured before this was told.
    assert with_precision({"tokens_per_second": 1.0}, "bf16") == {"tokens_per_second": 1.0}


def test_what_is_to_be_measured_does_not_depend_on_what_was_taken():
    """Or the plan of a run would change with its start, and a step be measured again."""

    def tried(**settings: Any) -> list[str]:
        run = settings.pop("run", None)
        cpu = [{**machine()["cpu"], "native_bf16": True} for machine in (desktop, laptop)]
        facts = [{"cpu": one, "measured": FASTER, **({"run": run} if run else {})} for one in cpu]
        return list(make_plan(hosts(settings, *facts), tolerant=True).plan["training"]["matmul_tried"])

    assert tried() == tried(run={"rows": {}, "matmul": "bf16"}) == ["fp32", "bf16"]
    assert tried(ddp_matmul="bf16") == ["bf16"] and tried(ddp_matmul="fp32") == ["fp32"]
