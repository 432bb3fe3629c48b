"""Four firewalls between the hosts of one job: closed at first, then open to the job's hosts only, and restored at the end."""

from __future__ import annotations

import json

import pytest
from lab import wait_for

ADDRESSES = {"ufw": "10.89.73.11", "firewalld": "10.89.73.12", "nftables": "10.89.73.13", "iptables": "10.89.73.14"}
HOSTS = list(ADDRESSES)
STRANGER = "neighbour"
MASTER = "ufw"
# The rendezvous port and one of those on which Gloo may listen.
PORTS = [29500, 40123]

SERVER = (
    """
import socket, time
servers = [socket.create_server(("", port), backlog=64) for port in %s]
time.sleep(1800)
"""
    % PORTS
)
CLIENT = """
import concurrent.futures, json, socket, sys
def tries(way):
    try:
        socket.create_connection(way, 1).close()
    except OSError:
        return False
    return True
ways = [(address, port) for address in json.loads(sys.argv[1]) for port in json.loads(sys.argv[2])]
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    print(json.dumps([[*way, open_] for way, open_ in zip(ways, pool.map(tries, ways))]))
"""
# All that the kernel filters by and all that is loaded at boot, without counters and dates. firewalld copies a zone of its
# own to /etc when it is first changed, so it is asked what its zones are.
RULES = (
    "nft -s list ruleset; for t in iptables ip6tables; do $t-save | grep -v '^#' | sed 's/\\[[0-9:]*\\]//'; done; "
    "find /etc/ufw /etc/iptables /etc/nftables.conf -type f 2>/dev/null | sort | xargs sha256sum; "
    "if firewall-cmd -q --state 2>/dev/null; then firewall-cmd --list-all-zones; firewall-cmd --permanent --list-all-zones; fi"
)


def reached(lab):
    """Which host reaches which host of the job on which port, tried from every host at real listeners."""
    for host in HOSTS:
        lab.on(host, f"python3 -c '{SERVER}' >/dev/null 2>&1 </dev/null & echo $! >/tmp/server")
    try:
        for host in HOSTS:
            wait_for("the listeners", lambda host=host: all(f":{port} " in lab.on(host, "ss -Hltn") for port in PORTS))
        return {(host, *way) for host in [*HOSTS, STRANGER] for way in ways(lab, host)}
    finally:
        for host in HOSTS:
            lab.on(host, "kill $(cat /tmp/server)")


def ways(lab, host):
    others = {address: name for name, address in ADDRESSES.items() if name != host}
    found = json.loads(lab.on(host, f"python3 -c '{CLIENT}' '{json.dumps(list(others))}' '{PORTS}'"))
    return [(others[address], port) for address, port, is_open in found if is_open]


def rules(lab):
    return {host: lab.on(host, RULES) for host in HOSTS}


@pytest.fixture(scope="module")
def before(lab):
    return rules(lab)


def test_field_01_before_everything_is_closed_and_preflight_says_so(lab, before):
    assert reached(lab) == set()
    lab.play("-e", f"preflight_file={lab.kept}/closed.json", playbook="preflight", code=2)
    found = json.loads((lab.kept / "closed.json").read_text())["findings"]
    blocked = {(one["peer"], one["host"]): one for one in found if one["code"] == "port-blocked"}
    assert set(blocked) == {(one, other) for one in HOSTS for other in HOSTS if one != other}
    for (dummy, host), one in blocked.items():
        # The finding names the firewall that closes the way.
        assert f"{host} is active on {host}" in one["seen"]
    assert rules(lab) == before, "preflight changed something"


def test_field_01_check_mode_says_what_would_be_opened(lab, before):
    said = lab.play("--tags", "network", "--check")
    for host in HOSTS:
        assert f"would change on {host}: Open this job's ports to the peers" in said
    assert rules(lab) == before


def test_field_01_network_opens_the_ports_to_the_peers_only(lab, before):
    said = lab.play("--tags", "network")
    for host in HOSTS:
        assert f"{host} 1" in said
    data = {(one, other, PORTS[1]) for one in HOSTS for other in HOSTS if one != other}
    # Nobody listens for a rendezvous but the master, so the port is open there only.
    assert reached(lab) == data | {(one, MASTER, PORTS[0]) for one in HOSTS if one != MASTER}


def test_the_second_time_nothing_changes(lab, before):
    opened = rules(lab)
    assert "changed: nothing" in lab.play("--tags", "network")
    assert rules(lab) == opened != before


def test_field_01_preflight_finds_every_way_open(lab):
    lab.play("-e", f"preflight_file={lab.kept}/open.json", playbook="preflight")
    found = json.loads((lab.kept / "open.json").read_text())["findings"]
    assert not [one for one in found if one["severity"] == "error" or "port" in one["code"]]


def test_field_23_reset_leaves_every_rule_set_as_it_was(lab, before):
    said = lab.play(playbook="reset")
    for host in HOSTS:
        assert f"{host} 1" in said
    assert rules(lab) == before
    assert reached(lab) == set()
    assert "changed: nothing" in lab.play(playbook="reset")
