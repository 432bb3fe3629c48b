# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan: what it holds, what it refuses, and that it is the same tomorrow."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import believed_plans
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import undamaged
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import plan_text
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    hosts,
    lan,
    one_machine,
    planned,
    refusal,
)


def test_the_digest_is_of_everything_else_and_stays_the_same():
    plan = planned()
    noisy = hosts()
    for host in noisy:
        host["probe"]["memory"]["available"] -= GIGA
        host["probe"]["disk"]["free"] -= GIGA
        host["probe"]["cpu"]["load1"] = 3.5
        host["probe"]["host"].update(boot_id=host["name"] + "-again", time=1.0)
        host["probe"]["data"] = [{"id": plan["data"]["id"], "bytes": 5}]
        host["probe"]["run"] = {"session": {"id": "abc"}, "checkpoints": [5, 10]}
        host["probe"]["python"]["venv"]["exists"] = True
    assert make_plan(noisy).plan == plan
    assert undamaged(json.loads(plan_text(plan))) == plan


def test_a_wrong_setting_does_not_hide_what_is_wrong_with_a_host():
    problems = refusal(hosts({"ddp_total_batch": 3000, "ddp_head_dim": 63}, {"ddp_rank": 7}, {"tmux": {"path": None}}))
    assert [problem.split()[0] for problem in problems] == ["ddp_head_dim", "ddp_rank", "ddp_total_batch", "laptop"]
    problems = refusal(hosts({"ddp_total_batch": 3000}, two={"tmux": {"path": None}}), tolerant=True)
    assert [problem.split()[0] for problem in problems] == ["ddp_total_batch"]
    assert refusal(hosts({"ddp_depth": "x"}), tolerant=True)


def test_a_login_does_not_change_a_run_that_goes_on():
    seen = {"usage": {"graphical": ["xiaoxin"], "blind": []}}
    for kept, polite in (("off", "off"), (None, "low")):
        run = {"checkpoints": [], "shares": {"laptop": {"rows": 2, "head_share": 1, "cores": None, "polite": kept}}}
        assert planned(two={**seen, "run": run})["nodes"][1]["env"]["NANOCHAT_POLITE"] == polite


def test_no_host_widens_what_the_others_open():
    wide = {"ephemeral": {"low": 1, "high": 65535}}
    plan = planned(two=wide)
    assert [one["data_ports"] for one in plan["nodes"]] == [{"low": 32768, "high": 60999}, {"low": 1024, "high": 65535}]


@pytest.mark.parametrize(
    "run",
    [
        {},
        {"ddp_profile": "real", "ddp_survive_reboot": True},
        {"ddp_profile": "real", "ddp_tracker": "mlflow"},
        {"ddp_secret_env": {"A": "b"}},
    ],
)
@pytest.mark.parametrize("machines", [hosts, functools.partial(one_machine, 2)])
def test_a_plan_of_ours_is_believed_when_a_host_brings_it_back(run, machines):
    plan = json.loads(json.dumps(make_plan(machines(run), tolerant=True).plan))
    assert believed_plans([plan], [node["host"] for node in plan["nodes"]]) == [plan]
    assert believed_plans([plan], ["elsewhere"]) == []


BEGUN = {"rows": {}, "sync": "int8", "checkpoints": [5]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ddp_timeout": 3},
        {"ddp_head_dim": 63},
        {"ddp_total_batch": 2500},
        {"ddp_restarts": 1, "ddp_keeper_port": 29500},
    ],
)
def test_a_refusal_names_what_the_user_wrote_and_not_what_was_kept(wrong):
    """int8, kept from the resumed run, cannot send a model 264 wide."""
    settings = {"ddp_head_dim": 24}
    begun = make_plan(hosts(settings, {"run": BEGUN}, {"run": BEGUN}))
    assert begun.plan["training"]["sync"] == "exact"
    said = " ".join(refusal(hosts({**settings, **wrong}, {"run": BEGUN}, {"run": BEGUN})))
    assert "ddp_sync" not in said and "int8" not in said


def rows(known: list[dict[str, Any]], **measured: dict[str, Any]) -> list[int]:
    return make_plan(known, measured=measured).plan["training"]["rows"]


def test_a_second_plan_goes_by_what_the_rehearsal_measured_and_changes_no_fact():
    known = hosts({"ddp_batch_split": "auto"})
    fast, slow = ({"tokens_per_second": speed} for speed in (900.0, 300.0))
    assert rows(known) == [2, 2]
    assert rows(known, desktop=fast, laptop=slow) == [3, 1]
    # It wins over an earlier measurement that a host kept.
    known[0]["probe"]["measured"], known[1]["probe"]["measured"] = slow, fast
    assert rows(known, desktop=fast, laptop=slow) == [3, 1]


@pytest.mark.parametrize(("count", "least"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_half_of_the_hosts_of_a_real_run_may_be_away_and_come_back_after_a_reboot(count, least):
    plan = make_plan(lan(count, {"ddp_profile": "real"})).plan
    assert plan["keeper"] == {"restarts": 3, "min_hosts": least, "grace_seconds": 30, "survive_reboot": True}
    assert f"any {count - least} of {count} hosts may be away; losing one repeats" in render(plan) or count < 3


@pytest.mark.parametrize("settings", [{"ddp_restarts": 0}, {"ddp_resume": False}])
def test_without_keepers_a_real_run_needs_all_its_hosts(settings):
    outcome = make_plan(hosts({"ddp_profile": "real", **settings}), tolerant=True)
    assert "keeper" not in outcome.plan
    repeats = "up to 250 steps or 10 minutes" if outcome.plan["training"]["save_minutes"] else "up to 250 steps"
    repeats = repeats if outcome.plan["training"]["resume"] else "all steps"
    assert f"no host may be away: the run ends; a restart repeats {repeats}\n" in render(outcome.plan)
