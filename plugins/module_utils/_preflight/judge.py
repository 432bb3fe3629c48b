# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges the evidence about a plan and its hosts before a start: probes, and tests between the hosts. Pure functions."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence, TypedDict

from .._contract.document import Document, value_at
from .._contract.findings import Finding, finding
from .._contract.findings_table import CATALOGUE, ERROR, INFO, WARNING
from .._contract.plan import Node, Plan
from .._plan.hosts import is_loopback
from .peer_check import FORBIDDEN, CheckedPeer, LinkTry, Responder, closed_ports

ORDER = {ERROR: 0, WARNING: 1, INFO: 2}
LOW_FILES = 256
LOW_PROCESSES = 512
LONG_RUN = 7 * 24 * 3600
# Instruction sets by their benefit for matrix products, the greatest first.
LEVELS = ("amx_tile", "avx512f", "sve", "avx2", "asimd", "avx")
SLOW_MBIT = 300.0
LATE_MS = 5.0


class HostTries(TypedDict):
    """A host's tests with the others; error: why it has none."""

    links: list[LinkTry]
    error: str


class Firewall(TypedDict, total=False):
    """The fields of the answer of peer_firewall that preflight reads."""

    backend: str
    commands: list[str]
    rules: list[str]
    foreign: list[str]
    if_closed: list[str]
    needs_root: bool


class PreflightEvidence(NamedTuple):
    """Everything known by host: probes, tries (from start_responder and peer_check), firewalls (predicted by
    peer_firewall), gloo (the all-reduce). Hosts may be missing and mappings empty."""

    plan: Plan
    probes: Mapping[str, Document]
    tries: Mapping[str, HostTries] = {}
    firewalls: Mapping[str, Firewall] = {}
    gloo: Mapping[str, Document] = {}
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


def peers_of(plan: Plan, answering: Mapping[str, Mapping[str, Responder | None]], host: str) -> dict[str, CheckedPeer]:
    """The other hosts whose responder started, with its ports at their planned address, from the next rank on: at any moment all hosts
    measure towards different ones."""
    nodes = plan["nodes"]
    at = [node["host"] for node in nodes].index(host)
    others = [(node, answering[node["host"]].get("responder")) for node in nodes[at + 1 :] + nodes[:at]]
    return {
        node["host"]: {"address": node["address"] or "", "ports": found["ports"], "token": found["token"]}
        for node, found in others
        if found
    }


def judge(evidence: PreflightEvidence) -> list[Finding]:
    """All findings, the worst first, without duplicates."""
    found: list[Finding] = list(evidence.plan_findings)
    for host in (node["host"] for node in evidence.plan["nodes"]):
        # The plan's findings name a host that is down.
        for look in (address_names, load, limits, folder) if evidence.probes.get(host) else ():
            found += look(evidence, host)
    for compare in (cpus, all_reduce):
        found += compare(evidence)
    found += judge_links(evidence)
    return in_order(found)


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Without duplicates, errors first, otherwise in order."""
    unique: dict[tuple[Any, ...], Finding] = {}
    for entry in found:
        unique.setdefault((entry["code"], entry["host"], entry["peer"], entry["seen"]), entry)
    return sorted(unique.values(), key=lambda entry: ORDER[entry["severity"]])


# -- one host -----------------------------------------------------------------------------------------------------------


def address_names(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    """Names that resolve to the host itself: its own, or worse, a peer's."""
    own = [text for text in evidence.fact(host, "names", "own") or [] if is_loopback(text)]
    alone = is_loopback(evidence.node(host)["address"] or "")
    if own and not alone:
        yield finding(
            "name-is-loopback", host, f"its name {evidence.fact(host, 'host', 'hostname')} resolves to {own[0]}"
        )
    for name, addresses in (evidence.fact(host, "names", "peers") or {}).items():
        looped = [text for text in addresses if is_loopback(text)]
        if looped and not alone:
            seen = f"the name {name} of a peer resolves to {looped[0]}"
            remedy = "Remove that line from /etc/hosts on that host."
            yield finding("name-is-loopback", host, seen, severity=WARNING, remedy=remedy)


