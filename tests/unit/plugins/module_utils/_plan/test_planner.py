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
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import plan_text
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    hosts,
    lan,
    node,
    one_machine,
    planned,
    refusal,
)


def test_the_two_machines_at_home():
    outcome = make_plan(hosts())
    plan = outcome.plan
    assert outcome.findings == []
    assert plan["master"] == {"host": "desktop", "address": "192.168.1.10", "port": 29500}
    assert (plan["world"], plan["run"]) == (2, "d4")
    one, two = plan["nodes"]
    assert (one["nic"], one["address"], one["threads"], one["user"]) == ("enp4s0", "192.168.1.10", 8, "lzw")
    own = ("enx00e04c680001", "192.168.1.11", 4, "xiaoxin")
    assert (two["nic"], two["address"], two["threads"], two["user"]) == own
    assert (one["peers"], two["peers"]) == (["192.168.1.11"], ["192.168.1.10"])
    assert two["run_dir"] == "/home/xiaoxin/nanochat-ddp/runs/d4"
    assert two["session"] == "nanochat-d4-rank1"
    assert plan["trainer"]["packages"] == ["trainer"]


def test_what_a_setting_needs_is_installed_like_the_trainer_s_packages():
    assert planned({"ddp_kernels": "zig"})["trainer"]["packages"] == ["trainer", "zig"]
    assert planned({"ddp_tracker": "wandb"})["trainer"]["packages"] == ["trainer", "wandb"]


def test_field_10_a_gpu_does_not_change_a_run_on_the_cpu():
    outcome = make_plan(hosts())
    assert node(outcome, "desktop")["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert node(outcome, "desktop")["env"]["NANOCHAT_DTYPE"] == "float32"


def test_one_host_alone_is_a_world_of_its_own():
    outcome = make_plan(hosts()[:1])
    assert outcome.plan["world"] == 1
    assert outcome.plan["nodes"][0]["rows"] == 4


def test_the_first_field_run_has_the_counts_of_its_profile():
    plan = planned({"ddp_profile": "real"})
    assert plan["model"]["parameters"]["total"] == 125829354
    assert plan["training"]["tokens"] == 20_480_000
    assert plan["training"]["flops"] == pytest.approx(5.6e15, rel=0.01)
    assert plan["training"]["tokens_per_parameter"] == pytest.approx(0.16, abs=0.005)
    assert plan["data"]["names"][-2:] == ["shard_00006.parquet", "shard_06542.parquet"]
    assert len(plan["data"]["names"]) == 8


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


@pytest.mark.parametrize(
    "change", [{"ddp_depth": 5}, {"ddp_port": 29501}, {"ddp_extra_env": {"A": "1"}}, {"ddp_torch": "2.12.0"}]
)
def test_the_digest_changes_with_the_settings(change):
    assert planned(change)["digest"] != planned()["digest"]


def test_what_only_the_controller_does_is_no_part_of_the_plan():
    outcome = make_plan(hosts({"ddp_watch": False, "ddp_results_dir": "elsewhere"}))
    assert outcome.plan == planned()
    assert outcome.controller["watch"] is False and outcome.controller["results_dir"] == "elsewhere"


def test_all_problems_of_all_hosts_are_told_at_once():
    small = {"total": GIGA // 2, "available": 0}
    with pytest.raises(PlanError) as caught:
        make_plan(hosts({}, {"tmux": {"path": None}}, {"ddp_nic": "eth7", "memory": small}))
    assert [(found["code"], found["host"]) for found in caught.value.findings] == [
        ("address-refused", "laptop"),
        ("no-tmux", "desktop"),
        ("memory-short", "laptop"),
    ]
    assert str(caught.value).startswith("3 problems; nothing was changed:\n- ddp_nic is eth7 on laptop")


def test_a_wrong_setting_does_not_hide_what_is_wrong_with_a_host():
    problems = refusal(hosts({"ddp_total_batch": 3000, "ddp_head_dim": 63}, {"ddp_rank": 7}, {"tmux": {"path": None}}))
    assert [problem.split()[0] for problem in problems] == ["ddp_head_dim", "ddp_rank", "ddp_total_batch", "laptop"]
    problems = refusal(hosts({"ddp_total_batch": 3000}, two={"tmux": {"path": None}}), tolerant=True)
    assert [problem.split()[0] for problem in problems] == ["ddp_total_batch"]
    assert refusal(hosts({"ddp_depth": "x"}), tolerant=True)


def test_a_head_that_is_not_shared_out_takes_more_memory():
    shared, whole = (
        node(make_plan(hosts({"ddp_head": head, "ddp_vocab_size": 32768})), "laptop")["memory_bytes"]
        for head in ("shared", "whole")
    )
    assert whole > shared


def test_ten_hosts_of_a_lab():
    plan = make_plan(lan(10, {"ddp_total_batch": 20480})).plan
    assert plan["data_ports"] == {"low": 32768, "high": 60999}
    assert [entry["rank"] for entry in plan["nodes"]] == list(range(10))
    assert all(len(entry["peers"]) == 9 for entry in plan["nodes"])


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
