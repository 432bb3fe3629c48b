# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings from tests between the hosts: closed ports, wrong routes, slow links. Pure functions."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from .._contract.findings import Finding, finding
from .._contract.findings_table import CATALOGUE
from .evidence import PreflightEvidence
from .peer_check import FORBIDDEN, LinkTry, closed_ports

SLOW_MBIT = 300.0
LATE_MS = 5.0


def judge_links(evidence: PreflightEvidence) -> Iterable[Finding]:
    """All findings from the tests: of each host, and of its link to each peer."""
    for host, tried in evidence.tries.items():
        if tried["error"]:
            yield finding("address-refused", host, tried["error"])
        for link in tried["links"]:
            yield from ports(evidence, host, link)
            if len(closed_ports(link)) < len(link["ports"]):
                yield from used_interface(evidence, host, link)
                yield from rate_and_delay(host, link)


# Ports


def ports(evidence: PreflightEvidence, host: str, link: LinkTry) -> Iterable[Finding]:
    """One direction's closed ports as one finding, with the firewall that can close them."""
    closed, peer = closed_ports(link), link["host"]
    if not closed:
        return
    how = " / ".join(sorted({port["error"] for port in closed}))
    names = ", ".join(str(port["port"]) for port in closed)
    seen = f"{host} cannot connect to {peer} ({link['address']}) on port {names}: {how}"
    firewall = evidence.firewalls.get(peer) or {}
    remedy: str | None = None
    if firewall.get("needs_root") and firewall.get("commands"):
        code, remedy = "no-sudo", password_remedy(evidence, peer, firewall["commands"])
        seen += f"; {firewall['backend']} is active on {peer}, and we are not root there"
    elif firewall.get("commands"):
        seen += f"; {firewall['backend']} is active on {peer}"
        if evidence.before_network and evidence.plan["manage_firewall"]:
            return  # the plan says that the network step opens it
        code, remedy = "port-blocked", opening_remedy(evidence, peer, firewall)
    else:
        code = "peer-unreachable" if len(closed) == len(link["ports"]) else "port-blocked"
        if firewall.get("if_closed"):
            # A firewall that this user cannot see, or the network.
            by_owner = password_remedy(evidence, peer, firewall["if_closed"])
            remedy = f"{by_owner}. If no firewall there blocks: {CATALOGUE['peer-unreachable'].remedy}"
        seen += other_firewalls(evidence, host, link, firewall)
    yield finding(code, peer, seen, host, remedy=remedy)


def ways_to(evidence: PreflightEvidence, host: str) -> dict[str, Any]:
    """`unreached`: the addresses of the peers whose way to a host was not found open, because it is closed on some port or was not
    tried; `closed`: address and explanation of each that tried, where the firewall was opened to it."""
    address = {node["host"]: str(node["address"]) for node in evidence.plan["nodes"]}
    links = [(other, link) for other, link in evidence.links() if link["host"] == host]
    found_open = {address[other] for other, link in links if link["ports"] and not closed_ports(link)}
    closed = [(other, one["seen"]) for other, link in links for one in ports(evidence, other, link)]
    return {
        "unreached": [peer for peer in evidence.node(host)["peers"] if peer not in found_open],
        "closed": [{"address": address[other], "text": seen} for other, seen in closed],
    }


def password_remedy(evidence: PreflightEvidence, host: str, commands: Sequence[str]) -> str:
    """Who can open a host's ports without root."""
    by_owner = f"its owner can open them on {host}: {' ; '.join(commands)}"
    refused = evidence.fact(host, "sudo_refused")
    if refused:
        return f"The password that was given does not work there ({refused}); {by_owner}"
    return f"Add -K (--ask-become-pass) if the user's password allows sudo; otherwise {by_owner}"


def opening_remedy(evidence: PreflightEvidence, host: str, firewall: Mapping[str, Any]) -> str:
    """How to open a host's ports if root is available."""
    by_hand = f"On {host}: {' ; '.join(firewall['commands'])}"
    # The rehearsal follows the step that opens them, so that was skipped or had no effect.
    if not evidence.plan["manage_firewall"] or evidence.rehearsal:
        return by_hand
    return f"train.yml opens them automatically; to do only that now, add --tags network. By hand: {by_hand[0].lower()}{by_hand[1:]}"


def other_firewalls(evidence: PreflightEvidence, host: str, link: LinkTry, firewall: Mapping[str, Any]) -> str:
    """Known facts about what else stops the packets."""
    peer = link["host"]
    if any(port["error"] == FORBIDDEN for port in link["ports"]):
        return f"; an outgoing firewall rule on {host} forbids it"
    if firewall.get("foreign"):
        chains = ", ".join(firewall["foreign"])
        return f"; chains of another program on {peer}, which were left alone, can drop packets: {chains}"
    if firewall.get("rules"):
        said = f"an outgoing rule of {host} or a router between them stops the packets"
        return f"; {firewall['backend']} on {peer} lets it in, so {said}"
    if firewall.get("if_closed"):
        return f"; a firewall on {peer} cannot be seen without root"
    if firewall.get("backend") == "none" and not firewall.get("needs_root"):
        return f"; no firewall on {peer} can drop it, so check the network between them"
    return ""


# Routes


def used_interface(evidence: PreflightEvidence, host: str, link: LinkTry) -> Iterable[Finding]:
    """The interface that packets really use, compared with the plan's."""
    name = link.get("nic")
    planned = evidence.node(host)["nic"]
    if not name or not planned or name == planned or name == "lo":
        return
    kind = next((nic["kind"] for nic in evidence.fact(host, "nics") or [] if nic["name"] == name), "")
    code = {"overlay": "route-over-overlay", "bridge": "route-over-bridge"}.get(kind, "route-differs")
    seen = f"packets from {host} to {link['host']} ({link['address']}) leave by {name}{f' ({kind})' if kind else ''}"
    yield finding(code, host, f"{seen}, the plan's interface is {planned}", link["host"])


def rate_and_delay(host: str, link: LinkTry) -> Iterable[Finding]:
    """Rate and delay of one direction."""
    rate, late, peer = link.get("bandwidth_mbit"), link.get("latency_ms"), link["host"]
    if link.get("error"):
        yield finding("link-unmeasured", host, f"from {host} to {peer}: {link['error']}", peer)
    if rate and rate < SLOW_MBIT:
        yield finding("link-slow", host, f"from {host} to {peer}: {rate:.0f} Mbit/s", peer)
    if late and late > LATE_MS:
        yield finding("link-slow", host, f"from {host} to {peer} and back: {late:.1f} ms", peer)
