# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remarks about hosts, and what is no obstacle; tests/pins has each that is."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    GIGA,
    hosts,
    laptop,
    planned,
)

DISK = laptop()["disk"]


def test_data_and_checkpoints_that_are_there_need_no_room_again():
    little = {**DISK, "free": int(0.05 * GIGA)}
    plan = planned()
    there = {
        "data": [{"id": plan["data"]["id"], "bytes": 75_000_000}],
        "run": {"session": None, "checkpoints": [5, 10, 15]},
        "python": {**laptop()["python"], "venv": {"exists": True}},
    }
    assert planned({}, {"data": there["data"]}, {"disk": little, **there})["digest"] == plan["digest"]


# Processes of others

PROCESS = {"pid": 1480, "parent": 1, "user": "anna", "command": "python -m x", "session": None}


def trainings(*processes, **session):
    """The findings about these processes on the laptop, beside the session of its own run."""
    seen = {"processes": [{**PROCESS, **one} for one in processes], "run": {"session": session, "checkpoints": []}}
    return [(one["code"], one["seen"], one["remedy"]) for one in make_plan(hosts(two=seen)).findings]


def test_other_training_of_ours_is_stopped_by_its_playbook_and_that_of_others_is_named():
    books = {"session": "s9", "run": "books", "parent": 7}
    ((code, seen, remedy),) = trainings(books, {**books, "pid": 1481, "parent": 1480})
    assert (code, seen) == ("other-training", "the run books of anna trains there (process 1480)")
    assert "ddp_run=books" in remedy and "stops only what it started" not in remedy
    ((code, seen, remedy),) = trainings(
        books, {"pid": 2, "command": "x" * 700}, {**books, "session": "mine"}, id="mine"
    )
    assert "stops only what it started itself" in remedy and "process 2 of anna (xxx" in seen and len(seen) < 250


def test_ranks_that_lost_their_parent_are_told_from_trainings():
    left = {"session": "mine", "run": "d4", "user": "xiaoxin", "parent": 1}
    assert trainings(left, id="mine", ended=None) == []
    ((code, seen, dummy),) = trainings(left, id="mine", ended=7.0)
    assert (code, seen) == ("stale-ranks", "process 1480 of xiaoxin: python -m x")
    other = {**left, "session": "old"}
    told = trainings(other, {**other, "pid": 3, "parent": 1480}, {"pid": 5}, id="mine", ended=None)
    assert [code for code, *dummy in told] == ["stale-ranks", "other-training"]
    assert "process 5 of anna" in told[1][1] and "1480" not in told[1][1]
