# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Interfaces, routes and firewalls, from files and answers as real hosts have them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import network as net


def card(root: Path, name: str, files: dict[str, str] | None = None, folders: Sequence[str] = ()) -> None:
    """One interface as /sys/class/net shows it."""
    folder = root / name
    folder.mkdir()
    for file, text in {"type": "1", "operstate": "up", "flags": "0x1003", **(files or {})}.items():
        (folder / file).write_text(text + "\n")
    for child in folders:
        (folder / child).mkdir(parents=True)


def answers(table: dict[str, tuple[int, str]]) -> net.Run:
    """A run function that knows some commands."""

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        code, out = table.get(" ".join(argv), (1, ""))
        return code, out, ""

    return run


@pytest.mark.parametrize(
    ("name", "files", "folders", "kind"),
    [
        ("enp4s0", {}, ["device"], "wired"),
        ("enx00e04c680001", {}, ["device"], "wired"),
        ("wlp3s0", {}, ["device", "wireless"], "wifi"),
        ("wlan0", {}, ["device", "phy80211"], "wifi"),
        ("lo", {"type": "772"}, [], "loopback"),
        ("tailscale0", {"type": "65534", "tun_flags": "0x1001"}, [], "overlay"),
        ("wg-home", {"type": "65534", "uevent": "DEVTYPE=wireguard"}, [], "overlay"),
        ("zt7nnig26", {}, [], "overlay"),
        ("docker0", {}, ["bridge", "brif/veth1"], "bridge"),
        ("br-5f2a", {}, ["bridge"], "bridge"),
        ("veth1a2b", {}, [], "virtual"),
        ("bond0", {"uevent": "DEVTYPE=bond"}, [], "wired"),
        ("enp4s0.20", {"uevent": "DEVTYPE=vlan"}, [], "wired"),
        ("dummy0", {}, [], "virtual"),
    ],
)
def test_field_03_kinds_of_interfaces(tmp_path, name, files, folders, kind):
    card(tmp_path, name, files, folders)
    assert net.kind_of(name, str(tmp_path)) == kind


def test_a_bridge_over_a_real_card_is_the_way_out_of_a_home_server(tmp_path):
    card(tmp_path, "enp4s0", {}, ["device"])
    card(tmp_path, "br0", {}, ["bridge", "brif/enp4s0", "brif/vnet0"])
    assert net.kind_of("br0", str(tmp_path)) == "wired"


@pytest.mark.parametrize(
    ("state", "flags", "up"),
    [("up", "0x1003", True), ("down", "0x1003", False), ("unknown", "0x1003", True), ("unknown", "0x1002", False)],
)
def test_whether_an_interface_is_up(tmp_path, state, flags, up):
    card(tmp_path, "tun0", {"operstate": state, "flags": flags})
    assert net.is_up("tun0", str(tmp_path)) is up


def test_a_containers_only_card_counts_as_a_cable():
    own = {"name": "eth0", "kind": "virtual", "enslaved": False, "ipv4": ["10.88.0.2/16"], "ipv6": []}
    hosts_end = {"name": "veth1", "kind": "virtual", "enslaved": True, "ipv4": [], "ipv6": ["fe80::1/64"]}
    idle = {"name": "dummy0", "kind": "virtual", "enslaved": False, "ipv4": [], "ipv6": []}
    kinds = [nic["kind"] for nic in net.promote_container_nics([own, hosts_end, idle])]
    assert kinds == ["wired", "virtual", "virtual"]
    wired = {"name": "enp4s0", "kind": "wired", "enslaved": False, "ipv4": [], "ipv6": []}
    assert [nic["kind"] for nic in net.promote_container_nics([own, wired])] == ["virtual", "wired"]


def test_addresses_from_ip():
    links = [
        {
            "ifname": "eth0@if5",
            "addr_info": [
                {"family": "inet", "local": "192.168.1.10", "prefixlen": 24},
                {"family": "inet6", "local": "fd00::1", "prefixlen": 64},
                {"family": "inet"},
            ],
        }
    ]
    found = net.addresses_by_ip(answers({"ip -j addr": (0, json.dumps(links))}))
    assert found == {"eth0": (["192.168.1.10/24"], ["fd00::1/64"])}
    assert net.addresses_by_ip(answers({"ip -j addr": (0, "Option -j is unknown")})) == {}


