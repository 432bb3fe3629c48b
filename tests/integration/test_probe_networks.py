# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes of real networks, each in a namespace of its own, and what the plan makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import PlanError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces want root")

COLLECTIONS = Path(__file__).resolve().parents[2] / ".ansible/collections"
PROBE = """
import json, shutil, subprocess, sys
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host as host_facts
def run(argv):
    done = subprocess.run(list(argv), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr
find = shutil.which if sys.argv[3] == "with-ip" else lambda name: None if name == "ip" else shutil.which(name)
print(json.dumps(host_facts.probe(run, find, sys.argv[1], peers=sys.argv[2].split(","))))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def wait_for_carrier(namespace: str) -> None:
    """The kernel says a little later that the cable is in."""
    end = time.monotonic() + 10
    command = ["ip", "-n", namespace, "-j", "link", "show", "eth0"]
    while json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["operstate"] != "UP":
        assert time.monotonic() < end, f"eth0 of {namespace} did not come up"
        time.sleep(0.05)


@pytest.fixture
def network() -> Iterator[dict[str, str]]:
    """Two hosts with a cable between them, a bridge of containers on one, and an overlay on both."""
    names = {host: f"ddp{os.getpid()}{host}" for host in ("a", "b")}
    try:
        for name in names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names["a"], "type", "veth", "peer", "name", "eth0", "netns", names["b"])
        for number, name in enumerate(names.values(), 1):
            ip("-n", name, "addr", "add", f"10.7.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "tuntap", "add", "dev", "tailscale0", "mode", "tun")
            ip("-n", name, "addr", "add", f"100.64.0.{number}/10", "dev", "tailscale0")
            ip("-n", name, "link", "set", "tailscale0", "up")
        ip("-n", names["a"], "link", "add", "docker0", "type", "bridge")
        ip("-n", names["a"], "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", names["a"], "link", "set", "docker0", "up")
        for name in names.values():
            wait_for_carrier(name)
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def probe(namespace: str, folder: Path, peer: str, tool: str = "with-ip") -> dict[str, Any]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", PROBE, str(folder), peer, tool]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(COLLECTIONS)}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kinds(found: dict[str, Any]) -> dict[str, str]:
    return {nic["name"]: nic["kind"] for nic in found["nics"]}


def plan(one: dict[str, Any], two: dict[str, Any], **settings: Any) -> dict[str, Any]:
    hosts = [{"name": "a", "settings": settings, "probe": one}, {"name": "b", "settings": settings, "probe": two}]
    return make_plan(hosts, tolerant=True).plan


def test_field_03_the_card_is_told_from_bridge_and_overlay_and_taken(network, tmp_path):
    one, two = probe(network["a"], tmp_path / "a", "10.7.0.2"), probe(network["b"], tmp_path / "b", "10.7.0.1")
    assert kinds(one) == {"lo": "loopback", "eth0": "wired", "docker0": "bridge", "tailscale0": "overlay"}
    assert [nic["ipv4"] for nic in one["nics"] if nic["name"] == "eth0"] == [["10.7.0.1/24"]]
    made = plan(one, two)
    assert [(node["nic"], node["address"]) for node in made["nodes"]] == [("eth0", "10.7.0.1"), ("eth0", "10.7.0.2")]


def test_the_same_is_seen_without_the_ip_tool(network, tmp_path):
    with_ip, without = (probe(network["a"], tmp_path / "a", "10.7.0.2", tool) for tool in ("with-ip", "without-ip"))
    for found in (with_ip, without):
        for nic in found["nics"]:
            nic["ipv6"] = sorted(nic["ipv6"])
    assert without["nics"] == with_ip["nics"]
    for one, other in zip(without["routes"], with_ip["routes"], strict=True):
        assert (one["peer"], one["nic"], one["source"]) == (other["peer"], other["nic"], other["source"])


def test_field_05_a_route_through_the_overlay_is_seen_and_gone_around(network, tmp_path):
    one, two = probe(network["a"], tmp_path / "a", "100.64.0.2"), probe(network["b"], tmp_path / "b", "100.64.0.1")
    assert one["routes"][0]["nic"] == "tailscale0"
    assert [node["nic"] for node in plan(one, two)["nodes"]] == ["eth0", "eth0"]

    ip("-n", network["a"], "link", "set", "eth0", "down")
    cut = probe(network["a"], tmp_path / "a", "100.64.0.2")
    hosts = [{"name": "a", "settings": {}, "probe": cut}, {"name": "b", "settings": {}, "probe": two}]
    with pytest.raises(PlanError, match="a reaches its peers over tailscale0, which is an overlay network"):
        make_plan(hosts)
