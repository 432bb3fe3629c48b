# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The flags and the environment of a rank, and its keeper."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    lan,
)


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
