# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which training a start goes on with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import PlanOutcome, make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import PlanError
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    findings_with,
    hosts,
    planned,
)

OLD, NEW = "0" * 15 + "1", "0" * 15 + "2"


def made(settings: dict[str, Any] | None = None, **held: tuple[str | None, int, int | None]) -> PlanOutcome:
    """The plan where hosts hold a training: its id, its number and its newest step."""
    known, deployed = hosts(settings), planned()
    for host in known:
        if host["name"] in held:
            name, number, step = held[host["name"]]
            host["probe"]["run"] = {
                "training": {"id": name, "number": number, "begun": 1000 * number} if name else None,
                "checkpoints": [] if step is None else [step],
                "lineage": lineage.of_plan(deployed),
            }
    return make_plan(known)


def older(outcome: PlanOutcome) -> list[str]:
    return [found["host"] for found in findings_with(outcome, "training-older")]


def test_where_there_is_nothing_one_begins():
    assert made().training == {"id": "", "number": 1, "begun": 0, "goes_on": None, "base": None}


def test_the_newest_goes_on_whatever_step_it_has_come_to():
    outcome = made(desktop=(NEW, 2, 6), laptop=(OLD, 1, 12))
    assert outcome.training == {"id": NEW, "number": 2, "begun": 2000, "goes_on": NEW, "base": None}
    [found] = findings_with(outcome, "training-older")
    assert found["host"] == "laptop" and "to step 12" in found["seen"] and f"{NEW} on desktop" in found["seen"]
    assert made(desktop=(NEW, 2, None), laptop=(OLD, 1, 12)).training["goes_on"] == NEW


def test_the_plan_is_that_of_the_hosts_without_the_older_training():
    assert made(desktop=(NEW, 2, 6), laptop=(OLD, 1, 12)).plan["digest"] == made(desktop=(NEW, 2, 6)).plan["digest"]


def test_the_older_one_goes_on_where_the_user_says_so_and_is_the_newest_then():
    outcome = made({"ddp_training": OLD}, desktop=(NEW, 2, 6), laptop=(OLD, 1, 12))
    assert (outcome.training["goes_on"], outcome.training["number"]) == (OLD, 3)
    assert older(outcome) == ["desktop"]
    with pytest.raises(PlanError, match=r"no host has that training of the run d4; available: 0+2 on desktop"):
        made({"ddp_training": OLD}, desktop=(NEW, 2, 6))


def test_of_two_that_are_equally_new_the_user_chooses():
    with pytest.raises(PlanError, match=r"none is newer: .* \(to step 6, begun .*ddp_training=ID"):
        made(desktop=(NEW, 2, 6), laptop=(OLD, 2, 12))
    chosen = made({"ddp_training": NEW}, desktop=(NEW, 2, 6), laptop=(OLD, 2, 12)).training
    assert (chosen["goes_on"], chosen["number"]) == (NEW, 3)
    fresh = made({"ddp_fresh": True}, desktop=(NEW, 2, 6), laptop=(OLD, 2, 12)).training
    assert (fresh["goes_on"], fresh["number"]) == (None, 3)


def test_what_no_id_is_known_of_goes_on_only_where_nothing_has_one():
    assert made(desktop=(None, 0, 6), laptop=(None, 0, 12)).training["goes_on"] == ""
    outcome = made(desktop=(NEW, 1, 6), laptop=(None, 0, 12))
    assert (outcome.training["goes_on"], older(outcome)) == (NEW, ["laptop"])


def test_a_host_with_the_same_training_is_not_older():
    outcome = made(desktop=(NEW, 2, 6), laptop=(NEW, 1, 4))
    assert (outcome.training["number"], older(outcome)) == (2, [])


def test_an_older_training_under_other_settings_does_not_stand_in_the_way():
    known = hosts()
    deployed = copy.deepcopy(make_plan(known).plan)
    deployed["model"]["depth"] = 8
    for host, name, number, of in ((known[0], NEW, 2, make_plan(known).plan), (known[1], OLD, 1, deployed)):
        training = {"id": name, "number": number, "begun": 0}
        host["probe"]["run"] = {"training": training, "checkpoints": [5], "lineage": lineage.of_plan(of)}
    assert make_plan(known).training["goes_on"] == NEW


@pytest.mark.parametrize("told", [{"id": "../x"}, {"id": 5}, [], {"id": OLD, "number": "x", "begun": 10**30}])
def test_a_host_may_tell_anything(told):
    known = hosts()
    known[0]["probe"]["run"] = {"training": told, "checkpoints": [5], "lineage": {}}
    assert make_plan(known).training["number"] == 1


def test_a_run_that_is_not_gone_on_from_begins_again():
    assert made({"ddp_resume": False}, desktop=(NEW, 2, 6)).training["goes_on"] is None
    assert made({"ddp_resume": False}, desktop=(NEW, 2, None)).training["goes_on"] == NEW
