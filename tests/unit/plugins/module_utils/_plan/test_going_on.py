# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints that are there: no setting gives them up unasked, and no change of the hosts makes them useless."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, refusal

URL = {"ddp_data_source": "url"}
TEXT = {"ddp_data_paths": ["/srv/text"]}
SHARDS = {"ddp_data_source": "host", "ddp_data_paths": ["~/shards"]}


def trained(known: list[dict[str, Any]], where: tuple[str, ...] = ("desktop", "laptop")) -> dict[str, Any]:
    """Give the probes the traces of a run under the plan of these hosts; returns that plan."""
    plan = make_plan(known).plan
    for host in known:
        if host["name"] in where:
            run = {"session": None, "checkpoints": [5, 10]}
            host["probe"]["run"] = {**run, "plan_digest": plan["digest"], "lineage": lineage.of_plan(plan)}
            host["probe"]["data"] = [{"id": plan["data"]["id"], "bytes": 5}]
    return plan


def set_all(known: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    changed = copy.deepcopy(known)
    for host in changed:
        host["settings"].update(settings)
    return changed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ddp_run": "d4", "ddp_depth": 8}, "ddp_depth was 4 and is 8 now"),
        (
            {"ddp_vocab_size": 5000, "ddp_data_shards": 9},
            "was 4096 and is 5000 now, ddp_data_shards was 3 and is 9 now",
        ),
        ({"ddp_data_source": "url"}, "ddp_data_source was text and is url now"),
        ({**TEXT, "ddp_data_host": "laptop"}, "ddp_data_paths was /usr/lib/python3.11 and is /srv/text now"),
        ({"ddp_data_paths": ["/srv/other"]}, "ddp_data_paths was /usr/lib/python3.11 and is /srv/other now"),
    ],
)
def test_field_26_a_setting_that_would_give_up_checkpoints_is_refused(settings, said):
    known = hosts()
    trained(known)
    (problem,) = refusal(set_all(known, **settings))
    assert said in problem, problem
    for word in ("step 10 on desktop, step 10 on laptop", "ddp_run", "-e ddp_fresh=true"):
        assert word in problem
    assert make_plan(set_all(known, **settings, ddp_fresh=True)).plan["run"] == "d4"
    make_plan(set_all(known, **{**settings, "ddp_run": "other"}), tolerant=True)


@pytest.mark.parametrize(
    "settings", [{"ddp_iterations": 99}, {"ddp_total_batch": 4096}, {"ddp_torch": "2.12.0"}, {"ddp_port": 29600}]
)
def test_what_a_checkpoint_does_not_depend_on_may_change(settings):
    known = hosts()
    trained(known)
    assert make_plan(set_all(known, **settings)).plan["digest"] != known[0]["probe"]["run"]["plan_digest"]


@pytest.mark.parametrize("run", [{}, URL, TEXT, SHARDS])
@pytest.mark.parametrize(
    "change",
    [
        "none",
        "laptop alone",
        "other order",
        "other rank 0",
        "renamed",
        "first host gone and another there",
        "new Python",
    ],
)
def test_field_27_other_hosts_go_on_with_the_same_data(run, change):
    known = hosts(run)
    before = trained(known)
    known = copy.deepcopy(known)
    if change == "laptop alone":
        known = known[1:]
    elif change == "other order":
        known.reverse()
    elif change == "other rank 0":
        known[0]["settings"]["ddp_rank"], known[1]["settings"]["ddp_rank"] = 1, 0
    elif change == "renamed":
        known[0]["name"] = "tower"
    elif change == "new Python":
        known[0]["probe"]["python"]["library"] = "/usr/lib/python3.13"
    elif change != "none":
        known[0] = {**hosts(run)[0], "name": "third"}
    after = make_plan(known).plan
    assert after["data"]["id"] == before["data"]["id"]
    assert change != "none" or after["digest"] == before["digest"]
    having = [host["name"] for host in known if host["probe"]["data"]]
    assert after["data"]["host"] in having, "a host that has the data does not make or fetch them once more"


def test_a_host_that_is_named_for_the_data_may_be_renamed_or_left_out_once_others_have_them():
    known = hosts({**TEXT, "ddp_data_host": "laptop"})
    before = trained(known)
    renamed = set_all(known, ddp_data_host="notebook")
    renamed[1]["name"] = "notebook"
    assert make_plan(renamed).plan["data"]["id"] == before["data"]["id"]
    after = make_plan(known[:1]).plan
    assert (after["data"]["id"], after["data"]["host"]) == (before["data"]["id"], "desktop")
    known[0]["probe"]["data"] = []
    assert "ddp_data_host is laptop, which is not a host of this job; use desktop." in refusal(known[:1])[0]
