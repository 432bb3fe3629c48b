# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans of ours are believed when a host brings them back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told_documents import believed_plans
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, one_machine

PLANS: list[dict[str, Any]] = [
    {}, {"ddp_profile": "real", "ddp_survive_reboot": True},
    {"ddp_profile": "real", "ddp_tracker": "mlflow", "ddp_port_range": "40000-40999"},
    {"ddp_secret_env": {"A": "b"}}, {"ddp_trainer_source": "https://example.org/nanochat.git"},
]  # fmt: skip


@pytest.mark.parametrize("run", PLANS)
@pytest.mark.parametrize("machines", [hosts, functools.partial(one_machine, 2)])
def test_a_plan_of_ours_is_believed(run, machines):
    plan = json.loads(json.dumps(make_plan(machines(run), ["torch==2.13.0"], tolerant=True).plan))
    assert believed_plans([plan], [node["host"] for node in plan["nodes"]]) == [plan]
    assert believed_plans([plan], ["elsewhere"]) == []
