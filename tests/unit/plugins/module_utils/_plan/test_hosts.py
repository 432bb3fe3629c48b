# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks, and the interface and address by which each host is reached."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    codes,
    desktop,
    findings_with,
    hosts,
    laptop,
    nic,
    node,
    planned,
    route,
)


def test_field_05_an_overlay_on_the_route_is_gone_around():
    overlay = nic("tailscale0", "overlay", "100.64.0.7/32")
    way = [route("100.64.0.8", "tailscale0", "100.64.0.7")]
    wired = nic("enp4s0", "wired", "192.168.1.10/24", speed=1000)
    outcome = make_plan(hosts(one={"nics": [wired, overlay], "routes": way}))
    assert node(outcome, "desktop")["nic"] == "enp4s0"
    assert codes(outcome) == []


def test_without_names_the_common_network_decides():
    cards = [
        nic("eno1", "wired", "10.0.0.5/24"),
        nic("eno2", "wired", "192.168.1.10/24"),
        nic("wlan0", "wifi", "192.168.1.30/24"),
    ]
    nowhere = {"peer": "default", "nic": None, "source": None}
    outcome = make_plan(hosts(one={"nics": cards, "routes": [nowhere]}))
    assert (node(outcome, "desktop")["nic"], node(outcome, "desktop")["address"]) == ("eno2", "192.168.1.10")


def test_containers_of_one_kernel_are_hosts_of_their_own():
    known = hosts()
    for number, host in enumerate(known):
        host["probe"]["host"].update(boot_id="same", network_namespace=f"net:[{number}]")
    outcome = make_plan(known)
    assert [entry["address"] for entry in outcome.plan["nodes"]] == ["192.168.1.10", "192.168.1.11"]
    # But they share the cores of the machine.
    assert [entry["threads"] for entry in outcome.plan["nodes"]] == [4, 2]


# Pythons


def pythons(*versions: str, used: str = "3.11.2") -> dict[str, Any]:
    found = [{"executable": f"/usr/bin/python{v}", "version": f"{v}.1"} for v in versions]
    return {"python": {**desktop()["python"], "version": used, "candidates": found}}


@pytest.mark.parametrize(
    ("one", "two", "taken"),
    [
        # One that all hosts have is preferred, of these the one that Ansible uses, unless that is too old for the trainer.
        (pythons("3.12", "3.11", "3.10"), pythons("3.13", "3.11", "3.10"), ["3.11", "3.11"]),
        (pythons("3.14", "3.12"), pythons("3.13"), ["3.12", "3.13"]),
        (pythons("3.12", "3.11", used="3.12.1"), pythons("3.12", "3.11", used="3.12.1"), ["3.12", "3.12"]),
        (pythons("3.12", "3.11", used="3.9.2"), pythons("3.12", "3.11", used="3.9.2"), ["3.11", "3.11"]),
    ],
)
def test_which_python_is_taken_of_several(one, two, taken):
    plan = planned({}, one, two)
    assert [entry["python"] for entry in plan["nodes"]] == [f"/usr/bin/python{version}" for version in taken]


def test_field_36_with_the_python_that_was_made_at_hand_the_plan_is_the_same():
    old = {"python": {**laptop()["python"], "candidates": [], "version": "3.9.2"}}
    first = make_plan(hosts(two=old))
    made = "/home/xiaoxin/nanochat-ddp/python/current/bin/python3"
    assert [node["python"] for node in first.plan["nodes"]] == ["/usr/bin/python3.11", made]
    old["python"]["candidates"] = [{"executable": made, "version": "3.12.9"}]
    again = make_plan(hosts(two=old))
    assert again.plan["digest"] == first.plan["digest"]
    (told,) = findings_with(again, "python-made")
    assert "the trainer uses 3.12, installed in" in told["seen"]
