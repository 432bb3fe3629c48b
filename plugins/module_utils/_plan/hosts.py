# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts of a plan: their ranks, their Pythons, and the interface and address by which each is reached. Pure functions over probes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Sequence, Union

from .._contract import validate
from .._contract.document import value_at
from .._contract.findings import Finding, finding
from .._contract.politeness import LOW, OFF
from .._contract.probe import Python, Route
from .._contract.run_folder import PYTHON_FOLDER, PYTHON_IN_FOLDER
from .._contract.settings_table import AUTO, HostSettings
from .._contract.versions import MADE_PYTHON, PYTHONS
from .._kit.words import plural

USABLE = ("wired", "wifi")
Interface = Union[ipaddress.IPv4Interface, ipaddress.IPv6Interface]


class Host(NamedTuple):
    """A host, as the plan sees it."""

    name: str
    settings: HostSettings
    probe: Mapping[str, Any]
    error: str = ""  # why the probe is missing
    reach: str | None = None  # how other hosts would address it; None for a node that the controller runs on itself
    measured: Mapping[str, Any] = MappingProxyType({})  # from the last rehearsal or the one before this plan
    kept: Mapping[str, Any] = MappingProxyType({})  # facts of the resumed run
    login: str = ""  # the command that logs in there

    def fact(self, *keys: str) -> Any:
        """A fact of the probe, None if unknown."""
        return value_at(self.probe, *keys)

    @property
    def kept_share(self) -> Mapping[str, Any]:
        """This host's share of the resumed run; empty if it had none."""
        return (self.kept.get("shares") or {}).get(self.name) or {}

    @property
    def polite(self) -> str:
        """off, low or guest. A resumed run keeps auto's first result, so that a login does not restart it."""
        if self.settings.polite != AUTO:
            return self.settings.polite
        kept = self.kept_share.get("polite")
        if kept in (OFF, LOW):
            return str(kept)
        return LOW if self.fact("usage", "graphical") else OFF


def home_expanded(path: str, host: Host) -> str:
    """A path with ~ expanded for that host's user."""
    home = host.fact("host", "home")
    if path == "~" or path.startswith("~/"):
        return os.path.normpath(home + path[1:]) if home else path
    return os.path.normpath(path)


class Endpoint(NamedTuple):
    """The interface and address for a host's traffic."""

    nic: str | None
    address: str | None


def ranks(hosts: Sequence[Host]) -> tuple[dict[str, int], list[Finding]]:
    """({host: rank}, problems): given ranks are kept, the other hosts get the free ones in inventory order."""
    problems: list[Finding] = []
    taken: dict[int, str] = {}
    world = len(hosts)
    for host in hosts:
        rank = host.settings.rank
        if rank is None:
            continue
        if rank >= world:
            ranks_are = f"{plural(world, 'host')} are 0{f' to {world - 1}' if world > 1 else ''}"
            seen = f"ddp_rank is {rank} on {host.name}, but the ranks of {ranks_are}; so a lower rank would be missing"
            problems.append(finding("setting-refused", host.name, seen))
        elif rank in taken:
            seen = f"ddp_rank is {rank} on {taken[rank]} and on {host.name}"
            remedy = "Give each host a different rank, or none to number them in inventory order."
            problems.append(finding("setting-refused", host.name, seen, remedy=remedy))
        else:
            taken[rank] = host.name
    order = {name: rank for rank, name in taken.items()}
    if not problems:
        free = iter(rank for rank in range(world) if rank not in taken)
        order.update({host.name: next(free) for host in hosts if host.name not in order})
    return order, problems


def same_network_stack(one: Host, other: Host) -> bool:
    """Whether two nodes see the same interfaces. Containers share the kernel's boot id but have separate stacks."""
    spaces = [host.fact("host", "network_namespace") for host in (one, other)]
    return same_machine(one, other) and spaces[0] == spaces[1]


def same_machine(one: Host, other: Host) -> bool:
    """Whether two nodes share memory and cores."""
    boot = one.fact("host", "boot_id")
    return bool(boot) and boot == other.fact("host", "boot_id")


def neighbours(host: Host, hosts: Sequence[Host]) -> int:
    """The number of nodes on this host's machine, including itself."""
    return max(1, sum(same_machine(host, other) for other in hosts))


# A Python for each trainer environment, of one version on all hosts if possible


def version_of(entry: Python) -> tuple[int, int]:
    """Major and minor version of an interpreter of the probe."""
    major, minor = str(entry["version"]).split(".")[:2]
    return int(major), int(minor)


def pythons(host: Host) -> list[Python]:
    """The interpreters that are new enough."""
    found: list[Python] = host.fact("python", "candidates") or []
    return found


def made_python(base: str) -> str:
    """The interpreter to install below the base folder if there is none."""
    return os.path.join(base, PYTHON_FOLDER, PYTHON_IN_FOLDER)


