# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ddp_sync auto in a plan follows the measurements, or the value that the run started with."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.matmul_precision import speeds_together, with_precision
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import subject
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    desktop,
    flag,
    hosts,
    laptop,
    planned,
)

# What rounds most of all that auto may take.
LAST = list(WAYS)[-1]
AUTO = {"ddp_sync": "auto"}


def measured(mbit: float, **settings: Any) -> dict[str, Any]:
    """The measurements that a rehearsal with these settings leaves on a host."""
    plan = planned({**AUTO, **settings})
    training = plan["training"]
    return {
        "tokens_per_second": 2000.0,
        "pass_seconds": 0.5,
        "adamw_seconds": 0.02,
        "muon_seconds": 0.1,
        "link": {"mbit": mbit, "latency_ms": 0.3},
        "subject": subject(plan["model"], training["device_batch"]),
    }


def taken(settings: dict[str, Any], one: Any = None, two: Any = None, run: Any = None) -> str:
    """The plan's way, which is also the one that the ranks are started with."""
    facts = [{"measured": found, **({"run": run} if run else {})} for found in (one, two)]
    plan = planned({**AUTO, **settings}, *facts)
    way = str(plan["training"]["sync"])
    assert all(f"--sync={way}" in node["argv"] for node in plan["nodes"])
    assert plan["training"]["asked"]["sync"] == settings.get("ddp_sync", "auto")
    return way


def test_auto_is_the_default():
    assert planned()["training"]["asked"] == {"sync": "auto", "head": "auto"}


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


REAL = {"ddp_profile": "real", "ddp_sync": "exact"}


@pytest.mark.parametrize("mbit", [None, 1000.0, 9400.0])
def test_the_hosts_that_the_profile_allows_to_be_away_leave_the_head_as_it_was(mbit):
    """A real run may go on without a host, and no step gets slower by that."""
    plans = []
    for settings in (REAL, {**REAL, "ddp_min_hosts": 0}):
        facts = {"measured": measured(mbit, **settings)} if mbit else {}
        plans.append(planned(settings, facts, facts))
    heads = [plan["training"]["head"] for plan in plans]
    assert heads == ["shared", "shared"]
    assert [plan["keeper"]["min_hosts"] for plan in plans] == [1, 2]
    cost = "losing one repeats up to 250 steps or 10 minutes (with ddp_head whole: a step or two)\n"
    assert f"{EITHER}; {cost}" in render(plans[0]) and f"{NOBODY}; {cost}" in render(plans[1])


def test_before_anything_was_measured_auto_is_exact():
    assert taken({}) == "exact"
    # One host alone says nothing of a link, nor does what was measured of another model.
    assert taken({}, measured(3.0)) == "exact"
    other = measured(3.0, ddp_depth=8)
    assert taken({}, other, other) == "exact"


def test_what_was_measured_decides():
    assert taken({}, measured(9400.0), measured(9400.0)) == "exact"
    assert taken({}, measured(3.0), measured(3.0)) == LAST
    # The slower direction counts.
    assert taken({}, measured(9400.0), measured(3.0)) == LAST


def test_a_way_that_is_set_stays():
    for way in ("bf16", "exact"):
        assert taken({"ddp_sync": way}, measured(3.0), measured(3.0)) == way


def test_a_run_keeps_the_way_that_it_began_with():
    run = {"rows": {}, "sync": "bf16", "checkpoints": [5]}
    assert taken({}, measured(3.0), measured(3.0), run) == "bf16"
    assert taken({"ddp_sync": "int8"}, measured(3.0), measured(3.0), run) == "int8"
    assert taken({"ddp_fresh": True}, measured(3.0), measured(3.0), run) == LAST
    assert taken({}, measured(3.0), measured(3.0), {"rows": {}, "sync": "nonsense"}) == LAST


def test_a_kept_way_that_the_settings_rule_out_is_dropped_and_never_refused():
    # A model 264 wide cannot be packed.
    assert taken({"ddp_head_dim": 24}, run={"rows": {}, "sync": "int8", "checkpoints": [5]}) == "exact"


CHECKOUT = {"ddp_trainer_source": "/home/me/nanochat"}


