# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan: what it holds, what it refuses, and that it is the same tomorrow."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import undamaged
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import sentence
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.membership import Generation
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.rank import command
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import quicker
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import Outcome, make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import PlanError, questions
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render, render_findings
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import plan_text
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    desktop,
    hosts,
    lan,
    laptop,
    nic,
    one_machine,
    probe,
    route,
)


def refusal(known: list[dict[str, Any]], **options: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        make_plan(known, **options)
    return [sentence(found) for found in caught.value.findings]


def codes(outcome: Outcome) -> list[tuple[str, str]]:
    return [(found["code"], found["host"]) for found in outcome.findings]


def flag(node: dict[str, Any], name: str) -> str | None:
    return next((word.partition("=")[2] for word in node["argv"] if word.startswith(f"--{name}=")), None)


def node(outcome: Outcome, name: str) -> dict[str, Any]:
    return next(entry for entry in outcome.plan["nodes"] if entry["host"] == name)  # type: ignore[misc]


# What it holds


def test_the_two_machines_at_home():
    outcome = make_plan(hosts(), ["torch==2.13.0", "numpy==2.4.6"])
    plan = outcome.plan
    assert outcome.findings == []
    assert plan["master"] == {"host": "desktop", "address": "192.168.1.10", "port": 29500}
    assert (plan["world"], plan["run"]) == (2, "d4")
    one, two = plan["nodes"]
    assert (one["nic"], one["address"], one["threads"], one["user"]) == ("enp4s0", "192.168.1.10", 8, "lzw")
    assert (two["nic"], two["address"], two["threads"], two["user"]) == (
        "enx00e04c680001",
        "192.168.1.11",
        4,
        "xiaoxin",
    )
    assert (one["peers"], two["peers"]) == (["192.168.1.11"], ["192.168.1.10"])
    assert two["run_dir"] == "/home/xiaoxin/nanochat-ddp/runs/d4"
    assert two["session"] == "nanochat-d4-rank1"
    assert plan["trainer"]["requirements"] == ["torch==2.13.0", "numpy==2.4.6"]


def test_the_command_is_complete():
    one, two = make_plan(hosts()).plan["nodes"]
    assert one["argv"][:3] == ["/home/lzw/nanochat-ddp/venv/bin/python", "-m", "scripts.torchrun"]
    assert one["argv"][one["argv"].index("scripts.base_train") - 1] == "-m"
    assert (flag(one, "node-rank"), flag(two, "node-rank")) == ("0", "1")
    assert flag(one, "master-addr") == flag(two, "master-addr") == "192.168.1.10"
    assert flag(one, "total-batch-size") == "2048" and flag(one, "timeout-seconds") == "300"
    assert "--resume" in one["argv"] and flag(one, "rank-rows") is None
    assert all(isinstance(word, str) for word in one["argv"])


def test_field_08_both_environments_name_the_same_variables():
    one, two = make_plan(hosts({"ddp_extra_env": {"MALLOC_ARENA_MAX": 2}})).plan["nodes"]
    assert list(one["env"]) == list(two["env"])
    assert one["env"]["NANOCHAT_DATA_DIR"] == "/home/lzw/nanochat-ddp/runs/d4/data"
    assert two["env"]["NANOCHAT_BASE_DIR"] == "/home/xiaoxin/nanochat-ddp/runs/d4"
    assert one["env"]["MALLOC_ARENA_MAX"] == "2"
    assert all(isinstance(value, str) for value in one["env"].values())


def test_field_09_the_ranks_differ_only_in_what_is_their_own():
    one, two = make_plan(hosts()).plan["nodes"]
    own = ("--node-rank", "--local-addr", "--run-dir")
    assert [w for w in one["argv"][1:] if not w.startswith(own)] == [
        w for w in two["argv"][1:] if not w.startswith(own)
    ]


def test_field_10_a_gpu_does_not_change_a_run_on_the_cpu():
    card = [{"model": "NVIDIA GeForce RTX 3060"}]
    outcome = make_plan(hosts(one={"gpus": card}))
    assert {(entry["device"], entry["dtype"]) for entry in outcome.plan["nodes"]} == {("cpu", "float32")}
    assert node(outcome, "desktop")["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert node(outcome, "desktop")["env"]["NANOCHAT_DTYPE"] == "float32"


def test_gpus_are_taken_when_asked_for_and_there():
    card = {"gpus": [{"model": "NVIDIA"}]}
    outcome = make_plan(hosts({"ddp_device": "auto"}, card, card))
    assert {(entry["device"], entry["dtype"]) for entry in outcome.plan["nodes"]} == {("cuda", "bfloat16")}
    assert "CUDA_VISIBLE_DEVICES" not in outcome.plan["nodes"][0]["env"]
    assert make_plan(hosts({"ddp_device": "auto"}, card)).plan["nodes"][0]["device"] == "cpu"
    assert "ddp_device is cuda, but laptop has no NVIDIA GPU" in refusal(hosts({"ddp_device": "cuda"}, card))[0]


def test_two_nodes_on_one_machine_use_loopback_and_share_the_cores():
    outcome = make_plan(one_machine())
    assert [(entry["nic"], entry["address"], entry["threads"]) for entry in outcome.plan["nodes"]] == [
        ("lo", "127.0.0.1", 4)
    ] * 2
    assert all(entry["env"]["GLOO_SOCKET_IFNAME"] == "lo" and entry["peers"] == [] for entry in outcome.plan["nodes"])


def test_one_host_alone_is_a_world_of_its_own():
    outcome = make_plan(hosts()[:1])
    assert outcome.plan["world"] == 1
    assert outcome.plan["nodes"][0]["rows"] == 4


def test_a_rank_that_is_given_decides_the_master():
    outcome = make_plan(hosts(two={"ddp_rank": 0}))
    assert outcome.plan["master"]["host"] == "laptop"
    assert [(entry["host"], entry["rank"]) for entry in outcome.plan["nodes"]] == [("laptop", 0), ("desktop", 1)]


def test_the_first_field_run_has_the_counts_of_its_profile():
    plan = make_plan(hosts({"ddp_profile": "real"})).plan
    assert plan["model"]["parameters"]["total"] == 125829354
    assert plan["training"]["tokens"] == 20_480_000
    assert plan["training"]["flops"] == pytest.approx(5.6e15, rel=0.01)
    assert plan["training"]["tokens_per_parameter"] == pytest.approx(0.16, abs=0.005)
    assert plan["data"]["names"][-2:] == ["shard_00006.parquet", "shard_06542.parquet"]
    assert len(plan["data"]["names"]) == 8


def test_field_17_rows_follow_threads_or_speed():
    split = {"ddp_total_batch": 6144, "ddp_batch_split": "threads"}
    outcome = make_plan(hosts(split))
    assert [entry["rows"] for entry in outcome.plan["nodes"]] == [8, 4]
    assert [entry["accumulation"] for entry in outcome.plan["nodes"]] == [1, 1]
    assert {flag(entry, "rank-rows") for entry in outcome.plan["nodes"]} == {"8,4"}
    speeds = {"ddp_total_batch": 8192, "ddp_batch_split": "speed"}
    measured = make_plan(
        hosts(speeds, {"measured": {"tokens_per_second": 900}}, {"measured": {"tokens_per_second": 300}})
    )
    assert measured.plan["training"]["rows"] == [12, 4]
    told = make_plan(hosts(speeds, {"ddp_speed": 1, "measured": {"tokens_per_second": 900}}, {"ddp_speed": 1}))
    assert told.plan["training"]["rows"] == [8, 8]
    assert ("speed-unknown", "") in codes(make_plan(hosts(speeds)))
    assert "of laptop no speed is known" in refusal(hosts(speeds, {"ddp_speed": 2}))[0]


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


def test_field_34_unequal_hosts_share_by_their_measured_speed_with_nothing_set():
    outcome = make_plan(lan(2, speeds=(900.0, 300.0)))
    assert (outcome.plan["training"]["rows"], outcome.plan["training"]["device_batch"]) == ([3, 1], 3)
    assert [entry["accumulation"] for entry in outcome.plan["nodes"]] == [1, 1]
    # Parts of the head are finer than rows.
    assert outcome.plan["training"]["head_shares"] == [750, 250]
    assert flag(outcome.plan["nodes"][0], "head-shares") == "750,250"
    assert "--rebalance" in outcome.plan["nodes"][0]["argv"]
    assert flag(outcome.plan["nodes"][0], "rank-rows") == "3,1"
    assert flag(outcome.plan["nodes"][0], "device-batch-size") == "3"
    [said] = [found for found in outcome.findings if found["code"] == "batch-adapted"]
    assert said["seen"] == "for 2 hosts ddp_device_batch 3 (the profile has 2): rows 3, 1"
    # Alike, or measured beside each other on one machine.
    assert make_plan(lan(2, speeds=(900.0, 850.0))).plan["training"]["rows"] == [2, 2]
    beside = one_machine()
    beside[0]["probe"]["measured"], beside[1]["probe"]["measured"] = {"tokens_per_second": 9}, {"tokens_per_second": 2}
    assert make_plan(beside).plan["training"]["rows"] == [2, 2]
    told = make_plan(lan(2, {"ddp_device_batch": 2}, (900.0, 300.0))).plan["training"]
    assert (told["rows"], told["device_batch"]) == ([3, 1], 2)


SETS = [{"name": "fast cores", "cpus": [0, 2]}, {"name": "all cores", "cpus": [0, 2, 4, 5]}]


def on_hybrid(**changes: Any) -> list[dict[str, Any]]:
    """Two hosts, the first with cores of two kinds."""
    known = lan(2)
    known[0]["settings"].update({key: value for key, value in changes.items() if key.startswith("ddp_")})
    known[0]["probe"]["cpu"].update(sets=SETS, allowed=[0, 1, 2, 3, 4, 5])
    known[0]["probe"].update({key: value for key, value in changes.items() if not key.startswith("ddp_")})
    return known


def test_field_33_the_processors_that_were_measured_fastest_are_taken():
    before = make_plan(on_hybrid()).plan["nodes"][0]
    assert (before["threads"], before["cores"], before["core_sets"]) == (2, None, SETS)
    assert "NANOCHAT_CORES" not in before["env"]
    measured = make_plan(on_hybrid(measured={"tokens_per_second": 9, "cores": [0, 2, 4, 5]})).plan["nodes"][0]
    assert (measured["threads"], measured["cores"]) == (4, [0, 2, 4, 5])
    assert (measured["env"]["NANOCHAT_CORES"], measured["env"]["OMP_NUM_THREADS"]) == ("0,2,4,5", "4")
    elsewhere = make_plan(on_hybrid(measured={"cores": [7]})).plan["nodes"][
        0
    ]  # of another machine, or before an upgrade
    assert elsewhere["cores"] is None


def test_field_33_settings_win_over_what_was_measured():
    fast = {"tokens_per_second": 9, "cores": [0, 2]}
    told = make_plan(on_hybrid(measured=fast, ddp_cores="0-1,4")).plan["nodes"][0]
    assert (told["threads"], told["cores"], told["core_sets"]) == (3, [0, 1, 4], [])
    threads = make_plan(on_hybrid(measured=fast, ddp_threads=5)).plan["nodes"][0]
    assert (threads["threads"], threads["cores"], threads["core_sets"]) == (5, None, [])
    assert "ddp_cores of h0 names processor 6, which its user may not use" in refusal(on_hybrid(ddp_cores="0,6"))[0]


def test_field_33_a_run_keeps_its_processors():
    rows = {"h0": 2, "h1": 2}
    run = {"exists": True, "session": None, "checkpoints": [5], "rows": rows, "cores": {"h0": [0, 2]}}
    later = {"measured": {"tokens_per_second": 9, "cores": [0, 2, 4, 5]}}
    assert make_plan(on_hybrid(run=run, **later)).plan["nodes"][0]["cores"] == [0, 2]
    assert make_plan(on_hybrid(run={**run, "cores": {}}, **later)).plan["nodes"][0]["cores"] is None


def test_another_trainer_shares_equally_by_itself():
    outcome = make_plan(hosts({"ddp_trainer_source": "/home/me/nanochat"}, {"ddp_speed": 3}, {"ddp_speed": 1}))
    assert outcome.plan["training"]["rows"] == [2, 2]


def test_field_17_a_run_keeps_its_shares_whatever_is_measured_later():
    split = {"ddp_total_batch": 8192, "ddp_batch_split": "speed"}
    before = {"exists": True, "session": None, "checkpoints": [5], "rows": {"desktop": 10, "laptop": 6}}
    fast = {"run": before, "measured": {"tokens_per_second": 900}}
    slow = {"run": before, "measured": {"tokens_per_second": 300}}
    assert make_plan(hosts(split, fast, slow)).plan["training"]["rows"] == [10, 6]
    # Unless it is started anew, other speeds are given, the shares no longer fit, or the hosts are others.
    for change in ({"ddp_fresh": True}, {"ddp_total_batch": 16384}):
        assert make_plan(hosts({**split, **change}, fast, slow)).plan["training"]["rows"] not in ([10, 6], [6, 10])
    assert make_plan(hosts(split, {**fast, "ddp_speed": 1}, {**slow, "ddp_speed": 1})).plan["training"]["rows"] == [
        8,
        8,
    ]
    torn = {**fast, "run": {**before, "rows": {}}}
    assert make_plan(hosts(split, torn, slow)).plan["training"]["rows"] == [12, 4]


def test_a_run_keeps_its_parts_of_the_head_and_rebalancing_can_be_switched_off():
    shares = {"rows": {"desktop": 10, "laptop": 6}, "head_shares": {"desktop": 600, "laptop": 400}}
    before = {"exists": True, "session": None, "checkpoints": [5], **shares}
    each = [{"run": before, "measured": {"tokens_per_second": speed}} for speed in (900, 300)]
    split = {"ddp_total_batch": 8192, "ddp_head": "shared"}
    assert make_plan(hosts(split, *each)).plan["training"]["head_shares"] == [600, 400]
    assert make_plan(hosts({**split, "ddp_fresh": True}, *each)).plan["training"]["head_shares"] == [750, 250]
    assert "head_shares" not in make_plan(hosts({**split, "ddp_head": "whole"}, *each)).plan["training"]
    off = (
        {"ddp_rebalance": False},
        {"ddp_batch_split": "equal"},
        {"ddp_batch_split": "threads"},
        {"ddp_local_steps": 2},
    )
    for settings in off:
        assert "--rebalance" not in make_plan(hosts(settings)).plan["nodes"][0]["argv"]


def test_rows_go_with_the_rank_and_not_with_the_place_in_the_inventory():
    outcome = make_plan(hosts({"ddp_total_batch": 6144, "ddp_batch_split": "threads"}, two={"ddp_rank": 0}))
    assert [(entry["host"], entry["rows"]) for entry in outcome.plan["nodes"]] == [("laptop", 4), ("desktop", 8)]
    assert flag(outcome.plan["nodes"][0], "rank-rows") == "4,8"


def test_somebody_elses_trainer_gets_only_the_flags_that_it_knows():
    apart = {"ddp_trainer_source": "https://github.com/karpathy/nanochat.git", "ddp_trainer_join": False}
    outcome = make_plan(hosts(apart))
    words = {word.split("=")[0] for word in outcome.plan["nodes"][0]["argv"]}
    assert not words & {"--sync", "--matmul", "--rank-rows", "--run-dir", "--timeout-seconds", "--resume", "--tracker"}
    assert flag(outcome.plan["nodes"][0], "run") == "dummy"
    assert outcome.plan["trainer"]["source"] == "git" and outcome.plan["training"]["sync"] == "upstream"
    assert make_plan(hosts({"ddp_trainer_source": "/home/me/nanochat"})).plan["trainer"]["source"] == "path"
    problems = refusal(
        hosts(
            {**apart, "ddp_batch_split": "threads", "ddp_sync": "bf16", "ddp_matmul": "bf16", "ddp_tracker": "mlflow"}
        )
    )
    assert len(problems) == 5 and "only this collection's own trainer knows" in problems[0]


def test_field_21_the_ranks_of_a_checkout_are_joined():
    plan = make_plan(hosts({"ddp_trainer_source": "/home/me/nanochat", "ddp_sync": "bf16"})).plan
    words = plan["nodes"][1]["argv"]
    tools = "/home/xiaoxin/nanochat-ddp/tools/scripts"
    at = words.index(f"{tools}/join.py")
    assert words[:2] == ["/home/xiaoxin/nanochat-ddp/venv/bin/python", f"{tools}/torchrun.py"]
    end = words.index("scripts.base_train")
    assert words[at + 1 : end] == [
        "--",
        "--run-dir=/home/xiaoxin/nanochat-ddp/runs/d4",
        "--timeout-seconds=300",
        "--sync=bf16",
        "--keep-checkpoints=2",
        "--resume",
    ]
    assert not {word.split("=")[0] for word in words[end:]} & {"--sync", "--run-dir", "--resume", "--head"}
    assert all(re.search("[=<]", one) for one in plan["trainer"]["requirements"])
    assert plan["trainer"]["joined"] and plan["training"]["resume"] and plan["training"]["sync"] == "bf16"
    assert "nanochat of /home/me/nanochat, unchanged; its ranks are joined to train one model" in render(plan)
    packed = make_plan(hosts({"ddp_trainer_source": "/home/me/nanochat", "ddp_sync": "int8"})).plan
    assert "--sync=int8" in packed["nodes"][0]["argv"]
    assert packed["nodes"][0]["memory_bytes"] > plan["nodes"][0]["memory_bytes"]
    problems = refusal(hosts({"ddp_trainer_source": "/home/me/nanochat", "ddp_sync": "int4"}))
    assert len(problems) == 1 and "it must be exact or bf16 or int8 or dense" in problems[0]
    with_mlflow = make_plan(hosts({"ddp_trainer_source": "/home/me/nanochat", "ddp_tracker": "mlflow"})).plan
    assert flag(with_mlflow["nodes"][0], "tracker-uri") == "http://127.0.0.1:5000"
    on_cards = {"ddp_trainer_source": "/home/me/nanochat", "ddp_device": "cuda"}
    plan = make_plan(hosts(on_cards, {"gpus": [{"model": "x"}]}, {"gpus": [{"model": "x"}]})).plan
    assert "joined" not in plan["trainer"] and "torch.distributed.run" in plan["nodes"][0]["argv"]


def test_a_checkout_of_other_calls_is_refused_before_anything_starts():
    here = {
        "folders": {"/home/me/nanochat": {"path": "/home/me/nanochat", "kind": "folder", "trainer": True}},
        "checkout": {
            "script": ["has a scripts/base_train.py that knows no --depth"],
            "join": ["has no save_checkpoint"],
        },
    }
    settings = {"ddp_trainer_source": "/home/me/nanochat"}
    problems = refusal(hosts(settings), here=here)
    assert len(problems) == 2 and "knows no --depth; a commit of nanochat that has them" in problems[0]
    assert (
        "has no save_checkpoint, so its ranks cannot be joined; take another commit, or ddp_trainer_join=false"
        in problems[1]
    )
    assert len(refusal(hosts({**settings, "ddp_trainer_join": False}), here=here)) == 1


def test_field_25_local_steps_reach_the_trainer_and_the_plan_says_so():
    outcome = make_plan(hosts({"ddp_local_steps": 10, "ddp_iterations": 500, "ddp_save_every": 50}))
    assert flag(outcome.plan["nodes"][0], "local-steps") == "10"
    assert flag(outcome.plan["nodes"][0], "local-overlap") == "5"
    told = "sync exact (auto) every 10 steps (the mean travels behind the next 5), apart in between"
    assert told in render(outcome.plan)
    often = make_plan(hosts({"ddp_local_steps": 10, "ddp_iterations": 500, "ddp_save_every": 5}))
    assert "every 10 steps, apart in between" in render(often.plan)  # since all wait before each checkpoint
    apart, together = outcome.plan["nodes"][0], make_plan(hosts()).plan["nodes"][0]
    assert apart["memory_bytes"] > together["memory_bytes"]
    assert flag(together, "local-steps") == "0"


def test_the_head_is_shared_out_where_that_sends_less():
    def heads(**settings):
        training = make_plan(hosts(settings)).plan
        return training["training"]["head"], flag(training["nodes"][0], "head")

    assert heads() == ("shared", "shared")
    assert heads(ddp_head="whole") == ("whole", "whole")
    # More tokens in a step than there are in the vocabulary of the trial.
    assert heads(ddp_total_batch=8192) == ("whole", "whole")
    assert heads(ddp_total_batch=8192, ddp_head="shared") == ("shared", "shared")
    assert heads(ddp_sync="dense") == ("whole", "whole")
    assert "sync exact (auto), head shared" in render(make_plan(hosts()).plan)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ddp_head": "shared", "ddp_sync": "dense"}, "here they are cpu and dense"),
        ({"ddp_head": "whole", "ddp_trainer_source": "/home/me/nanochat"}, "only this collection's own trainer knows"),
    ],
)
def test_a_head_that_cannot_be_shared_out_is_refused(settings, words):
    (problem,) = refusal(hosts(settings))
    assert words in problem


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ddp_local_steps": 10, "ddp_sync": "dense"}, "ddp_sync dense does not go with local steps"),
        ({"ddp_local_steps": 600, "ddp_iterations": 500}, "meet at its end only"),
        ({"ddp_local_steps": 5, "ddp_trainer_source": "/home/me/nanochat"}, "only this collection's own trainer knows"),
    ],
)
def test_local_steps_are_refused_where_they_make_no_sense(settings, words):
    (problem,) = refusal(hosts(settings))
    assert words in problem


