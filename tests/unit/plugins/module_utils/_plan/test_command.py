# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The flags and the environment of a rank, and its keeper."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import flag_words
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    lan,
    planned,
)


def test_field_08_both_environments_name_the_same_variables():
    one, two = planned({"ddp_extra_env": {"MALLOC_ARENA_MAX": 2}})["nodes"]
    assert list(one["env"]) == list(two["env"])
    assert one["env"]["NANOCHAT_DATA_DIR"] == "/home/lzw/nanochat-ddp/runs/d4/data"
    assert two["env"]["NANOCHAT_BASE_DIR"] == "/home/xiaoxin/nanochat-ddp/runs/d4"
    assert one["env"]["MALLOC_ARENA_MAX"] == "2"
    assert all(isinstance(value, str) for value in one["env"].values())


def test_field_09_the_ranks_differ_only_in_what_is_their_own():
    one, two = planned()["nodes"]
    own = ("--run-dir",)
    assert [w for w in one["argv"][1:] if not w.startswith(own)] == [
        w for w in two["argv"][1:] if not w.startswith(own)
    ]


def test_field_21_the_ranks_of_a_checkout_are_joined():
    plan = planned({"ddp_trainer_source": "/home/me/nanochat", "ddp_sync": "bf16"})
    words = plan["nodes"][1]["argv"]
    tools = "/home/xiaoxin/nanochat-ddp/tools/scripts"
    assert words[:2] == ["/home/xiaoxin/nanochat-ddp/venv/bin/python", f"{tools}/join.py"]
    end = words.index("scripts.base_train")
    assert words[2:end] == [
        "--run-dir=/home/xiaoxin/nanochat-ddp/runs/d4",
        "--timeout-seconds=300",
        "--sync=bf16",
        "--keep-checkpoints=2",
        "--resume",
    ]
    assert not set(plan["nodes"][1]["flags"]) & {"sync", "run-dir", "resume", "head"}
    assert words[end + 1 :] == flag_words(plan["nodes"][1]["flags"])
    assert plan["trainer"]["packages"] == ["trainer", "checkout"]
    assert plan["trainer"]["joined"] and plan["training"]["resume"] and plan["training"]["sync"] == "bf16"
    with_mlflow = planned({"ddp_trainer_source": "/home/me/nanochat", "ddp_tracker": "mlflow"})
    assert with_mlflow["nodes"][0]["join_flags"]["tracker-uri"] == "http://127.0.0.1:5000"


@pytest.mark.parametrize(("count", "least"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_half_of_the_hosts_of_a_real_run_may_be_away_and_come_back_after_a_reboot(count, least):
    plan = make_plan(lan(count, {"ddp_profile": "real"})).plan
    assert plan["keeper"] == {"restarts": 3, "min_hosts": least, "grace_seconds": 30, "survive_reboot": True}
    assert f"any {count - least} of {count} hosts may be away; losing one repeats" in render(plan) or count < 3


@pytest.mark.parametrize(
    "settings", [{"ddp_restarts": 0}, {"ddp_resume": False}, {"ddp_trainer_source": "/home/me/nanochat"}]
)
def test_without_keepers_a_real_run_needs_all_its_hosts(settings):
    outcome = make_plan(hosts({"ddp_profile": "real", **settings}), tolerant=True)
    assert "keeper" not in outcome.plan
    repeats = "up to 250 steps or 10 minutes" if outcome.plan["training"]["save_minutes"] else "up to 250 steps"
    repeats = repeats if outcome.plan["training"]["resume"] else "all steps"
    assert f"no host may be away: the run ends; a restart repeats {repeats}\n" in render(outcome.plan)