def choose_python(host: Host, hosts: Sequence[Host], base: str, offline: bool) -> tuple[str | None, str | None]:
    """(path, version): the configured one, or the host's best, or one to install; None if impossible or unknown."""
    wanted = host.settings.python
    if wanted:
        path = home_expanded(wanted, host)
        known = [version_of(entry) for entry in pythons(host) if entry["executable"] == path]
        return path, "%d.%d" % known[0] if known else None
    each = [{version_of(entry) for entry in pythons(other)} for other in hosts if other.probe]
    common = set.intersection(*each) if each else set()
    used = host.fact("python", "version")

    def preference(entry: Python) -> tuple[bool, bool, bool, int]:
        """One that all hosts have, packages surely exist for, and Ansible uses there."""
        version = version_of(entry)
        place = PYTHONS.index(version) if version in PYTHONS else len(PYTHONS)
        return version not in common, version not in PYTHONS, entry["version"] != used, place

    best = min(pythons(host), key=preference, default=None)
    if best:
        return str(best["executable"]), "%d.%d" % version_of(best)
    return (made_python(base), MADE_PYTHON) if host.probe and not offline else (None, None)


# Interfaces and addresses


class NetworkInterface(NamedTuple):
    """A network interface, with its addresses but link-local and multicast ones."""

    name: str
    kind: str
    up: bool
    speed: int  # Mbit/s; 0 if unknown
    interfaces: tuple[Interface, ...]

    @property
    def is_usable(self) -> bool:
        return bool(self.up and self.kind in USABLE and self.interfaces)

    def in_words(self) -> str:
        return f"{self.kind}, {self.speed} Mbit/s" if self.speed else self.kind

    def kind_in_words(self) -> str:
        words = {"overlay": "an overlay network", "bridge": "a bridge for virtual machines or containers"}
        return words.get(self.kind, f"a {self.kind} interface") + ("" if self.up else " and down")


def nics_of(host: Host) -> list[NetworkInterface]:
    """The host's interfaces."""
    found = []
    for nic in host.fact("nics") or []:
        own = []
        for text in [*nic.get("ipv4", []), *nic.get("ipv6", [])]:
            with contextlib.suppress(ValueError):
                interface = ipaddress.ip_interface(text)
                validate.address(str(interface.ip))
                own += [] if interface.ip.is_link_local else [interface]
        found.append(NetworkInterface(nic["name"], nic["kind"], nic["up"], nic.get("speed_mbit") or 0, tuple(own)))
    return found


