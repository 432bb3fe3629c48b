# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for plays: a variable of several hosts, a setting or its default, the order of shard servers."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.filter.values import of_hosts, one_run, seen_of, setting, shard_chain


def test_a_host_without_the_variable_is_not_left_out():
    hostvars = {
        "desktop": {"seen": {"run": {"run": "d4", "state": "running", "session_age": 1.0}}},
        "laptop": {},
        "off": {},
    }
    found = of_hosts(["desktop", "laptop"], hostvars, "seen")
    assert list(found) == ["desktop", "laptop"] and found["laptop"] is None
    assert of_hosts(["laptop"], hostvars, "seen", {}) == {"laptop": {}}
    assert [one.problem for one in seen_of(found)] == [None, "it did not answer"]
    assert one_run(found) == "d4"


def test_a_variable_that_no_host_has_is_a_mistake():
    with pytest.raises(AnsibleFilterError, match="none of desktop, laptop has a variable sen"):
        of_hosts(["desktop", "laptop"], {"desktop": {"seen": 1}, "laptop": {}}, "sen")
    assert of_hosts([], {}, "seen") == {}


@pytest.mark.parametrize(("given", "taken"), [(None, "~/nanochat-ddp"), ("", "~/nanochat-ddp"), ("/data", "/data")])
def test_an_empty_setting_has_its_default(given, taken):
    assert setting(given, "ddp_base_dir") == taken


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