def test_further_arguments_come_last():
    outcome = make_plan(hosts({"ddp_extra_args": ["--warmup-steps=5", "--matrix-lr", "0.01"]}))
    assert all(entry["argv"][-3:] == ["--warmup-steps=5", "--matrix-lr", "0.01"] for entry in outcome.plan["nodes"])


def test_torchrun_keeps_its_hands_off_the_trainers_flags():
    argv = make_plan(hosts()).plan["nodes"][0]["argv"]
    assert argv[argv.index("scripts.base_train") + 1] == "--"


def test_secrets_are_named_and_never_shown():
    outcome = make_plan(hosts({"ddp_secret_env": {"WANDB_API_KEY": "hunter2"}}))
    assert outcome.plan["nodes"][0]["env_secret"] == ["WANDB_API_KEY"]
    assert "hunter2" not in repr(outcome)


def test_a_python_that_all_hosts_have_is_preferred():
    def pythons(*versions: str) -> dict[str, Any]:
        found = [{"executable": f"/usr/bin/python{v}", "version": f"{v}.1", "venv_module": True} for v in versions]
        return {"python": {**desktop()["python"], "candidates": found}}

    outcome = make_plan(hosts({}, pythons("3.12", "3.11", "3.10"), pythons("3.13", "3.11", "3.10")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.11"] * 2
    outcome = make_plan(hosts({}, pythons("3.14", "3.12"), pythons("3.13")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.12", "/usr/bin/python3.13"]


def test_the_python_that_ansible_uses_comes_before_others_that_all_hosts_have():
    def pythons(used: str) -> dict[str, Any]:
        found = [
            {"executable": f"/usr/bin/python{v}", "version": f"{v}.1", "venv_module": True} for v in ("3.12", "3.11")
        ]
        return {"python": {**desktop()["python"], "version": used, "candidates": found}}

    outcome = make_plan(hosts({}, pythons("3.12.1"), pythons("3.12.1")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.12"] * 2
    # One that is too old for the trainer says nothing.
    outcome = make_plan(hosts({}, pythons("3.8.10"), pythons("3.8.10")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.11"] * 2


# Digest


def test_the_digest_is_of_everything_else_and_stays_the_same():
    plan = make_plan(hosts()).plan
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
    assert make_plan(hosts(change)).plan["digest"] != make_plan(hosts()).plan["digest"]


def test_what_only_the_controller_does_is_no_part_of_the_plan():
    outcome = make_plan(hosts({"ddp_watch": False, "ddp_results_dir": "elsewhere"}))
    assert outcome.plan == make_plan(hosts()).plan
    assert outcome.controller["watch"] is False and outcome.controller["results_dir"] == "elsewhere"


def test_field_21_a_trainer_that_exchanges_nothing_on_cpus_is_told_of():
    def codes(known):
        return [found["code"] for found in make_plan(known).findings]

    joined = {"ddp_trainer_source": "/home/me/nanochat"}
    other = {**joined, "ddp_trainer_join": False}
    assert codes(hosts(other)) == ["trainer-apart"]
    assert codes(hosts()) == codes(hosts(other)[:1]) == codes(hosts(joined)) == []
    on_cards = {**other, "ddp_device": "cuda"}
    assert codes(hosts(on_cards, {"gpus": [{"model": "x"}]}, {"gpus": [{"model": "x"}]})) == []


def test_another_trainer_is_not_compiled_on_cpus_unless_asked():
    def of(**run):
        return make_plan(hosts({"ddp_trainer_source": "/home/me/nanochat", **run})).plan["nodes"][0]["env"]

    name = "TORCH_COMPILE_OVERRIDE_BACKENDS"
    assert of()[name] == ">=0:eager"
    assert of(ddp_extra_env={name: ""})[name] == ""
    assert name not in make_plan(hosts()).plan["nodes"][0]["env"]


def test_making_a_plan_leaves_its_input_alone():
    known = hosts({"ddp_extra_env": {"A": "1"}})
    before = copy.deepcopy(known)
    make_plan(known)
    assert known == before


# What it refuses


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ({"ddp_total_batch": 3000}, "ddp_total_batch 3000 is not a multiple of"),
        ({"ddp_head_dim": 63}, "ddp_head_dim is 63; it must be even"),
        ({"ddp_depth": 1, "ddp_aspect_ratio": 4, "ddp_head_dim": 8}, "makes a model 8 wide; it must be at least 24"),
        (
            {"ddp_depth": 3, "ddp_aspect_ratio": 10, "ddp_head_dim": 10, "ddp_sync": "int8"},
            "a model 30 wide does not divide into blocks of 16; use exact or bf16",
        ),
        ({"ddp_local_steps": 2, "ddp_sync": "ddp"}, "ddp_sync ddp does not go with local steps; use exact, bf16"),
        ({"ddp_eval_every": 0}, "ddp_eval_every is 0; it must be at least 1, or -1 for none."),
        ({"ddp_keep_checkpoints": 0}, "ddp_keep_checkpoints is 0; it must be at least 1, or -1 for all."),
        ({"ddp_port_range": "29000-29999"}, "ddp_port 29500 lies in ddp_port_range 29000-29999"),
        ({"ddp_tracker": "mlflow", "ddp_tracker_port": 29500}, "ddp_tracker_port and ddp_port are both 29500"),
        ({"ddp_data_source": "host"}, "ddp_data_source is host, but ddp_data_paths is empty"),
        ({"ddp_secret_env": {"A": "x\0"}}, "ddp_secret_env cannot be passed on: the value of A holds a NUL byte"),
        ({"ddp_extra_env": {"PWD": "/x"}}, "ddp_extra_env cannot be passed on: PWD cannot be set"),
        ({"ddp_extra_env": {"A": "x" * 140000}}, "ddp_extra_env cannot be passed on: A is 140002 bytes long"),
        ({"ddp_data_paths": ["texts"]}, "ddp_data_paths holds 'texts'; it must be an absolute path"),
        ({"ddp_data_source": "controller"}, "it must name the folder of shards on the controller"),
        (
            {"ddp_data_source": "controller", "ddp_data_paths": ["/a", "/b", "/c"]},
            "ddp_data_paths names 3 folders, but",
        ),
        (
            {"ddp_data_host": "lptop"},
            "ddp_data_host is lptop, which is no host of this job; use desktop or laptop.",
        ),
        ({"ddp_data_source": "url", "ddp_data_last_shard": 5, "ddp_data_shards": 9}, "the collection has 6"),
        ({"ddp_dtype": "bfloat16"}, "the CPU of desktop and laptop has no instructions for it"),
        ({"ddp_matmul": "bf16"}, "ddp_matmul is bf16"),
        ({"ddp_dtype": "float16"}, "ddp_dtype is float16, which CPUs compute slowly"),
        ({"ddp_extra_env": {"RANK": "1"}}, "ddp_extra_env sets RANK, which torchrun sets itself"),
        (
            {"ddp_secret_env": {"NANOCHAT_DATA_DIR": "/x"}},
            "ddp_secret_env sets NANOCHAT_DATA_DIR, which the plan sets itself",
        ),
        ({"ddp_extra_args": ["--depth=9"]}, "ddp_extra_args holds --depth, which the plan sets itself"),
    ],
)
def test_settings_that_do_not_fit_are_refused(run, sentence):
    problems = refusal(hosts(run))
    assert any(sentence in problem for problem in problems), problems


def test_ranks_that_clash_or_leave_a_gap_are_refused():
    assert "ddp_rank is 0 on desktop and on laptop" in refusal(hosts({}, {"ddp_rank": 0}, {"ddp_rank": 0}))[0]
    assert "ddp_rank is 2 on laptop, but the ranks of 2 hosts are 0 to 1" in refusal(hosts({}, two={"ddp_rank": 2}))[0]


def test_all_problems_of_all_hosts_are_told_at_once():
    with pytest.raises(PlanError) as caught:
        make_plan(
            hosts({}, {"tmux": {"path": None}}, {"ddp_nic": "eth7", "memory": {"total": GIGA // 2, "available": 0}})
        )
    assert [(found["code"], found["host"]) for found in caught.value.findings] == [
        ("nic-down", "laptop"),
        ("no-tmux", "desktop"),
        ("memory-short", "laptop"),
    ]
    assert str(caught.value).startswith("3 problems; nothing was changed:\n- ddp_nic is eth7 on laptop")


def test_a_wrong_setting_does_not_hide_what_is_wrong_with_a_host():
    problems = refusal(hosts({"ddp_total_batch": 3000, "ddp_head_dim": 63}, {"ddp_rank": 7}, {"tmux": {"path": None}}))
    assert [problem.split()[0] for problem in problems] == ["ddp_head_dim", "ddp_rank", "ddp_total_batch", "laptop"]
    problems = refusal(hosts({"ddp_total_batch": 3000}, two={"tmux": {"path": None}}), tolerant=True)
    assert [problem.split()[0] for problem in problems] == ["ddp_total_batch"]


def test_no_hosts():
    assert refusal([]) == ["There are no hosts to plan for; the inventory's group of trainers is empty."]


def test_field_06_a_port_that_somebody_holds_is_refused_with_the_holder():
    holder = {"port": 29500, "pid": 4711, "user": "eve", "command": "python old.py", "session": None, "run": None}
    (problem,) = refusal(hosts(one={"ports": [holder]}))
    assert problem.startswith("ddp_port 29500 is taken on desktop by process 4711 of eve (python old.py)")
    (problem,) = refusal(hosts(one={"ports": [{**holder, "pid": None, "command": None}]}))
    assert "by a process of eve, which this user may not look at; choose another port" in problem
    # Only the master listens there.
    assert make_plan(hosts(two={"ports": [holder]})).plan["world"] == 2


def test_our_own_running_session_holds_its_port_rightly():
    holder = {"port": 29500, "pid": 4711, "user": "lzw", "command": "torchrun", "session": "abc", "run": "d4"}
    running = {"exists": True, "session": {"id": "abc"}, "checkpoints": []}
    assert make_plan(hosts(one={"ports": [holder], "run": running})).findings == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tmux": {"path": None, "version": None}}, "laptop has no tmux"),
        (
            {"memory": {"total": GIGA // 2, "available": GIGA // 2}},
            "laptop has 500 MB of memory, but its rank needs about",
        ),
        (
            {"disk": {**laptop()["disk"], "free": GIGA}},
            "laptop has 1.0 GB free below /home/xiaoxin, but checkpoints, data and software",
        ),
        ({"disk": {**laptop()["disk"], "writable": False}}, "but xiaoxin cannot write in"),
        (
            {"transfer": {"folder": "/home/xiao xin/.ansible/tmp", "shell": "/bin/bash"}},
            "ansible_remote_tmp: /var/tmp/ansible-xiaoxin",
        ),
        (
            {"ddp_python": "/opt/python9"},
            "ddp_python is /opt/python9 on laptop, which is no Python of 3.10 or newer there",
        ),
        ({"host": {**laptop()["host"], "arch": "riscv64"}}, "laptop is a machine of type riscv64"),
        (
            {"host": {**laptop()["host"], "arch": "aarch64"}},
            "desktop is x86_64 but laptop is aarch64: they round differently",
        ),
    ],
)
def test_a_host_that_cannot_take_part_is_refused(change, sentence):
    problems = refusal(hosts({}, two=change))
    assert any(sentence in problem for problem in problems), problems


def test_field_36_a_python_is_made_where_none_is_new_enough_unless_there_is_no_network():
    old = {"python": {**laptop()["python"], "candidates": [], "version": "3.9.2"}}
    (problem,) = refusal(hosts({"ddp_trainer_offline": True}, two=old))
    assert (
        "laptop has no Python of 3.10 or newer (its own is 3.9.2), which the trainer needs; its user makes one"
        in problem
    )
    first = make_plan(hosts({"ddp_python_mirror": "file:///mnt/mirror"}, two=old))
    made = "/home/xiaoxin/nanochat-ddp/python/current/bin/python3"
    assert [node["python"] for node in first.plan["nodes"]] == ["/usr/bin/python3.11", made]
    assert first.plan["trainer"]["python_mirror"] == "file:///mnt/mirror"
    (told,) = [one for one in first.findings if one["code"] == "python-made"]
    assert "uv makes 3.12 once below /home/xiaoxin/nanochat-ddp/python" in told["seen"]
    # With the made one at hand the plan is the same.
    old["python"]["candidates"] = [{"executable": made, "version": "3.12.9", "venv_module": True}]
    again = make_plan(hosts({"ddp_python_mirror": "file:///mnt/mirror"}, two=old))
    assert again.plan["digest"] == first.plan["digest"]
    assert "the trainer's is made with 3.12 in" in next(
        one["seen"] for one in again.findings if one["code"] == "python-made"
    )


def test_hosts_of_arm_alone_are_allowed():
    one, two = ({"host": {**probe()["host"], "arch": "aarch64"}} for probe in (desktop, laptop))
    assert "architecture-differs" not in {one["code"] for one in make_plan(hosts({}, one, two)).findings}


def test_data_and_checkpoints_that_are_there_need_no_room_again():
    little = {**laptop()["disk"], "free": int(0.05 * GIGA)}
    plan = make_plan(hosts()).plan
    there = {
        "data": [{"id": plan["data"]["id"], "shards": 3, "bytes": 75_000_000}],
        "run": {"exists": True, "session": None, "checkpoints": [5, 10, 15]},
        "python": {**laptop()["python"], "venv": {"exists": True}},
    }
    assert make_plan(hosts({}, {"data": there["data"]}, {"disk": little, **there})).plan["digest"] == plan["digest"]


def test_two_nodes_in_one_folder_are_refused():
    known = one_machine()
    for host in known:
        host["probe"]["disk"]["real_path"] = "/home/lzw/same"
    (problem,) = refusal(known)
    assert "both nodes are on one machine" in problem and "{{ inventory_hostname }}" in problem


def test_a_shared_home_on_a_file_server_is_refused():
    nfs = {"real_path": "/home/me/nanochat-ddp", "network": True, "source": "server:/home", "free": 900 * GIGA}
    known = hosts({}, {"disk": {**desktop()["disk"], **nfs}}, {"disk": {**laptop()["disk"], **nfs}})
    (problem,) = refusal(known)
    assert "both see the same folder" in problem and "server:/home" in problem


def test_memory_of_a_machine_is_shared_by_its_nodes():
    known = one_machine()
    for host in known:
        host["probe"]["memory"] = {"total": 1_400_000_000, "available": 1_300_000_000}
    problems = refusal(known)
    assert "but 2 nodes there need about 1." in problems[0]


def test_the_system_keeps_some_memory_to_itself():
    need = node(make_plan(hosts()), "laptop")["memory_bytes"]
    with_room = hosts(two={"memory": {"total": int(need / 0.9), "available": need}})
    assert "memory-short" not in [code for code, dummy in codes(make_plan(with_room))]
    (problem,) = refusal(hosts(two={"memory": {"total": int(need / 0.95), "available": need}}))
    assert problem.startswith("laptop has ")


def test_a_head_that_is_not_shared_out_takes_more_memory():
    shared, whole = (
        node(make_plan(hosts({"ddp_head": head, "ddp_vocab_size": 32768})), "laptop")["memory_bytes"]
        for head in ("shared", "whole")
    )
    assert whole > shared


def test_remarks_that_do_not_stop_a_run():
    busy = {
        "ddp_threads": 99,
        "memory": {"total": 32 * GIGA, "available": GIGA // 2},
        "processes": [{"pid": 7, "user": "lzw", "command": "torchrun old.py", "session": None}],
    }
    assert {code for code, host in codes(make_plan(hosts(two=busy))) if host == "laptop"} == {
        "threads-over-cores",
        "memory-tight",
        "other-training",
    }


@pytest.mark.parametrize(("threads", "severity"), [(4, None), (6, "info"), (8, "info"), (9, "warning")])
def test_threads_are_held_against_cores_and_processors(threads, severity):
    told = [
        one for one in make_plan(hosts(two={"ddp_threads": threads})).findings if one["code"] == "threads-over-cores"
    ]
    assert [one["severity"] for one in told] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("bind", "uri"),
    [("::", "http://[::1]:5000"), ("fd00::1", "http://[fd00::1]:5000"), ("0.0.0.0", "http://127.0.0.1:5000")],
)
def test_an_address_of_ipv6_stands_in_brackets(bind, uri):
    made = make_plan(hosts({"ddp_tracker": "mlflow", "ddp_tracker_bind": bind})).plan
    assert f"--tracker-uri={uri}" in made["nodes"][0]["argv"]


def test_nobody_is_told_to_leave_threads_empty_who_did():
    """Each node has a thread at least; on a machine with fewer processors than nodes that is too many."""
    crowd = one_machine(3)
    for host in crowd:
        host["probe"]["cpu"].update(available=2, available_physical=2)
    (told,) = [one for one in make_plan(crowd).findings if one["code"] == "threads-over-cores"]
    assert told["seen"] == "3 threads on 2 processors"
    assert told["remedy"] == "Let fewer than 3 nodes train on this machine."


def test_the_disk_that_the_python_takes_is_said():
    outcome = make_plan(hosts())
    assert "once on each machine: about 1.6 GB of disk besides" in render(outcome.plan)


# Hosts that are down


def test_tolerant_a_run_can_be_seen_though_a_host_is_down_and_another_is_full():
    known = hosts(one={"disk": {**desktop()["disk"], "free": 0}})
    known[1].update(probe=None, error="ssh: connect to host 192.168.1.11 port 22: No route to host")
    said = "laptop cannot be looked at (ssh: connect to host 192.168.1.11 port 22: No route to host); see"
    assert any(problem.startswith(said) for problem in refusal(known))
    outcome = make_plan(known, tolerant=True)
    assert [entry["session"] for entry in outcome.plan["nodes"]] == ["nanochat-d4-rank0", "nanochat-d4-rank1"]
    assert {found["code"] for found in outcome.findings} == {"host-down", "disk-short"}
    assert render(outcome.plan)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "Task failed: Failed to connect to the host via ssh: ssh: connect to host a port 22: No route to host",
            "ssh: connect to host a",
        ),
        (
            "Failed to connect to the host via ssh: me@a: Permission denied (publickey).",
            "me@a: Permission denied (publickey)",
        ),
        ("The module interpreter '/nosuch' was not found.", "The module interpreter '/nosuch' was not found"),
    ],
)
def test_tolerant_the_reason_is_in_the_words_of_ssh(error, reason):
    known = [*hosts()[:1], {"name": "laptop", "settings": {}, "probe": None, "error": error}]
    (problem,) = refusal(known)
    assert problem.startswith(f"laptop cannot be looked at ({reason}")
    assert ("install Python there" in problem) == ("interpreter" in error)


def test_tolerant_wrong_settings_are_refused_all_the_same():
    assert refusal(hosts({"ddp_depth": "x"}), tolerant=True)


# Before the probe


def test_questions_name_what_to_look_at():
    known = [
        {"name": "desktop", "settings": {"ddp_base_dir": "~/n", "ddp_address": "10.0.0.1"}, "reach": "desktop.lan"},
        {"name": "laptop", "settings": {"ddp_venv_dir": "/v"}, "reach": "192.168.1.11"},
        {"name": "here", "settings": {}, "reach": None},
    ]
    asked = questions(known)
    assert asked["desktop"] == {
        "base_dir": "~/n",
        "run_dir": "~/n/runs/d4",
        "base_run": None,
        "venv_dir": None,
        "python": None,
        "ports": [29500],
        "folders": [],
        "peers": ["192.168.1.11"],
    }
    assert asked["laptop"]["peers"] == ["10.0.0.1"] and asked["laptop"]["venv_dir"] == "/v"
    with pytest.raises(PlanError):
        questions([{"name": "desktop", "settings": {"ddp_depth": "x"}, "reach": None}])


# Links


@pytest.mark.parametrize(
    ("taken", "other", "faster"),
    [
        (("wifi", 400), ("wired", 100), True),  # a cable is steadier, whatever its speed
        (("wifi", 400), ("wifi", 800), True),
        (("wired", 1000), ("wired", 100), False),
        (("wired", 100), ("wired", 1000), True),
        (("wired", 100), ("wifi", 800), False),
        (("wired", None), ("wired", 1000), False),
        (("wired", 100), ("wired", None), False),
    ],
)
def test_which_interface_would_be_quicker(taken, other, faster):
    one, two = ({"kind": kind, "speed_mbit": speed} for kind, speed in (taken, other))
    assert quicker(two, one) is faster


def test_field_03_virtual_interfaces_are_not_taken_and_a_faster_one_is_named():
    radio = [
        nic("wlp3s0", "wifi", "192.168.1.11/24"),
        nic("enp2s0", "wired", "10.9.9.2/24", speed=1000),
        nic("docker0", "bridge", "172.17.0.1/16"),
    ]
    seen = {"nics": radio, "routes": [route("desktop", "wlp3s0", "192.168.1.11")]}
    outcome = make_plan(hosts(two=seen))
    assert node(outcome, "laptop")["nic"] == "wlp3s0"
    assert codes(outcome) == [("nic-wifi", "laptop"), ("nic-faster-up", "laptop")]
    assert "wlp3s0 (wifi) while enp2s0 (wired, 1000 Mbit/s) is up" in outcome.findings[1]["seen"]


def test_field_03_an_interface_that_is_named_wins_and_an_unknown_or_dead_one_is_refused():
    cards = [
        nic("enp4s0", "wired", "192.168.1.10/24"),
        nic("enp5s0", "wired", "192.168.2.10/24"),
        nic("enp6s0", "wired", None, up=False),
    ]
    outcome = make_plan(hosts(one={"nics": cards, "ddp_nic": "enp5s0"}))
    assert (node(outcome, "desktop")["nic"], node(outcome, "desktop")["address"]) == ("enp5s0", "192.168.2.10")
    (problem,) = refusal(hosts(one={"nics": cards, "ddp_nic": "eth0"}))
    assert (
        problem
        == "ddp_nic is eth0 on desktop, which has no such interface; it has enp4s0 (wired), enp5s0 (wired), enp6s0 (wired, down); "
        "set ddp_nic to one of them."
    )
    (problem,) = refusal(hosts(one={"nics": cards, "ddp_nic": "enp6s0"}))
    assert "ddp_nic is enp6s0 on desktop, but that interface is down" in problem


def test_field_05_an_overlay_on_the_route_is_gone_around_or_refused():
    overlay = nic("tailscale0", "overlay", "100.64.0.7/32")
    way = [route("100.64.0.8", "tailscale0", "100.64.0.7")]
    wired = nic("enp4s0", "wired", "192.168.1.10/24", speed=1000)
    outcome = make_plan(hosts(one={"nics": [wired, overlay], "routes": way}))
    assert node(outcome, "desktop")["nic"] == "enp4s0"
    assert codes(outcome) == [("nic-route-overlay", "desktop")]
    elsewhere = [nic("enp4s0", "wired", "10.1.1.1/24"), nic("wlan0", "wifi", "10.2.2.2/24"), overlay]
    (problem,) = refusal(hosts(one={"nics": elsewhere, "routes": way}))
    assert "desktop reaches its peers over tailscale0, which is an overlay network; name the interface" in problem
    asked = make_plan(hosts(one={"nics": elsewhere, "routes": way, "ddp_nic": "tailscale0"}))
    assert node(asked, "desktop")["address"] == "100.64.0.7"
    assert ("nic-overlay", "desktop") in codes(asked)


def test_without_names_the_common_network_decides():
    cards = [
        nic("eno1", "wired", "10.0.0.5/24"),
        nic("eno2", "wired", "192.168.1.10/24"),
        nic("wlan0", "wifi", "192.168.1.30/24"),
    ]
    outcome = make_plan(
        hosts(
            one={"nics": cards, "routes": [{"peer": "default", "address": "203.0.113.1", "nic": None, "source": None}]}
        )
    )
    assert (node(outcome, "desktop")["nic"], node(outcome, "desktop")["address"]) == ("eno2", "192.168.1.10")


def test_field_04_an_address_of_loopback_or_of_nobody_is_refused():
    assert (
        "which only desktop itself can reach"
        in refusal(hosts(one={"ddp_address": "127.0.0.1", "nics": desktop()["nics"]}))[0]
    )
    problem = refusal(hosts(one={"ddp_address": "192.168.1.99"}))[0]
    assert "none of its interfaces has that address" in problem and "192.168.1.10 on enp4s0" in problem
    assert (
        "ddp_address is desktop on desktop; it must be an IP address"
        in refusal(hosts(one={"ddp_address": "desktop"}))[0]
    )


def test_two_machines_with_one_address_are_refused():
    same = {"nics": [nic("eth0", "wired", "10.0.2.15/24")], "routes": [route("x", "eth0", "10.0.2.15")]}
    (problem,) = refusal(hosts({}, same, same))
    assert "different machines with the same address 10.0.2.15" in problem


def test_ipv4_and_ipv6_do_not_mix_and_ipv6_alone_works():
    six = {"nics": [nic("eth0", "wired", "fd00::5/64")], "routes": [route("x", "eth0", "fd00::5")]}
    other = {"nics": [nic("eth0", "wired", "fd00::6/64")], "routes": [route("x", "eth0", "fd00::6")]}
    assert "desktop would be reached by IPv4 but laptop by IPv6" in refusal(hosts({}, two=six))[0]
    assert make_plan(hosts({}, six, other)).plan["master"]["address"] == "fd00::5"


def test_a_host_without_any_network_is_refused():
    assert (
        "laptop has no interface that is up"
        in refusal(hosts(two={"nics": [nic("eth0", "wired", None, up=False)], "routes": []}))[0]
    )


def test_containers_of_one_kernel_are_hosts_of_their_own():
    known = hosts()
    for number, host in enumerate(known):
        host["probe"]["host"].update(boot_id="same", network_namespace=f"net:[{number}]")
    outcome = make_plan(known)
    assert [entry["address"] for entry in outcome.plan["nodes"]] == ["192.168.1.10", "192.168.1.11"]
    # But they share the cores of the machine.
    assert [entry["threads"] for entry in outcome.plan["nodes"]] == [4, 2]


def test_ten_hosts_of_a_lab():
    lab = []
    for number in range(1, 11):
        name, address = f"pc{number:02d}", f"10.20.0.{number}"
        seen = probe(
            name, [nic("eno1", "wired", f"{address}/24", speed=1000)], [route("pc", "eno1", address)], user="student"
        )
        lab.append(
            {"name": name, "settings": {"ddp_total_batch": 20480, "ddp_port_range": "40000-40999"}, "probe": seen}
        )
    plan = make_plan(lab).plan
    assert plan["data_ports"] == {"low": 40000, "high": 40999} and plan["narrow_ports"]
    assert [entry["rank"] for entry in plan["nodes"]] == list(range(10))
    assert all(len(entry["peers"]) == 9 for entry in plan["nodes"])


# For people


def test_field_15_the_text_says_how_big_it_is_before_anything_starts():
    outcome = make_plan(hosts({"ddp_profile": "real"}))
    text = render(outcome.plan)
    for part in (
        "125,829,354 parameters",
        "20.5M tokens",
        "0.1628 per parameter",
        "5.6e+15 FLOPs",
        "enp4s0",
        "192.168.1.11",
        "29500",
    ):
        assert part in text, part
    assert max(len(line) for line in text.splitlines()) < 200


def test_field_25_the_text_says_who_is_on_the_radio():
    seen = {"nics": [nic("wlp3s0", "wifi", "192.168.1.11/24")], "routes": [route("x", "wlp3s0", "192.168.1.11")]}
    outcome = make_plan(hosts(two=seen))
    assert "WARNING nic-wifi laptop: wlp3s0 is a Wi-Fi interface." in render_findings(outcome.findings)


# Keepers


def test_without_restarts_there_is_no_keeper():
    plan = make_plan(hosts()).plan
    assert "keeper" not in plan
    assert all("keeper_port" not in one for one in plan["nodes"])


def test_a_keeper_on_every_host():
    asked = {"ddp_restarts": 3, "ddp_min_hosts": 1, "ddp_grace": 20}
    outcome = make_plan(hosts(asked))
    assert outcome.plan["keeper"] == {
        "restarts": 3,
        "min_hosts": 1,
        "grace_seconds": 20,
        "survive_reboot": False,
    }
    one, two = outcome.plan["nodes"]
    assert one["open_ports"] == two["open_ports"] == [29500, 29501]
    assert two["session_argv"] == [two["argv"][0], "-B", two["run_dir"] + "/.keeper/keeper.py"]
    assert "port 29500, the keepers' port 29501 and ports" in render(outcome.plan)
    assert make_plan(hosts({"ddp_restarts": 3})).plan["keeper"]["min_hosts"] == 2
    assert make_plan(hosts({"ddp_restarts": 3, "ddp_survive_reboot": True})).plan["keeper"]["survive_reboot"]
    shared = make_plan(one_machine(2, {"ddp_restarts": 3})).plan["nodes"]
    # The rendezvous port of one machine is tried and opened once.
    assert [one["open_ports"] for one in shared] == [[29500, 29501], [29502]]
    # Those that follow leave out the run's other ports.
    crowded = {"ddp_restarts": 3, "ddp_keeper_port": 29499, "ddp_tracker": "mlflow", "ddp_tracker_port": 29501}
    assert [one["keeper_port"] for one in make_plan(one_machine(3, crowded)).plan["nodes"]] == [29499, 29502, 29503]
    called = [{**host, "reach": None} for host in hosts(asked)]
    assert questions(called)["laptop"]["ports"] == [29500, 29501, 29502]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ddp_restarts": 3, "ddp_min_hosts": 3}, "ddp_min_hosts is 3, but this job has 2 hosts"),
        ({"ddp_min_hosts": 1}, "ddp_min_hosts is set, but ddp_restarts is 0"),
        ({"ddp_restarts": 3, "ddp_resume": False}, "ddp_restarts needs ddp_resume"),
        ({"ddp_restarts": 3, "ddp_keeper_port": 29500}, "ddp_keeper_port and ddp_port are both 29500"),
        (
            {"ddp_restarts": 3, "ddp_tracker": "mlflow", "ddp_tracker_port": 29501},
            "ddp_keeper_port and ddp_tracker_port are both 29501",
        ),
    ],
)
def test_what_does_not_go_with_keepers_is_refused(settings: dict[str, Any], words: str):
    assert any(words in problem for problem in refusal(hosts(settings)))


def test_field_06_who_holds_the_port_of_a_keeper_is_named():
    holder = {"port": 29501, "pid": 7, "user": "lzw", "command": "nc -l 29501", "session": None, "run": None}
    (problem,) = refusal(hosts({"ddp_restarts": 3}, two={"ports": [holder]}))
    assert problem.startswith("ddp_keeper_port 29501 is taken on laptop by process 7 of lzw (nc -l 29501)")


def test_the_command_of_a_generation_is_the_planned_one_with_its_members():
    plan = make_plan(hosts({"ddp_restarts": 3, "ddp_min_hosts": 1})).plan
    argv = command(plan, "laptop", Generation(3, ("laptop",)))
    planned = plan["nodes"][1]["argv"]
    assert argv[:6] == [*planned[:3], "--nnodes=1", "--node-rank=0", "--master-addr=192.168.1.11"]
    assert "--rdzv-id=generation-3" in argv[: argv.index("--")]
    rows = sum(plan["training"]["rows"])
    assert argv[argv.index("--") + 1 :][:2] == [f"--rank-rows={rows}", "--tracker=none"]
    assert "--save-on-loss" in argv
    changed = ("--nnodes", "--node-rank", "--master-addr", "--rank-rows", "--tracker")
    kept = [word for word in planned if not word.startswith(changed)]
    assert [word for word in argv if word in kept] == kept


def test_parts_of_the_head_are_dealt_again_among_those_who_are_there():
    settings = {"ddp_restarts": 3, "ddp_min_hosts": 1, "ddp_head": "shared", "ddp_extra_args": ["--head-shares=3,1"]}
    plan = make_plan(hosts(settings)).plan
    both = command(plan, "laptop", Generation(2, ("desktop", "laptop")))
    assert "--head-shares=3,1" in both
    alone = command(plan, "laptop", Generation(3, ("laptop",)))
    assert "--head-shares=1" in alone
    assert "--head=shared" in alone


def test_checkpoints_by_time_are_for_steps_in_which_all_are_alike():
    assert "--save-minutes=30" in make_plan(hosts({})).plan["nodes"][0]["argv"]
    for settings in ({"ddp_save_minutes": 0}, {"ddp_local_steps": 10}):
        plan = make_plan(hosts(settings)).plan
        assert plan["training"]["save_minutes"] == 0
        assert not any(word.startswith("--save-minutes") for word in plan["nodes"][0]["argv"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"ddp_tracker": "mlflow", "ddp_tracker_port": 29500},
            "ddp_tracker_port and ddp_port are both 29500; they must differ.",
        ),
        (
            {"ddp_tracker": "mlflow", "ddp_tracker_port": 29501, "ddp_restarts": 3},
            "ddp_keeper_port and ddp_tracker_port are both 29501; they must differ.",
        ),
        (
            {"ddp_tracker": "mlflow", "ddp_tracker_port": 40001, "ddp_port_range": "40000-40100"},
            "ddp_tracker_port 40001 lies in ddp_port_range 40000-40100; use a port outside it.",
        ),
        (
            {"ddp_restarts": 3, "ddp_keeper_port": 40001, "ddp_port_range": "40000-40100"},
            "ddp_keeper_port 40001 lies in ddp_port_range 40000-40100; use a port outside it.",
        ),
    ],
)
def test_ports_of_the_job_that_are_the_same_are_refused(settings, said):
    assert refusal(hosts(settings)) == [said]


def test_one_machine_under_two_names_is_told_where_it_is_reached_from_elsewhere():
    known = one_machine(2)
    assert "one-machine-twice" not in [one["code"] for one in make_plan(known).findings]
    for host, reach in zip(known, ("192.168.1.10", "desktop.lan"), strict=True):
        host["reach"] = reach
    (told,) = [one for one in make_plan(known).findings if one["code"] == "one-machine-twice"]
    assert told["seen"] == "node1 (reached at 192.168.1.10) and node2 (reached at desktop.lan) are one machine"


def test_no_host_widens_what_the_others_open():
    plan = make_plan(hosts(two={"ephemeral": {"low": 1, "high": 65535}})).plan
    assert [one["data_ports"] for one in plan["nodes"]] == [{"low": 32768, "high": 60999}, {"low": 1024, "high": 65535}]
    narrowed = make_plan(
        hosts(run={"ddp_port_range": "40000-40999"}, two={"ephemeral": {"low": 1, "high": 65535}})
    ).plan
    assert {tuple(one["data_ports"].values()) for one in narrowed["nodes"]} == {(40000, 40999)}


@pytest.mark.parametrize("claimed", ["224.0.0.1/4", "0.0.0.0/0", "255.255.255.255/32"])
def test_an_address_of_many_machines_is_none_that_peers_let_in(claimed):
    seen = {"nics": [nic("eth0", "wired", claimed)], "routes": [route("desktop", "eth0", claimed.split("/")[0])]}
    with pytest.raises(PlanError, match="laptop reaches its peers over eth0"):
        make_plan(hosts(two=seen))
