# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan: what it holds, what it refuses, and that it is the same tomorrow."""

from __future__ import annotations

import functools
import json

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import believed_plans
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import undamaged
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import plan_text
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    hosts,
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
        host["probe"]["data"] = [{"id": plan["data"]["id"], "shards": 3, "bytes": 5}]
        host["probe"]["run"] = {"exists": True, "session": {"id": "abc"}, "checkpoints": [5, 10]}
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


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({}, "which needs keepers to leave and come back by; set ddp_restarts"),
        ({"ddp_restarts": 3, "ddp_resume": False}, "which needs ddp_resume"),
    ],
)
def test_a_guest_that_could_not_leave_is_refused(run, words):
    assert f"ddp_polite is guest on laptop, {words}" in " ".join(refusal(hosts(run, two={"ddp_polite": "guest"})))


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
        {"ddp_trainer_source": "https://example.org/nanochat.git"},
    ],
)
@pytest.mark.parametrize("machines", [hosts, functools.partial(one_machine, 2)])
def test_a_plan_of_ours_is_believed_when_a_host_brings_it_back(run, machines):
    plan = json.loads(json.dumps(make_plan(machines(run), tolerant=True).plan))
    assert believed_plans([plan], [node["host"] for node in plan["nodes"]]) == [plan]
    assert believed_plans([plan], ["elsewhere"]) == []
