# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes of real networks, each in a namespace of its own, and what the plan makes of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.integration.lan import COLLECTIONS, Lan
from ansible_collections.nanochat.ddp.tests.integration.local import until

PROBE = """
import json, sys
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host as host_facts
print(json.dumps(host_facts.probe(sys.argv[1], peers=sys.argv[2].split(","))))
"""


@pytest.fixture
def network(lan: Lan) -> Lan:
    """A bridge of containers on one of two hosts, and an overlay on both."""
    for number in range(2):
        lan.run(number, "ip", "tuntap", "add", "dev", "tailscale0", "mode", "tun")
        lan.run(number, "ip", "addr", "add", f"100.64.0.{number + 1}/10", "dev", "tailscale0")
        lan.run(number, "ip", "link", "set", "tailscale0", "up")
    lan.run(0, "ip", "link", "add", "docker0", "type", "bridge")
    lan.run(0, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
    lan.run(0, "ip", "link", "set", "docker0", "up")
    # The kernel says a little later that the cable is in.
    until(lambda: {lan.run(number, "cat", "/sys/class/net/eth0/operstate") for number in range(2)} == {"up\n"})
    return lan


def probe(lan: Lan, number: int, peer: str) -> dict[str, Any]:
    argv = [sys.executable, "-c", PROBE, f"{lan.folder}/h{number}", peer]
    found: dict[str, Any] = json.loads(lan.run(number, "env", f"PYTHONPATH={COLLECTIONS}", *argv))
    return found


def kinds(found: dict[str, Any]) -> dict[str, str]:
    return {nic["name"]: nic["kind"] for nic in found["nics"]}


def plan(one: dict[str, Any], two: dict[str, Any], **settings: Any) -> dict[str, Any]:
    hosts = [{"name": "a", "settings": settings, "probe": one}, {"name": "b", "settings": settings, "probe": two}]
    return make_plan(hosts, tolerant=True).plan


def test_field_03_the_card_is_told_from_bridge_and_overlay_and_taken(network):
    network.run(0, "ip", "addr", "add", "10.8.0.1/16", "dev", "eth0")
    one, two = probe(network, 0, "10.9.0.2"), probe(network, 1, "10.9.0.1")
    assert kinds(one) == {"lo": "loopback", "eth0": "wired", "docker0": "bridge", "tailscale0": "overlay"}
    assert [nic["ipv4"] for nic in one["nics"] if nic["name"] == "eth0"] == [["10.9.0.1/24", "10.8.0.1/16"]]
    made = plan(one, two)
    assert [(node["nic"], node["address"]) for node in made["nodes"]] == [("eth0", "10.9.0.1"), ("eth0", "10.9.0.2")]


def test_field_05_a_route_through_the_overlay_is_seen_and_gone_around(network):
    one, two = probe(network, 0, "100.64.0.2"), probe(network, 1, "100.64.0.1")
    assert one["routes"][0]["nic"] == "tailscale0"
    assert [node["nic"] for node in plan(one, two)["nodes"]] == ["eth0", "eth0"]

    network.run(0, "ip", "link", "set", "eth0", "down")
    cut = probe(network, 0, "100.64.0.2")
    hosts = [{"name": "a", "settings": {}, "probe": cut}, {"name": "b", "settings": {}, "probe": two}]
    with pytest.raises(PlanError, match="a reaches its peers over tailscale0, which is an overlay network"):
        make_plan(hosts)
