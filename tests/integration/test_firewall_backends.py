# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""peer_firewall on the real firewalls: blocked at first, then open to the peer and closed to others, and restored at the end.

ufw and firewalld, which no machine gets for a test's sake, are tried in containers (molecule:firewalls)."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 29501), family=getattr(socket, sys.argv[2]))
print("up", flush=True)
while True:
    server.accept()[0].close()
"""
CLIENT = "import socket,sys\nsocket.create_connection((sys.argv[1],29501),1,(sys.argv[2],0))"
NFT = """
table inet filter {
  chain early {
    type filter hook input priority -10; policy accept;
    ct state invalid drop
  }
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    meta l4proto ipv6-icmp accept
  }
}
table ip late {
  chain input {
    type filter hook input priority 10; policy drop;
    ct state established accept
  }
}
"""
IPTABLES = [
    ("iptables", "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT"),
    ("iptables", "-P", "INPUT", "DROP"),
    ("ip6tables", "-A", "INPUT", "-p", "ipv6-icmp", "-j", "ACCEPT"),
    ("ip6tables", "-A", "INPUT", "-p", "tcp", "--dport", "29000:60000", "-j", "REJECT"),
]
OPEN = {"name": "d4", "peers": ["10.9.0.2", "fd09::2"], "ports": ["29500-29510"]}


@pytest.fixture
def lan(make_lan):
    """h0 has the firewall, h1 is the peer, h2 anybody else."""
    made = make_lan(3)
    servers = []
    try:
        for number, name in enumerate(made.names):
            subprocess.run(
                ["ip", "-n", name, "addr", "add", f"fd09::{number + 1}/64", "dev", "eth0", "nodad"], check=True
            )
        for address, family in (("10.9.0.1", "AF_INET"), ("fd09::1", "AF_INET6")):
            server = made.start(0, sys.executable, "-c", SERVER, address, family)
            servers.append(server)
            assert server.stdout.readline() == "up\n"
        yield made
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def reaches(lan, number, prefix="10.9.0."):
    words = [sys.executable, "-c", CLIENT, f"{prefix}1", f"{prefix}{number + 1}"]
    return (
        subprocess.run(["ip", "netns", "exec", lan.names[number], *words], capture_output=True, check=False).returncode
        == 0
    )


def use_nftables(lan):
    lan.run(0, "nft", "-f", "-", text=NFT)
    return lambda: lan.run(0, "nft", "list", "ruleset")


def use_iptables(lan):
    for command in IPTABLES:
        lan.run(0, *command)
    return lambda: lan.run(0, "iptables", "-S") + lan.run(0, "ip6tables", "-S")


@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_field_01_the_peer_is_let_in_and_nobody_else(lan, backend):
    rules = {"nftables": use_nftables, "iptables": use_iptables}[backend](lan)
    before = rules()
    assert not reaches(lan, 1)
    assert not reaches(lan, 1, "fd09::")

    planned = lan.module(0, "peer_firewall", _ansible_check_mode=True, **OPEN)
    assert planned["changed"]
    assert rules() == before

    done = lan.module(0, "peer_firewall", **OPEN)
    assert (done["changed"], done["backend"], done["rules"]) == (True, backend, planned["rules"])
    assert reaches(lan, 1)
    assert reaches(lan, 1, "fd09::")
    assert not reaches(lan, 2)
    assert not reaches(lan, 2, "fd09::")
    assert not lan.module(0, "peer_firewall", **OPEN)["changed"]

    lan.module(0, "peer_firewall", **{**OPEN, "name": "other"})
    assert lan.module(0, "peer_firewall", name="d4", state="absent")["changed"]
    assert reaches(lan, 1)  # the other job's rules are still there
    assert lan.module(0, "peer_firewall", name="other", state="absent")["changed"]
    assert rules() == before
    assert not reaches(lan, 1)
