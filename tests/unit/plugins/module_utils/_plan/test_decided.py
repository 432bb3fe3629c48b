# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The decisions beside the settings: their values, who made them, and that refusals blame nobody for them."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import resolve
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.decided import (
    decide_restarts,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, refusal

BEGUN = {"rows": {}, "sync": "int8", "checkpoints": [5]}


def rows(known: list[dict[str, Any]], **measured: dict[str, Any]) -> list[int]:
    return make_plan(known, measured=measured).plan["training"]["rows"]


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


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        ({}, 0),
        ({"ddp_profile": "real"}, 3),
        ({"ddp_profile": "real", "ddp_restarts": 0}, 0),
        ({"ddp_restarts": 5}, 5),
        ({"ddp_profile": "real", "ddp_resume": False}, 0),
        ({"ddp_profile": "real", "ddp_trainer_source": "/srv/nanochat"}, 0),
        # What somebody asks for stays, so that the plan can say why it cannot be.
        ({"ddp_restarts": 5, "ddp_resume": False}, 5),
    ],
)
def test_a_real_training_restarts_by_itself_where_its_trainer_can(given, restarts):
    asked = resolve([("desktop", given), ("laptop", given)])
    assert decide_restarts(asked) == restarts


def test_a_second_plan_goes_by_what_the_rehearsal_measured_and_changes_no_fact():
    known = hosts({"ddp_batch_split": "auto"})
    fast, slow = ({"tokens_per_second": speed} for speed in (900.0, 300.0))
    assert rows(known) == [2, 2]
    assert rows(known, desktop=fast, laptop=slow) == [3, 1]
    # It wins over an earlier measurement that a host kept.
    known[0]["probe"]["measured"], known[1]["probe"]["measured"] = slow, fast
    assert rows(known, desktop=fast, laptop=slow) == [3, 1]
