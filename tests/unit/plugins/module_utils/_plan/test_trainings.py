# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which training a start goes on with, and whether the run is in progress or done."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import PlanOutcome, make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.trainings import so_far
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    findings_with,
    hosts,
    planned,
)

OLD, NEW = "0" * 15 + "1", "0" * 15 + "2"


def made(
    settings: dict[str, Any] | None = None, tolerant: bool = False, **held: tuple[str | None, int, int | None]
) -> PlanOutcome:
    """The plan where hosts hold a training: its id, its number and its newest step."""
    known, deployed = hosts(settings), planned()
    for host in known:
        if host["name"] in held:
            name, number, step = held[host["name"]]
            host["probe"]["run"] = {
                "path": f"/home/my {host['name']}/runs/d4",
                "training": {"id": name, "number": number, "begun": 1000 * number} if name else None,
                "checkpoints": [] if step is None else [step],
                "lineage": lineage.of_plan(deployed),
            }
    return make_plan(known, tolerant=tolerant)


def test_where_there_is_nothing_one_begins():
    assert made().training == {"id": "", "number": 1, "begun": 0, "goes_on": None, "base": None}


def test_one_training_on_all_hosts_goes_on_whichever_of_them_came_further():
    outcome = made(desktop=(NEW, 2, 6), laptop=(NEW, 2, 12))
    assert outcome.training == {"id": NEW, "number": 2, "begun": 2000, "goes_on": NEW, "base": None}
    assert made(desktop=(None, 0, 6), laptop=(None, 0, 12)).training["goes_on"] == ""


@pytest.mark.parametrize("other", [(OLD, 1, 12), (OLD, 2, None), (None, 0, 12)])
def test_two_trainings_are_refused_with_both_folders_and_the_command_that_sets_one_aside(other):
    held = {"desktop": (NEW, 2, 6), "laptop": other}
    with pytest.raises(PlanError) as caught:
        made(**held)
    [found] = caught.value.findings
    assert (found["code"], found["host"]) == ("trainings-differ", "laptop")
    assert f"{NEW} in /home/my desktop/runs/d4 on desktop (to step 6" in found["seen"]
    assert "in /home/my laptop/runs/d4 on laptop" in found["seen"]
    words = shlex.split(found["remedy"].partition("that of laptop: ")[2])
    assert words[:6] == ["ansible", "laptop", "-i", "INVENTORY", "-m", "ansible.builtin.command"]
    assert shlex.split(words[7].rstrip(".")) == ["mv", "/home/my laptop/runs/d4", "/home/my laptop/d4-set-aside"]
    fresh = made({"ddp_fresh": True}, **held).training
    assert (fresh["goes_on"], fresh["number"]) == (None, 3)


def test_who_only_looks_is_told_of_two_trainings():
    outcome = made(tolerant=True, desktop=(NEW, 2, 6), laptop=(OLD, 1, 12))
    assert [found["host"] for found in findings_with(outcome, "trainings-differ")] == ["laptop"]
    assert outcome.training["goes_on"] == NEW


@pytest.mark.parametrize("told", [{"id": "../x"}, {"id": 5}, [], {"id": OLD, "number": "x", "begun": 10**30}])
def test_a_host_may_tell_anything(told):
    known = hosts()
    known[0]["probe"]["run"] = {"training": told, "checkpoints": [5], "lineage": {}}
    assert make_plan(known).training["number"] == 1


def test_a_run_that_is_not_gone_on_from_begins_again():
    assert made({"ddp_resume": False}, desktop=(NEW, 2, 6)).training["goes_on"] is None
    assert made({"ddp_resume": False}, desktop=(NEW, 2, None)).training["goes_on"] == NEW


def probe(digest: str = "d1", exit_code: int | None = 0, alive: bool = False, stopped: bool = False) -> dict[str, Any]:
    processes = [{"session": "s1"}] if alive else [{"session": "of another run"}, {"session": None}]
    return {
        "run": {"plan_digest": digest, "session": {"id": "s1", "exit_code": exit_code, "stopped": stopped}},
        "processes": processes,
    }


@pytest.mark.parametrize(
    ("of_laptop", "running", "done"),
    [
        (probe(), False, True),
        (probe(exit_code=None, alive=True), True, False),
        (probe(exit_code=1), False, False),
        (probe(exit_code=None), False, False),
        (probe("d2"), False, False),
        (probe(stopped=True), False, False),
        ({"run": None, "processes": [{"session": None}]}, False, False),
        (None, False, False),
    ],
)
def test_a_run_is_in_progress_with_any_host_and_done_with_all(of_laptop, running, done):
    probes = {"desktop": probe(), "laptop": of_laptop}
    assert so_far("d1", probes, fresh=False) == {"running": running, "done": done, "deployed": False}
    assert so_far("d1", probes, fresh=True) == {"running": running, "done": False, "deployed": False}


def test_a_trainer_is_deployed_where_environment_and_test_programs_are():
    there = {**probe(), "python": {"venv": {"exists": True}}, "trainer": True}
    for of_laptop, deployed in ((there, True), ({**there, "trainer": False}, False), (probe(), False)):
        assert so_far("d1", {"desktop": there, "laptop": of_laptop}, fresh=False)["deployed"] is deployed
