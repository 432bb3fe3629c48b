# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Interfaces, routes and firewalls, from files and answers as real hosts have them."""

from __future__ import annotations

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


def test_field_04_names_are_resolved_as_this_host_does(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "desktop")
    table = {"desktop": ["127.0.1.1"], "laptop": ["192.168.1.11", "192.168.1.11"], "192.168.1.12": ["192.168.1.12"]}

    def lookup(name: str, *rest: Any, **more: Any) -> list[Any]:
        if name not in table:
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (address, 0)) for address in table[name]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    names, routes = net.names_and_routes(["laptop", "nowhere", "192.168.1.12"], [])
    assert names == {"own": ["127.0.1.1"], "peers": {"laptop": ["192.168.1.11"], "nowhere": []}}
    assert [entry["peer"] for entry in routes] == ["laptop", "192.168.1.12", "default"]


def test_addresses_that_will_be_others_tomorrow_are_left_out(monkeypatch):
    lines = [
        "fd09000000000000000000000000000a 02 40 00 80     eth0",
        "fd09000000000000000000000000000b 02 40 00 01     eth0",
        "fd09000000000000000000000000000c 02 40 00 20     eth0",
        "fd09000000000000000000000000000d 03 40 00 80     eth1",
    ]
    monkeypatch.setattr(net, "read", lambda path: "\n".join(lines))
    assert net.ipv6_addresses() == {"eth0": ["fd09::a/64"], "eth1": ["fd09::d/64"]}


def test_the_kernel_tells_addresses_and_the_interface_towards_a_peer():
    assert net.ipv4_addresses()["lo"] == ["127.0.0.1/8"]
    found = net.route("self", "127.0.0.1", [{"name": "lo", "ipv4": ["127.0.0.1/8"], "ipv6": []}])
    assert (found["nic"], found["source"]) == ("lo", "127.0.0.1")
    assert net.route("x", "no address", [])["nic"] is None


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
