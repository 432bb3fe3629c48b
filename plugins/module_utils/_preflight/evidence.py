# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence about a plan and its hosts before a start, and the pairing of hosts. Pure functions."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from .._contract import validate
from .._contract.document import items, section
from .._contract.findings import Finding
from .._contract.plan import Node, Plan
from .peer_check import closed_ports

# Up to this many hosts every pair is tested; beyond it this many rings over all hosts, including the ranks' ring.
ALL_PAIRS = 16
RINGS = 3


class PreflightEvidence(NamedTuple):
    """Everything known by host: probes, tries (from peer_responder and peer_check), firewalls (predicted by
    peer_firewall), gloo (the all-reduce), manifests (digest of each host's data), files (those that do not
    match the manifest, and how).
    Hosts may be missing and mappings empty."""

    plan: Plan
    probes: Mapping[str, Mapping[str, Any]]
    tries: Mapping[str, Mapping[str, Any]] = {}
    firewalls: Mapping[str, Mapping[str, Any]] = {}
    gloo: Mapping[str, Mapping[str, Any]] = {}
    manifests: Mapping[str, str] = {}
    files: Mapping[str, Mapping[str, str]] = {}
    plan_findings: Sequence[Finding] = ()
    # Whether the network step still comes, which opens closed ports.
    before_network: bool = False
    rehearsal: bool = False
    running: bool = False

    def fact(self, host: str, *keys: str) -> Any:
        """A fact of a host's probe, None if unknown."""
        value: Any = self.probes.get(host) or {}
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def node(self, host: str) -> Node:
        """A host's part of the plan."""
        return next(node for node in self.plan["nodes"] if node["host"] == host)

    def nic(self, host: str, name: str | None) -> Mapping[str, Any]:
        """A host's network interface; empty if unknown."""
        return next((nic for nic in self.fact(host, "nics") or [] if nic["name"] == name), {})

    def links(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Every tested direction: the host, and its link to a peer."""
        for host, tried in self.tries.items():
            for link in tried.get("links") or []:
                yield host, link


def others_in_turn(plan: Plan, host: str) -> list[str]:
    """The other hosts from the next rank on, so that at any moment all hosts measure towards different ones."""
    hosts = [node["host"] for node in plan["nodes"]]
    at = hosts.index(host)
    return hosts[at + 1 :] + hosts[:at]


def partners(plan: Plan, host: str) -> list[str]:
    """The hosts that a host connects to, from the next rank on: all of few hosts; of many, its neighbours in some rings
    and the master, because of the rendezvous. Both directions are tested."""
    others = others_in_turn(plan, host)
    if len(others) < ALL_PAIRS:
        return others
    chosen = measured_partners(plan, host)
    master = plan["master"]["host"]
    return [other for other in others if other in chosen or master in (host, other)]


def measured_partners(plan: Plan, host: str) -> set[str]:
    """Partners for measuring the rate: with the master, only the number of simultaneous clients would be measured."""
    hosts = [node["host"] for node in plan["nodes"]]
    if len(hosts) <= ALL_PAIRS:
        return set(hosts) - {host}
    chosen = set()
    for number in range(RINGS):
        # The first ring is that of the ranks, the others are random but constant for a plan.
        ring = sorted(hosts, key=lambda name: place_in_ring(plan, number, name)) if number else hosts
        at = ring.index(host)
        chosen |= {ring[at - 1], ring[(at + 1) % len(ring)]}
    return chosen


def place_in_ring(plan: Plan, ring: int, host: str) -> str:
    """A host's place in a random ring."""
    return hashlib.sha256(f"{plan.get('digest')} {ring} {host}".encode()).hexdigest()


def peers_of(plan: Plan, tries: Mapping[str, Mapping[str, Any]], host: str) -> list[dict[str, object]]:
    """The targets of a host: its partners' responders that started, at their planned addresses."""
    measured = measured_partners(plan, host)
    addresses = {node["host"]: node["address"] for node in plan["nodes"]}
    return [
        {"address": addresses[other], "ports": found["ports"], "token": found["token"], "measure": other in measured}
        for other, found in responders(plan, tries, host)
    ]


def unreached(plan: Plan, tries: Mapping[str, Mapping[str, Any]], host: str) -> list[str]:
    """The addresses of a host's peers whose way to it was not found open: closed on some port, or not tried."""
    nodes = {node["host"]: node for node in plan["nodes"]}
    node = nodes[host]
    found_open = [
        nodes[other]["address"]
        for other, tried in tries.items()
        for link in tried.get("links") or []
        if link["address"] == node["address"] and link["ports"] and not closed_ports(link["ports"])
    ]
    return [peer for peer in node["peers"] if peer not in found_open]


def responders(
    plan: Plan, tries: Mapping[str, Mapping[str, Any]], host: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A host's partners with a working responder."""
    for other in partners(plan, host):
        found = section(tries.get(other), "responder")
        ports, token = found.get("ports"), found.get("token")
        with contextlib.suppress(validate.InvalidHostData):
            if isinstance(ports, list) and isinstance(token, str):
                yield other, {"ports": [validate.port(port) for port in ports], "token": token}


def named_links(plan: Plan, tries: Mapping[str, Mapping[str, Any]], host: str) -> list[dict[str, object]]:
    """A host's measured links, with their peers' names."""
    names = [other for other, dummy in responders(plan, tries, host)]
    return [dict(link, host=name) for name, link in zip(names, items(tries.get(host), "links"))]
