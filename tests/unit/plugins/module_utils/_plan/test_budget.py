# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The model that fits a time: when that ends, what is taken and why, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import RunSettings
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import budget
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import PlanOutcome, make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    flag,
    hosts,
    planned,
    refusal,
)

NOW = time.mktime((2026, 11, 24, 23, 0, 0, 0, 0, -1))
HOUR = 3600
KEPT = {
    "session": None,
    "checkpoints": [500],
    "total_batch": 65536,
    "iterations": 900,
    "lineage": {"model": {"depth": 6}},
    "training": {"id": "a" * 16, "number": 1, "begun": int(NOW) - HOUR},
}


def run_of(**values: Any) -> RunSettings:
    plain = dict.fromkeys(RunSettings.__dataclass_fields__)
    return RunSettings(**{**plain, **values})


def measured(seconds: float = 0.5, **settings: Any) -> dict[str, Any]:
    """A host that has measured a pass of the real profile's model at depth 8."""
    plan = planned({"ddp_profile": "real", **settings})
    parts = {
        "pass_seconds": seconds,
        "adamw_seconds": seconds / 10,
        "muon_seconds": seconds / 10,
        "tokens_per_second": 2048 / seconds,
    }
    of = {"model": plan["model"], "device_batch": plan["training"]["device_batch"]}
    return {"measured": {**parts, "link": {"mbit": 900.0, "latency_ms": 0.3}, **of}}


def made(time_given: dict[str, Any], *more: dict[str, Any]) -> PlanOutcome:
    facts = list(more) or [measured(), measured()]
    return make_plan(hosts({"ddp_profile": "real", **time_given}, *facts), now=NOW, began=NOW)


@pytest.mark.parametrize(
    ("given", "hours"),
    [
        ({"budget": "90m"}, 1.5), ({"budget": "1d"}, 24), ({"budget": "1h30m"}, 1.5),
        ({"finish_by": "7:30"}, 8.5), ({"finish_by": "23:30"}, 0.5), ({"finish_by": "23:00"}, 24),
        ({"finish_by": "2026-11-26 01:00"}, 26), ({"finish_by": "2026-11-24T22:00"}, -1),
    ],
)  # fmt: skip
def test_budget_counts_from_the_start_and_a_clock_time_is_the_next_one(given: dict[str, str], hours: float):
    assert budget.deadline(run_of(**given), NOW) == NOW + hours * HOUR


def test_a_pass_takes_as_long_as_its_rows_and_depth_and_muon_as_its_matrices():
    def speed(rows: int, **settings: Any) -> Any:
        plan = planned({"ddp_profile": "real", **settings})
        return budget.speed_at(Host("a", None, {}, **measured()), plan["model"], rows)

    (one, twice), deep = (speed(rows) for rows in (2, 4)), speed(2, ddp_depth=16)
    assert (twice.pass_seconds, twice.muon_seconds) == (2 * one.pass_seconds, one.muon_seconds) == (1.0, 0.05)
    # Twice as wide and twice as deep: eight times the matrices, of which each product takes twice as long.
    assert deep.muon_seconds == pytest.approx(16 * one.muon_seconds, rel=0.01)
    assert 5 * one.pass_seconds < deep.pass_seconds < 8 * one.pass_seconds


def test_unmeasured_hosts_promise_nothing():
    outcome = made({"ddp_budget": "8h"}, {}, {})
    assert outcome.plan["model"]["depth"] == 8
    assert outcome.plan["training"]["timed"] == "8h"
    table = budget.render(outcome.budget, outcome.training["ends"])
    assert "not measured" in table
    assert "plans again" in table
    assert " h " not in table