def test_auto_is_exact_where_there_is_no_choice():
    for facts in ({"measured": measured(3.0)}, {"run": {"rows": {}, "sync": "int8"}}):
        plan = make_plan(hosts({**AUTO, **CHECKOUT}, facts, facts), tolerant=True).plan
        assert plan["training"]["sync"] == "exact"


def test_the_same_job_has_the_same_plan_after_its_start():
    found = measured(3.0)
    first = planned(AUTO, {"measured": found}, {"measured": found})
    run = {"rows": {}, "sync": first["training"]["sync"]}
    slower = {**found, "link": {"mbit": 9400.0, "latency_ms": 0.1}}
    again = planned(AUTO, {"measured": slower, "run": run}, {"measured": slower, "run": run})
    assert again["digest"] == first["digest"]


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
    is_ours = plan["trainer"]["source"] == "ours"
    assert not is_ours or all(f"--matmul={precision}" in node["argv"] for node in plan["nodes"])
    return precision


def test_products_are_of_bf16_where_every_cpu_has_instructions_for_it_and_they_are_faster():
    assert products({}, (True, True)) == "bf16"
    assert products({}, (True, True), found=(SLOWER, SLOWER)) == "fp32"
    assert products({}, (True, True), found=(FASTER, SLOWER)) == "bf16"
    assert products({}, (True, True), found=(with_products(1000.0, 1040.0),) * 2) == "fp32"
    # Until every host has measured both.
    assert products({}, (True, True), found=(FASTER, None)) == "fp32"
    assert products({}, (True, True), found=(FASTER, {"tokens_per_second": 9000.0, "matmul": "fp32"})) == "fp32"
    assert products({}, (True, False)) == "fp32"
    assert products({"ddp_matmul": "fp32"}, (True, True)) == "fp32"
    assert products({"ddp_trainer_source": "/home/me/nanochat"}, (True, True)) == "fp32"


def test_a_run_keeps_the_products_that_it_began_with():
    began = {"rows": {}, "sync": "exact", "matmul": "fp32"}
    assert products({}, (True, True), began) == "fp32"
    assert products({"ddp_fresh": True}, (True, True), began) == "bf16"
    assert products({}, (True, True), {**began, "matmul": "bf16"}) == "bf16"
    # A host without the instructions joined.
    assert products({}, (True, False), {**began, "matmul": "bf16"}) == "fp32"


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


def test_a_file_that_holds_anything_tells_of_no_products():
    for spoilt in (None, {}, {"products": []}, {"products": {"bf16": 3, "fp32": {"tokens_per_second": "x"}}}):
        assert speeds_together([spoilt, FASTER]) == {}
        assert with_precision({**(spoilt or {}), "matmul": "fp32"}, "bf16") == {}


def test_what_is_to_be_measured_does_not_depend_on_what_was_taken():
    """Or the plan of a run would change with its start, and a step be measured again."""

    def tried(**settings: Any) -> list[str]:
        run = settings.pop("run", None)
        cpu = [{**machine()["cpu"], "native_bf16": True} for machine in (desktop, laptop)]
        facts = [{"cpu": one, "measured": FASTER, **({"run": run} if run else {})} for one in cpu]
        return list(make_plan(hosts(settings, *facts), tolerant=True).plan["training"]["matmul_tried"])

    assert tried() == tried(run={"rows": {}, "matmul": "bf16"}) == ["fp32", "bf16"]
    assert tried(ddp_matmul="bf16") == ["bf16"] and tried(ddp_matmul="fp32") == ["fp32"]


def test_the_head_is_shared_out_where_that_sends_less():
    def heads(**settings):
        training = planned(settings)
        return training["training"]["head"], flag(training["nodes"][0], "head")

    assert heads() == ("shared", "shared")
    assert heads(ddp_head="whole") == ("whole", "whole")
    # More tokens in a step than there are in the vocabulary of the trial.
    assert heads(ddp_total_batch=8192) == ("whole", "whole")
    assert heads(ddp_total_batch=8192, ddp_head="shared") == ("shared", "shared")
    assert "sync exact (auto), head shared" in render(planned())
