# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How polite the plan makes training on each host, and what it refuses."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    planned,
    refusal,
)

SEEN = {"usage": {"graphical": ["xiaoxin"], "blind": []}}
GUEST = {"ddp_polite": "guest"}


def polite(plan):
    return [node["env"]["NANOCHAT_POLITE"] for node in plan["nodes"]]


def test_a_login_does_not_change_a_run_that_goes_on():
    run = {"exists": True, "session": None, "checkpoints": [], "polite": {"desktop": "off", "laptop": "off"}}
    assert polite(planned(two={**SEEN, "run": run})) == ["off", "off"]
    assert polite(planned(two={"run": {**run, "polite": {"laptop": "low"}}})) == ["off", "low"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({}, "which needs keepers to leave and come back by; set ddp_restarts"),
        ({"ddp_restarts": 3, "ddp_resume": False}, "which needs ddp_resume"),
    ],
)
def test_a_guest_that_could_not_leave_is_refused(run, words):
    assert f"ddp_polite is guest on laptop, {words}" in " ".join(refusal(hosts(run, two={"ddp_polite": "guest"})))
