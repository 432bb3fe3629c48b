# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence about a plan and its hosts before a start, and who tries to reach whom. Pure functions."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence, TypedDict

from .._contract.document import value_at
from .._contract.findings import Finding
from .._contract.plan import Node, Plan
from .peer_check import LinkTry


class HostTries(TypedDict):
    """A host's tests with the others; error: why it has none."""

    links: list[LinkTry]
    error: str


class PreflightEvidence(NamedTuple):
    """Everything known by host: probes, tries (from peer_responder and peer_check), firewalls (predicted by
    peer_firewall), gloo (the all-reduce). Hosts may be missing and mappings empty."""

    plan: Plan
    probes: Mapping[str, Mapping[str, Any]]
    tries: Mapping[str, HostTries] = {}
    firewalls: Mapping[str, Mapping[str, Any]] = {}
    gloo: Mapping[str, Mapping[str, Any]] = {}
    plan_findings: Sequence[Finding] = ()
    # Whether the network step still comes, which opens closed ports.
    before_network: bool = False
    rehearsal: bool = False
    running: bool = False

    def fact(self, host: str, *keys: str) -> Any:
        """A fact of a host's probe, None if unknown."""
        return value_at(self.probes.get(host), *keys)

    def node(self, host: str) -> Node:
        """A host's part of the plan."""
        return next(node for node in self.plan["nodes"] if node["host"] == host)

    def links(self) -> Iterator[tuple[str, LinkTry]]:
        """Every tested direction: the host, and its link to a peer."""
        return ((host, link) for host, tried in self.tries.items() for link in tried["links"])


def peers_of(plan: Plan, answering: Mapping[str, Mapping[str, Any]], host: str) -> dict[str, dict[str, object]]:
    """The other hosts whose responder started, with its ports at their planned address, from the next rank on: at any moment all hosts
    measure towards different ones."""
    nodes = plan["nodes"]
    at = [node["host"] for node in nodes].index(host)
    others = [(node, answering[node["host"]].get("responder")) for node in nodes[at + 1 :] + nodes[:at]]
    return {
        node["host"]: {"address": node["address"], "ports": found["ports"], "token": found["token"]}
        for node, found in others
        if found
    }
