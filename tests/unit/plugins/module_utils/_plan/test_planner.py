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


def test_who_only_looks_is_told_what_no_plan_can_do_without():
    problems = refusal(hosts({"ddp_total_batch": 3000}, two={"tmux": {"path": None}}), tolerant=True)
    assert [problem.split()[0] for problem in problems] == ["ddp_total_batch"]
    assert refusal(hosts({"ddp_depth": "x"}), tolerant=True)


def test_a_text_that_grows_and_field_36_a_python_that_was_made_leave_the_plan_as_it_was():
    known = hosts({"ddp_data_paths": ["/books"]})
    known[1]["probe"]["python"].update(candidates=[], version="3.9.2")
    books = {"kind": "folder", "readable": True, "shards": 0, "tokenizer": False, "text_bytes": 200_000}
    known[0]["probe"]["folders"] = {"/books": books}
    first = make_plan(known).plan
    books["text_bytes"] = 7
    made = {"executable": "/home/xiaoxin/nanochat-ddp/python/current/bin/python3", "version": "3.12.9"}
    known[1]["probe"]["python"]["candidates"] = [made]
    assert make_plan(known).plan == first and first["nodes"][1]["python"] == made["executable"]


def test_what_is_to_be_measured_does_not_depend_on_what_was_taken():
    """Or the plan of a run would change with its start, and a step be measured again."""

    def tried(run: Any = None, **settings: Any) -> list[str]:
        known = hosts(settings, {"run": run}, {"run": run})
        for host in known:
            host["probe"]["cpu"]["native_bf16"] = True
            host["probe"]["measured"] = {
                "matmul": "fp32",
                "tokens_per_second": 1000.0,
                "products": {
                    name: {"tokens_per_second": speed, "matmul": name}
                    for name, speed in (("fp32", 1000.0), ("bf16", 1600.0))
                },
            }
        return list(make_plan(known, tolerant=True).plan["training"]["matmul_tried"])

    assert tried() == tried({"rows": {}, "matmul": "bf16"}) == ["fp32", "bf16"]
    assert tried(ddp_matmul="bf16") == ["bf16"] and tried(ddp_matmul="fp32") == ["fp32"]


@pytest.mark.parametrize(("count", "least"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_half_of_the_hosts_of_a_real_run_may_be_away_and_come_back_after_a_reboot(count, least):
    plan = make_plan(lan(count, {"ddp_profile": "real"})).plan
    assert plan["keeper"] == {"restarts": 3, "min_hosts": least, "grace_seconds": 30, "survive_reboot": True}
    assert f"any {count - least} of {count} hosts may be away; losing one repeats" in render(plan) or count < 2
