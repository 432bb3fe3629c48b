# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The questions of the plan to the hosts."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import PlanError, questions
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    refusal,
)


def test_no_hosts():
    assert refusal([]) == ["There are no hosts to plan for; the inventory's group trainers is empty."]


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