def load(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    """Other load on the cores, told by a machine's first node; a run in progress is not."""
    load1, cores = evidence.fact(host, "cpu", "load1"), evidence.fact(host, "cpu", "available")
    boots = {node["host"]: evidence.fact(node["host"], "host", "boot_id") for node in evidence.plan["nodes"]}
    is_first = host == next((one for one, boot in boots.items() if boot == boots[host]), "")
    session = evidence.fact(host, "run", "session") or {}
    runs = session.get("id") and session.get("ended") is None
    if load1 and cores and is_first and not runs and load1 >= max(1.5, cores):
        yield finding("host-busy", host, f"{load1:.1f} processes want to run on {cores} processors")


def limits(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    """User limits that this plan would exceed."""
    node, known = evidence.node(host), evidence.fact(host, "limits") or {}
    files = max(LOW_FILES, 8 * evidence.plan["world"])
    for name, least, seen in (
        ("nofile", files, "{} open files (ulimit -n)"),
        ("nproc", LOW_PROCESSES, "{} processes and threads (ulimit -u)"),
        ("address_space", node["memory_bytes"], "{} bytes of memory (ulimit -v)"),
        ("file_size", node["checkpoint_bytes"], "files of {} bytes, less than a checkpoint (ulimit -f)"),
        ("cpu_seconds", LONG_RUN, "{} seconds of CPU time, after which the kernel kills a process (ulimit -t)"),
    ):
        if known.get(name) is not None and known[name] < least:
            yield finding("ulimit-low", host, seen.format(known[name]))
    logout, user = evidence.fact(host, "logout") or {}, evidence.fact(host, "host", "user")
    if logout.get("kills") and not logout.get("lingers"):
        yield finding("ends-at-logout", host, f"KillUserProcesses=yes, and {user} does not linger")


def folder(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    if evidence.fact(host, "disk", "noexec"):
        seen = f"{evidence.fact(host, 'disk', 'parent')} is on a file system mounted with noexec"
        remedy = "Set ddp_venv_dir to a folder on a file system mounted without noexec."
        yield finding("folder-refused", host, seen, remedy=remedy)


# -- all hosts together -------------------------------------------------------------------------------------------------


def cpus(evidence: PreflightEvidence) -> Iterable[Finding]:
    """Instruction sets; CPUs with unknown flags are skipped."""
    flags = {host: evidence.fact(host, "cpu", "flags") or [] for host in evidence.probes}
    best = {host: next((one for one in LEVELS if one in known), "") for host, known in flags.items()}
    level = {host: name for host, name in best.items() if name}
    if len(set(level.values())) > 1:
        slowest = max(level, key=lambda host: LEVELS.index(level[host]))
        yield finding("cpu-features-differ", slowest, ", ".join(f"{host} has {name}" for host, name in level.items()))


def all_reduce(evidence: PreflightEvidence) -> Iterable[Finding]:
    """The all-reduce."""
    if evidence.running:
        yield finding("run-in-progress", "", f"the run {evidence.plan['run']} is in progress")
    if any(not evidence.gloo.get(node["host"]) for node in evidence.plan["nodes"]):
        return
    for host, result in evidence.gloo.items():
        if not result.get("ok"):
            yield finding(
                "gloo-failed", host, f"{result.get('phase', 'it')} failed: {result.get('error', 'no answer')}"
            )


# -- the links between them ---------------------------------------------------------------------------------------------


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


def opening_remedy(evidence: PreflightEvidence, host: str, firewall: Firewall) -> str:
    """How to open a host's ports if root is available."""
    by_hand = f"On {host}: {' ; '.join(firewall['commands'])}"
    # The rehearsal follows the step that opens them, so that was skipped or had no effect.
    if not evidence.plan["manage_firewall"] or evidence.rehearsal:
        return by_hand
    return f"train.yml opens them automatically; to do only that now, add --tags network. By hand: {by_hand[0].lower()}{by_hand[1:]}"


def other_firewalls(evidence: PreflightEvidence, host: str, link: LinkTry, firewall: Firewall) -> str:
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