def test_model_that_comes_nearest_to_its_tokens_is_taken():
    depths = [made({"ddp_budget": text}).plan["model"]["depth"] for text in ("12h", "3d", "30d")]
    assert depths == sorted(set(depths))
    outcome = made({"ddp_budget": "3d"})
    choice, taken = outcome.budget, outcome.budget.taken
    shares = {row.run.depth: row.share(choice.seconds) for row in choice.rows}
    assert 0.3 < shares[taken.run.depth] < 3
    assert shares[taken.run.depth - 2] > 1 > shares[taken.run.depth + 2]
    assert outcome.plan["training"]["iterations"] * taken.together == pytest.approx(choice.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "minutes"),
    [({}, 10), ({"ddp_budget": "20m"}, 2), ({"ddp_save_minutes": 7}, 7)],
)
def test_a_long_run_saves_as_often_as_its_profile_and_a_short_one_more_often(asked, minutes):
    assert made({"ddp_budget": "8h", **asked}).plan["training"]["save_minutes"] == minutes


def test_what_somebody_set_stays():
    outcome = made({"ddp_budget": "8h", "ddp_depth": 6, "ddp_total_batch": 8192, "ddp_save_every": 7})
    training = outcome.plan["training"]
    assert (outcome.plan["model"]["depth"], training["total_batch"], training["save_every"]) == (6, 8192, 7)
    fixed = made({"ddp_budget": "8h", "ddp_iterations": 300})
    assert fixed.plan["training"]["iterations"] == 300
    assert "timed" not in fixed.plan["training"]
    assert "ends" not in fixed.training


def test_time_that_setting_up_has_used_is_refused():
    known = hosts({"ddp_profile": "real", "ddp_budget": "10m"}, measured(), measured())
    said = refusal(known, now=NOW + 590, began=NOW)
    assert said[0].startswith("Of 10m 10 s are left now")


def test_short_time_takes_the_smallest_with_enough_steps_of_a_smaller_batch():
    outcome = made({"ddp_budget": "4m"})
    assert outcome.plan["model"]["depth"] == 2
    assert "too short" in budget.render(outcome.budget, outcome.training["ends"])
    training = made({"ddp_budget": "10m"}).plan["training"]
    assert training["iterations"] >= 450 and training["total_batch"] & (training["total_batch"] - 1) == 0
    assert made({"ddp_budget": "30d"}).budget.taken.run.total_batch >= 2**17


def test_host_without_memory_for_a_model_does_not_take_it():
    small = {**measured(), "memory": {"total": 3 * 10**9, "available": 10**9, "limit": None}}
    outcome = made({"ddp_budget": "30d"}, small, measured())
    assert outcome.plan["model"]["depth"] < made({"ddp_budget": "30d"}).plan["model"]["depth"]
    assert "no memory" in budget.render(outcome.budget, outcome.training["ends"])


def test_trainer_is_told_and_the_plan_is_the_same_at_any_time():
    plan = made({"ddp_finish_by": "07:30"}, {}, {}).plan
    assert all(flag(node, "timed") is True for node in plan["nodes"])
    assert plan["run"] == "by-0730"
    later = make_plan(hosts({"ddp_profile": "real", "ddp_finish_by": "07:30"}), now=NOW + 60, began=NOW + 60).plan
    assert later["digest"] == plan["digest"]
    assert "until 07:30, about" in render(plan)
    assert flag(planned({"ddp_profile": "real"})["nodes"][0], "timed") is None


def test_run_that_goes_on_keeps_model_and_end():
    facts = {**measured(), "run": KEPT}
    outcome = made({"ddp_budget": "8h"}, facts, facts)
    training = outcome.plan["training"]
    assert (outcome.plan["model"]["depth"], training["total_batch"], training["iterations"]) == (6, 65536, 900)
    assert outcome.budget is None
    late = NOW + 7 * HOUR
    assert late - 60 < outcome.training["ends"] < late
    # What has been over since is not refused: the run ends with what it has.
    assert made({"ddp_budget": "30m"}, facts, facts).training["ends"] < NOW


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ddp_finish_by": "2026-11-24 22:00"}, "which leaves 0.0 s"),
        ({"ddp_finish_by": "2026-02-30 22:00"}, "not a date and time"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str):
    assert any(said in one for one in refusal(hosts(settings), now=NOW, began=NOW))
