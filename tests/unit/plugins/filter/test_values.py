# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for plays: a variable of several hosts, the order of shard servers."""

from __future__ import annotations

import shlex

import pytest
from ansible_collections.nanochat.ddp.plugins.filter.values import of_hosts, one_run, results_dir, seen_of, shard_chain
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.plugin_utils._runs import command_on


def test_a_host_without_the_variable_is_not_left_out():
    hostvars = {
        "desktop": {"seen": {"run": {**EMPTY, "run": "d4", "state": "running"}}},
        "laptop": {},
        "off": {},
    }
    found = of_hosts(["desktop", "laptop"], hostvars, "seen")
    assert list(found) == ["desktop", "laptop"] and found["laptop"] is None
    assert of_hosts(["laptop"], hostvars, "seen", {}) == {"laptop": {}}
    assert [one.problem for one in seen_of(found)] == [None, "it did not answer"]
    assert one_run(found) == "d4"


def test_results_lie_where_the_playbook_is_called(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert [results_dir(one) for one in ("", "mine", "/data")] == [f"{tmp_path}/runs", f"{tmp_path}/mine", "/data"]


LOG = "/srv/my runs/rank1.log"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, ["ssh", "laptop"]),
        (
            {"ansible_host": "10.0.0.2", "ansible_user": "xiaoxin", "ansible_port": 22},
            ["ssh", "-p", "22", "xiaoxin@10.0.0.2"],
        ),
        ({"ansible_ssh_private_key_file": "/my key"}, ["ssh", "-i", "/my key", "laptop"]),
        ({"ansible_ssh_common_args": "-J 'gate way' -v"}, ["ssh", "-J", "gate way", "-v", "laptop"]),
    ],
)
def test_a_command_for_a_host_is_reached_as_ansible_reaches_it(known, words):
    *before, command = shlex.split(command_on("laptop", known, ["tail", "-F", LOG]))
    assert before == words and shlex.split(command) == ["tail", "-F", LOG]
    assert shlex.split(command_on("laptop", known, forwarding=["-N"])) == ["ssh", "-N", *words[1:]]


def test_a_command_for_this_machine_needs_no_ssh():
    assert shlex.split(command_on("laptop", {"ansible_connection": "local"}, ["tail", "-F", LOG])) == [
        "tail",
        "-F",
        LOG,
    ]


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