def test_addresses_without_ip_are_the_same():
    assert net.ipv4_of("lo") == ["127.0.0.1/8"]
    assert net.ipv4_of("nosuch0") == []


def test_field_05_the_route_says_which_interface_really_carries_a_peer():
    said = [{"dst": "100.64.0.8", "dev": "tailscale0", "prefsrc": "100.64.0.7"}]
    found = net.route("laptop", "100.64.0.8", [], answers({"ip -j route get 100.64.0.8": (0, json.dumps(said))}))
    assert found == {
        "peer": "laptop",
        "address": "100.64.0.8",
        "nic": "tailscale0",
        "source": "100.64.0.7",
    }


def test_the_route_without_ip_is_found_by_the_kernels_choice():
    interfaces = [{"name": "lo", "ipv4": ["127.0.0.1/8"], "ipv6": []}]
    found = net.route("self", "127.0.0.1", interfaces, answers({}))
    assert (found["nic"], found["source"]) == ("lo", "127.0.0.1")


def test_no_route_is_no_error():
    found = net.route("x", "192.168.77.1", [], answers({"ip -j route get 192.168.77.1": (2, "")}))
    assert found["nic"] is None


def test_field_04_names_are_resolved_as_this_host_does(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "desktop")
    table = {"desktop": ["127.0.1.1"], "laptop": ["192.168.1.11", "192.168.1.11"]}

    def lookup(name: str, *rest: Any, **more: Any) -> list[Any]:
        if name not in table:
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (address, 0)) for address in table[name]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    names, routes = net.names_and_routes(["laptop", "nowhere", "192.168.1.12"], [], answers({}))
    assert names == {"own": ["127.0.1.1"], "peers": {"laptop": ["192.168.1.11"], "nowhere": []}}
    assert [entry["peer"] for entry in routes] == ["laptop", "192.168.1.12", "default"]


@pytest.mark.parametrize(
    "said", ["{}", "null", "[1, null]", '[{"ifname": 7, "addr_info": 3}]', "[" * 3000, "nonsense", '"x"']
)
def test_whatever_ip_says_is_no_traceback(said):
    assert all(not four and not six for four, six in net.addresses_by_ip(lambda argv: (0, said, "")).values())
    found = net.route("laptop", "192.0.2.1", [], lambda argv: (0, said, ""))
    assert found["peer"] == "laptop"


def test_addresses_that_will_be_others_tomorrow_are_left_out():
    entries = [
        {"family": "inet6", "local": "2001:db8::1", "prefixlen": 64},
        {"family": "inet6", "local": "2001:db8::2", "prefixlen": 64, "temporary": True},
        {"family": "inet6", "local": "2001:db8::3", "prefixlen": 64, "deprecated": True},
    ]
    said = json.dumps([{"ifname": "eth0", "addr_info": entries}])
    assert net.addresses_by_ip(lambda argv: (0, said, "")) == {"eth0": ([], ["2001:db8::1/64"])}


def test_nor_are_they_taken_where_there_is_no_ip(monkeypatch):
    lines = [
        "fd09000000000000000000000000000a 02 40 00 80     eth0",
        "fd09000000000000000000000000000b 02 40 00 01     eth0",
        "fd09000000000000000000000000000c 02 40 00 20     eth0",
        "fd09000000000000000000000000000d 03 40 00 80     eth1",
    ]
    monkeypatch.setattr(net, "read", lambda path: "\n".join(lines))
    assert net.ipv6_of("eth0") == ["fd09::a/64"]


def test_field_42_a_name_server_that_does_not_answer_costs_its_time_once(monkeypatch):
    never = threading.Event()

    def getaddrinfo(name, *dummy, **more):
        if name != "known":
            never.wait(60)
        return [(2, 1, 6, "", ("192.0.2.7", 0))]

    monkeypatch.setattr(net.socket, "getaddrinfo", getaddrinfo)
    begin = time.monotonic()
    found = net.resolve_all(["known", *(f"h{number}" for number in range(20))], patience=0.5)
    assert time.monotonic() - begin < 20
    assert found.pop("known") == ["192.0.2.7"]
    assert set(map(tuple, found.values())) == {()}
    never.set()
