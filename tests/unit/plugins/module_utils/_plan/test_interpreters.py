# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Python that a host's environment is made with."""

from __future__ import annotations

from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    desktop,
    hosts,
    laptop,
    refusal,
)


def test_a_python_that_all_hosts_have_is_preferred():
    def pythons(*versions: str) -> dict[str, Any]:
        found = [{"executable": f"/usr/bin/python{v}", "version": f"{v}.1", "venv_module": True} for v in versions]
        return {"python": {**desktop()["python"], "candidates": found}}

    outcome = make_plan(hosts({}, pythons("3.12", "3.11", "3.10"), pythons("3.13", "3.11", "3.10")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.11"] * 2
    outcome = make_plan(hosts({}, pythons("3.14", "3.12"), pythons("3.13")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.12", "/usr/bin/python3.13"]


def test_the_python_that_ansible_uses_comes_before_others_that_all_hosts_have():
    def pythons(used: str) -> dict[str, Any]:
        found = [
            {"executable": f"/usr/bin/python{v}", "version": f"{v}.1", "venv_module": True} for v in ("3.12", "3.11")
        ]
        return {"python": {**desktop()["python"], "version": used, "candidates": found}}

    outcome = make_plan(hosts({}, pythons("3.12.1"), pythons("3.12.1")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.12"] * 2
    # One that is too old for the trainer says nothing.
    outcome = make_plan(hosts({}, pythons("3.8.10"), pythons("3.8.10")))
    assert [entry["python"] for entry in outcome.plan["nodes"]] == ["/usr/bin/python3.11"] * 2


def test_field_36_a_python_is_made_where_none_is_new_enough_unless_there_is_no_network():
    old = {"python": {**laptop()["python"], "candidates": [], "version": "3.9.2"}}
    (problem,) = refusal(hosts({"ddp_trainer_offline": True}, two=old))
    assert (
        "laptop has no Python of 3.10 or newer (its own is 3.9.2), which the trainer needs; its user can install one"
        in problem
    )
    first = make_plan(hosts({"ddp_python_mirror": "file:///mnt/mirror"}, two=old))
    made = "/home/xiaoxin/nanochat-ddp/python/current/bin/python3"
    assert [node["python"] for node in first.plan["nodes"]] == ["/usr/bin/python3.11", made]
    assert first.plan["trainer"]["python_mirror"] == "file:///mnt/mirror"
    (told,) = [one for one in first.findings if one["code"] == "python-made"]
    assert "uv installs 3.12 once below /home/xiaoxin/nanochat-ddp/python" in told["seen"]
    # With the made one at hand the plan is the same.
    old["python"]["candidates"] = [{"executable": made, "version": "3.12.9", "venv_module": True}]
    again = make_plan(hosts({"ddp_python_mirror": "file:///mnt/mirror"}, two=old))
    assert again.plan["digest"] == first.plan["digest"]
    assert "the trainer uses 3.12, installed in" in next(
        one["seen"] for one in again.findings if one["code"] == "python-made"
    )
