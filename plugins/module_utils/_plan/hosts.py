# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts of a plan: their ranks, their Pythons, and the interface and address by which each is reached. Pure functions over probes."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Sequence, Union

from .._contract import validate
from .._contract.document import value_at
from .._contract.findings import Finding, finding
from .._contract.politeness import LOW, OFF
from .._contract.probe import Measured, Python, Route
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
    measured: Measured = Measured()  # from the last rehearsal or the one before this plan
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


def ranks(hosts: Sequence[Host]) -> tuple[dict[str, int], list[str]]:
    """({host: rank}, problems): given ranks are kept, the other hosts get the free ones in inventory order."""
    problems: list[str] = []
    taken: dict[int, str] = {}
    world = len(hosts)
    for host in hosts:
        rank = host.settings.rank
        if rank is None:
            continue
        if rank >= world:
            problems.append(
                f"ddp_rank is {rank} on {host.name}, but {plural(world, 'host')} have the ranks from 0 to {world - 1}"
            )
        elif rank in taken:
            problems.append(f"ddp_rank is {rank} on {taken[rank]} and on {host.name}, which need different ones")
        taken[rank] = host.name
    order = {name: rank for rank, name in taken.items()}
    free = iter(rank for rank in range(world) if rank not in taken)
    order.update({host.name: next(free) for host in hosts if not problems and host.name not in order})
    return order, problems


def same_network_stack(one: Host, other: Host) -> bool:
    """Whether two nodes see the same interfaces. Containers share the kernel's boot id but have separate stacks."""
    space = one.fact("host", "network_namespace")
    return same_machine(one, other) and space == other.fact("host", "network_namespace")


def same_machine(one: Host, other: Host) -> bool:
    """Whether two nodes share memory and cores."""
    boot = one.fact("host", "boot_id")
    return bool(boot) and boot == other.fact("host", "boot_id")


def neighbours(host: Host, hosts: Sequence[Host]) -> int:
    """The number of nodes on this host's machine, including itself."""
    return max(1, sum(same_machine(host, other) for other in hosts))


# A Python for each trainer environment, of one version on all hosts if possible


def pythons(host: Host) -> dict[str, str]:
    """The interpreters that are new enough, each with its major and minor version."""
    found: list[Python] = host.fact("python", "candidates") or []
    return {one["executable"]: ".".join(one["version"].split(".")[:2]) for one in found}


def made_python(base: str) -> str:
    """The interpreter to install below the base folder if there is none."""
    return os.path.join(base, PYTHON_FOLDER, PYTHON_IN_FOLDER)