class EndpointChooser:
    """Chooses every host's endpoint, and collects findings about them."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        self.nics = {host.name: nics_of(host) for host in hosts}
        self.findings: list[Finding] = []

    def endpoints(self) -> dict[str, Endpoint]:
        named = any(host.settings.nic or host.settings.address for host in self.hosts)
        if not named and all(same_network_stack(self.hosts[0], host) for host in self.hosts):
            return {host.name: Endpoint("lo", "127.0.0.1") for host in self.hosts}
        chosen = {host.name: self.endpoint(host) for host in self.hosts}
        self.check_families({name: link.address for name, link in chosen.items() if link.address})
        return chosen

    def endpoint(self, host: Host) -> Endpoint:
        name, address = host.settings.nic, host.settings.address
        if not host.probe:
            return Endpoint(name, address)
        if address is not None:
            nic = self.nic_with(host, address, name)
        else:
            nic = self.nic_named(host, name) if name else self.routed_nic(host)
        if nic is None:
            return Endpoint(None, None)
        self.remark(host, nic)
        # The route's address, or else the first, IPv4 before IPv6.
        own = [str(one.ip) for one in nic.interfaces]
        sources = [str(entry.get("source")) for entry in routes_of(host) if entry.get("nic") == nic.name]
        known = [*(source for source in sources if source in own), *own]
        return Endpoint(nic.name, address or min(known, key=lambda text: ":" in text))

    def refuse(self, host: str, seen: str, remedy: str | None = None) -> None:
        self.findings.append(finding("address-refused", host, seen, remedy=remedy))

    def nic_named(self, host: Host, name: str) -> NetworkInterface | None:
        """The interface with the name in the inventory."""
        nics = self.nics[host.name]
        nic = next((nic for nic in nics if nic.name == name), None)
        others = [f"{one.name} ({one.kind}{'' if one.up else ', down'})" for one in nics if one.kind != "loopback"]
        known = ", ".join(others) or "none"
        if nic is None:
            seen = f"ddp_nic is {name} on {host.name}, which has no such interface; it has {known}"
            self.refuse(host.name, seen)
        elif not nic.up or not nic.interfaces:
            state = "has no address" if nic.up else "is down"
            seen = f"ddp_nic is {name} on {host.name}, but that interface {state}; there are {known}"
            remedy = f"Bring it up (sudo ip link set {name} up), or set ddp_nic to another one."
            self.refuse(host.name, seen, remedy)
            return None
        return nic

    def nic_with(self, host: Host, address: str, name: str | None) -> NetworkInterface | None:
        """The interface with the inventory's address, and with its name if that is set too."""
        seen = f"ddp_address is {address} on {host.name}"
        try:
            wanted = ipaddress.ip_address(address)
        except ValueError:
            self.refuse(host.name, f"{seen}; it must be an IP address of that host")
            return None
        bearers = [nic for nic in self.nics[host.name] if wanted in [one.ip for one in nic.interfaces]]
        if bearers and name in (None, bearers[0].name):
            return bearers[0]
        has = bearers[0].name if bearers else "no interface"
        seen += f", but {has} has that address{f' and ddp_nic is {name}' if name else ''}"
        self.refuse(host.name, f"{seen}; it has {self.addresses_in_words(host)}")
        return None

    def addresses_in_words(self, host: Host) -> str:
        found = [f"{one.ip} on {nic.name}" for nic in self.nics[host.name] for one in nic.interfaces]
        return ", ".join(found) or "no address"

    def routed_nic(self, host: Host) -> NetworkInterface | None:
        """The interface that packets to the peers really use; an overlay or bridge only if requested."""
        nics = self.nics[host.name]
        used = [nic for entry in routes_of(host) for nic in nics if nic.name == entry["nic"]]
        usable = [nic for nic in nics if nic.is_usable]
        # For a single host, or if the default route is the only one.
        found = next((nic for nic in used if nic.is_usable), None) or self.shared_nic(host)
        if found or len(usable) == 1:
            return found or usable[0]
        refused = next((nic for nic in used if nic.kind != "loopback"), None)
        if refused is not None:
            seen = f"{host.name} reaches its peers over {refused.name}, which is {refused.kind_in_words()}"
            interface = f"the interface of the shared network, or to {refused.name} to use it anyway"
            self.refuse(host.name, seen, f"Set ddp_nic on {host.name} to {interface}.")
        else:
            has = self.addresses_in_words(host)
            seen = f"{host.name} has no interface that is up and reaches its peers (it has {has})"
            self.refuse(host.name, seen)
        return None

    def shared_nic(self, host: Host) -> NetworkInterface | None:
        """An interface in a network that every other host can use too, cable before Wi-Fi."""
        usable = {name: [nic for nic in nics if nic.is_usable] for name, nics in self.nics.items()}
        addresses = {name: [one.ip for nic in nics for one in nic.interfaces] for name, nics in usable.items()}
        others = [of_host for name, of_host in addresses.items() if name != host.name]
        for nic in sorted(usable[host.name], key=lambda nic: (USABLE.index(nic.kind), -nic.speed)):
            networks = [one.network for one in nic.interfaces]
            # An address of the other family is in no network.
            if all(any(ip in network for ip in of_host for network in networks) for of_host in others):
                return nic
        return None

    def remark(self, host: Host, nic: NetworkInterface) -> None:
        """Add findings about the choice."""
        if nic.kind == "wifi":
            self.findings.append(finding("nic-wifi", host.name, f"{nic.name} is a Wi-Fi interface"))
        elif nic.kind not in (*USABLE, "loopback"):
            self.findings.append(finding("nic-overlay", host.name, f"{nic.name} is {nic.kind_in_words()}"))
        # A cable is steadier than Wi-Fi, whatever its speed.
        faster = [
            one
            for one in self.nics[host.name]
            if one.is_usable
            and (
                (one.kind, nic.kind) == ("wired", "wifi") or (one.kind == nic.kind and one.speed > (nic.speed or 10**9))
            )
        ]
        if faster:
            names = ", ".join(f"{one.name} ({one.in_words()})" for one in faster)
            seen = f"the peers are reached over {nic.name} ({nic.in_words()}) while {names} is up"
            self.findings.append(finding("nic-faster-up", host.name, seen))

    def check_families(self, addresses: Mapping[str, str]) -> None:
        """Refuse addresses of two families, of loopback among several machines, and of two machines at once."""
        six = [name for name, address in addresses.items() if ":" in address]
        four = [name for name in addresses if name not in six]
        if six and four:
            self.refuse(six[0], f"{', '.join(four)} would be reached by IPv4 but {', '.join(six)} by IPv6")
        are_apart = any(not same_network_stack(self.hosts[0], host) for host in self.hosts)
        for name, address in addresses.items():
            if are_apart and is_loopback(address):
                self.refuse(name, f"ddp_address is {address} on {name}, which only {name} can reach")
        by_address: dict[str, Host] = {}
        for host in self.hosts:
            address = addresses.get(host.name, "")
            other = by_address.setdefault(address, host) if address else host
            if other is not host and not same_network_stack(host, other):
                seen = f"{other.name} and {host.name} are different machines with the same address {address}"
                self.refuse(host.name, seen)


def routes_of(host: Host) -> list[Route]:
    """Routes to the peers if any has an interface; else all, the default route last."""
    found: list[Route] = host.fact("routes") or []
    peers = [entry for entry in found if entry["peer"] != "default"]
    if any(entry.get("nic") for entry in peers):
        return peers
    return sorted(found, key=lambda entry: entry["peer"] == "default")


def is_loopback(address: str) -> bool:
    """Whether only the machine itself can use an address; malformed ones have been reported before."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
