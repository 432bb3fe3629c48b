# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.filter.values import shard_chain

NODES = [
    {"host": host, "address": f"192.0.2.{number}", "nic": nic}
    for number, (host, nic) in enumerate({"a": "eth0", "b": "wlp2s0", "c": "eth0", "d": "eth0"}.items(), 1)
]
SERVERS = {node["host"]: {"server": {"host": "x", "address": "198.51.100.1", "port": 40000}} for node in NODES}
LINK = {"address": "192.0.2.9", "ports": [], "latency_ms": 1.0, "error": "", "nic": None}


def links(*rates: float) -> dict:
    return {"links": [{**LINK, "bandwidth_mbit": rate} for rate in rates]}


def order(measured: dict, servers: dict | None = None, first: str = "a") -> str:
    return "".join(one["host"] for one in shard_chain(servers or SERVERS, measured, NODES, first))


def test_the_source_is_first_then_the_fastest_and_those_on_wifi_are_last():
    assert order({}) == "acdb" and order({}, first="b") == "bacd"
    # One slow peer makes no slow host.
    assert order({"c": links(10.0, 90.0), "d": links(10.0, 940.0), "b": links(2000.0, 10.0)}) == "adcb"


def test_the_addresses_are_those_of_the_plan():
    assert shard_chain(SERVERS, {}, NODES, "a")[0] == {"host": "a", "address": "192.0.2.1", "port": 40000}


def test_a_host_that_tells_nonsense_is_left_out():
    for told in (None, "x", {}, {"server": 7}, {"server": {"port": "22"}}, {"server": {"port": 22}}):
        assert order({}, {**SERVERS, "c": told}) == "adb"