def choose_python(host: Host, hosts: Sequence[Host], base: str, offline: bool) -> tuple[str | None, str | None]:
    """(path, version): the configured one, or the host's best, or one to install; None if impossible or unknown."""
    known = pythons(host)
    if host.settings.python:
        path = home_expanded(host.settings.python, host)
        return path, known.get(path)
    each = [set(pythons(other).values()) for other in hosts if other.probe]
    common = set.intersection(*each) if each else set()
    used = [version for version in PYTHONS if str(host.fact("python", "version")).startswith(f"{version}.")]

    order = [*used, *PYTHONS, *known.values()]
    # One that all hosts have, Ansible uses there, and packages surely exist for.
    if best := min(known, key=lambda path: (known[path] not in common, order.index(known[path])), default=None):
        return best, known[best]
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
    def addresses(self) -> list[str]:
        return [str(one.ip) for one in self.interfaces]

    @property
    def is_usable(self) -> bool:
        return bool(self.up and self.kind in USABLE and self.addresses)

    def in_words(self) -> str:
        """The interface with all that may speak for or against it."""
        speed, down = [f"{self.speed} Mbit/s"] if self.speed else [], [] if self.up else ["down"]
        return f"{self.name} ({', '.join([self.kind, *speed, *down, *(self.addresses or ['no address'])])})"


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
        self.is_one_machine = all(same_network_stack(hosts[0], host) for host in hosts)
        self.findings: list[Finding] = []

    def endpoints(self) -> dict[str, Endpoint]:
        """Those of all hosts; refuses addresses of two families, and one address of two machines."""
        named = any(host.settings.nic or host.settings.address for host in self.hosts)
        if self.is_one_machine and not named:
            return {host.name: Endpoint("lo", "127.0.0.1") for host in self.hosts}
        chosen = {host.name: self.endpoint(host) for host in self.hosts}
        addresses = {name: link.address for name, link in chosen.items() if link.address}
        six = [name for name, address in addresses.items() if ":" in address]
        four = [name for name in addresses if name not in six]
        if six and four:
            seen = f"{', '.join(four)} would be reached by IPv4 but {', '.join(six)} by IPv6"
            self.findings.append(finding("address-refused", six[0], seen))
        for one, other in itertools.combinations(self.hosts, 2):
            address = addresses.get(one.name)
            if address and address == addresses.get(other.name) and not same_network_stack(one, other):
                seen = f"{one.name} and {other.name} are different machines with the same address {address}"
                self.findings.append(finding("address-refused", other.name, seen))
        return chosen

    def endpoint(self, host: Host) -> Endpoint:
        """The interface and address of the inventory, or those that packets to the peers really use."""
        name, address = host.settings.nic, host.settings.address
        if not host.probe:
            return Endpoint(name, address)
        nics = [nic for nic in nics_of(host) if self.is_one_machine or nic.kind != "loopback"]
        used = [nic for entry in routes_of(host) for nic in nics if nic.name == entry["nic"]]
        if name or address:
            fitting = [nic for nic in nics if nic.up and nic.addresses and name in (None, nic.name)]
            fitting = [nic for nic in fitting if address is None or canonical(address) in nic.addresses]
            wanted = {"ddp_nic": name, "ddp_address": address}
            asked = " and ".join(f"{setting} is {value}" for setting, value in wanted.items() if value)
            seen = f"{asked} on {host.name}, but no interface that is up has that"
        else:
            usable = [nic for nic in nics if nic.is_usable]
            # An overlay or bridge only if requested; a host may know no route to its peers.
            the_only = usable if len(usable) == 1 else []
            fitting = [nic for nic in used if nic.is_usable] or self.shared(host) or the_only
            over = ", ".join(dict.fromkeys(nic.name for nic in used))
            seen = f"ddp_nic is not set on {host.name}, and no cable or Wi-Fi that is up leads to its peers"
            seen += f", which are reached over {over}" if over else ""
        if not fitting:
            has = ", ".join(nic.in_words() for nic in nics) or "none"
            self.findings.append(finding("address-refused", host.name, f"{seen}; there are {has}"))
            return Endpoint(None, None)
        nic = fitting[0]
        self.remark(host, nic, nics)
        # The route's address, or else the first, IPv4 before IPv6.
        sources = [str(entry.get("source")) for entry in routes_of(host) if entry.get("nic") == nic.name]
        known = [*(source for source in sources if source in nic.addresses), *nic.addresses]
        return Endpoint(nic.name, canonical(address) if address else min(known, key=lambda text: ":" in text))

    def shared(self, host: Host) -> list[NetworkInterface]:
        """The interfaces in a network that every other host can use too, cable before Wi-Fi."""
        usable = {one.name: [nic for nic in nics_of(one) if nic.is_usable] for one in self.hosts}
        others = [
            [one.ip for nic in nics for one in nic.interfaces] for name, nics in usable.items() if name != host.name
        ]

        def reaches_all(nic: NetworkInterface) -> bool:
            return all(any(ip in one.network for ip in ips for one in nic.interfaces) for ips in others)

        found = filter(reaches_all, usable[host.name])
        return sorted(found, key=lambda nic: (USABLE.index(nic.kind), -nic.speed))

    def remark(self, host: Host, nic: NetworkInterface, nics: Sequence[NetworkInterface]) -> None:
        """Add findings about the choice."""
        if nic.kind == "wifi":
            self.findings.append(finding("nic-wifi", host.name, f"{nic.name} is a Wi-Fi interface"))
        elif nic.kind not in (*USABLE, "loopback"):
            self.findings.append(finding("nic-overlay", host.name, f"{nic.name} is an interface of kind {nic.kind}"))
        # A cable is steadier than Wi-Fi, whatever its speed.
        cable = [one for one in nics if one.kind == "wired" and nic.kind == "wifi"]
        alike = [one for one in nics if one.kind == nic.kind and one.speed > (nic.speed or 10**9)]
        if faster := [one for one in (*cable, *alike) if one.is_usable]:
            names = ", ".join(one.in_words() for one in faster)
            seen = f"the peers are reached over {nic.in_words()} while {names} is up"
            self.findings.append(finding("nic-faster-up", host.name, seen))


def canonical(address: str) -> str:
    """An address as interfaces have it; a malformed one is that of none."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


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
