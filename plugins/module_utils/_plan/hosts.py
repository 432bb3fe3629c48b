# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts of a plan: their ranks, and the interface and address by which each is reached. Pure functions over probes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Sequence, Union

from .._contract import validate
from .._contract.findings import Finding, finding
from .._contract.settings_table import HostSettings
from .._kit.words import plural
from .matmul_precision import with_precision

USABLE = ("wired", "wifi")
Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
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
        value: Any = self.probe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def kept_fact(self, name: str) -> Any:
        """This host's own entry in a fact of the resumed run, None if unknown."""
        return (self.kept.get(name) or {}).get(self.name)

    @property
    def has_begun(self) -> bool:
        """Whether this host has taken part in the resumed run."""
        return self.kept_fact("rows") is not None

    def measured_with(self, matmul: str) -> Host:
        """The host with only its measurements of this precision."""
        return self._replace(measured=with_precision(self.measured, matmul)) if self.measured else self


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
    boot = one.fact("host", "boot_id")
    return bool(boot) and (boot, one.fact("host", "network_namespace")) == (
        other.fact("host", "boot_id"),
        other.fact("host", "network_namespace"),
    )


def same_machine(one: Host, other: Host) -> bool:
    """Whether two nodes share memory and cores."""
    boot = one.fact("host", "boot_id")
    return bool(boot) and boot == other.fact("host", "boot_id")


def neighbours(host: Host, hosts: Sequence[Host]) -> int:
    """The number of nodes on this host's machine, including itself."""
    return max(1, sum(same_machine(host, other) for other in hosts))


def interfaces(nic: Mapping[str, Any]) -> list[Interface]:
    """An interface's addresses, without link-local and multicast ones."""
    found = []
    for text in [*nic.get("ipv4", []), *nic.get("ipv6", [])]:
        with contextlib.suppress(ValueError):
            one = ipaddress.ip_interface(text)
            validate.address(str(one.ip))
            found.append(one)
    return [interface for interface in found if not interface.ip.is_link_local]


def nic_named(host: Host, name: str | None) -> Mapping[str, Any] | None:
    return next((nic for nic in host.fact("nics") or [] if nic["name"] == name), None)


def nic_with(host: Host, address: str) -> Mapping[str, Any] | None:
    """The interface with an address."""
    wanted = ipaddress.ip_address(address)
    nics: list[Mapping[str, Any]] = host.fact("nics") or []
    return next((nic for nic in nics if wanted in [interface.ip for interface in interfaces(nic)]), None)


def usable(nic: Mapping[str, Any]) -> bool:
    return bool(nic["up"] and nic["kind"] in USABLE and interfaces(nic))


def usable_nics(host: Host) -> list[Mapping[str, Any]]:
    return [nic for nic in host.fact("nics") or [] if usable(nic)]


class EndpointChooser:
    """Chooses every host's endpoint, and collects `problems` and `findings`."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        self.problems: list[Finding] = []
        self.findings: list[Finding] = []

    def endpoints(self) -> dict[str, Endpoint]:
        named = any(host.settings.nic or host.settings.address for host in self.hosts)
        if not named and all(same_network_stack(self.hosts[0], host) for host in self.hosts):
            return {host.name: Endpoint("lo", "127.0.0.1") for host in self.hosts}
        chosen = {host.name: self.endpoint(host) for host in self.hosts}
        self.check_addresses(chosen)
        return chosen

    def endpoint(self, host: Host) -> Endpoint:
        if not host.probe:
            return Endpoint(host.settings.nic, host.settings.address)
        is_set = host.settings.nic or host.settings.address
        nic = self.wanted_nic(host) if is_set else self.routed_nic(host)
        if nic is None:
            return Endpoint(None, None)
        address = host.settings.address or self.address_of(host, nic)
        self.remark(host, nic)
        return Endpoint(nic["name"], address)

    def refuse(self, code: str, host: str, seen: str, remedy: str | None = None) -> None:
        self.problems.append(finding(code, host, seen, remedy=remedy))

    def note(self, code: str, host: str, seen: str) -> None:
        self.findings.append(finding(code, host, seen))

    def wanted_nic(self, host: Host) -> Mapping[str, Any] | None:
        """The interface in the inventory, by name or address."""
        name, address = host.settings.nic, host.settings.address
        if address is not None:
            return self.nic_of_address(host, address, name)
        nic = nic_named(host, name)
        others = [other for other in host.fact("nics") if other["kind"] != "loopback"]
        each = [f"{other['name']} ({other['kind']}{'' if other['up'] else ', down'})" for other in others]
        known = ", ".join(each) or "none"
        if nic is None:
            seen = f"ddp_nic is {name} on {host.name}, which has no such interface; it has {known}"
            self.refuse("address-refused", host.name, seen, "Set ddp_nic to one of them.")
        elif not nic["up"] or not interfaces(nic):
            state = "has no address" if nic["up"] else "is down"
            seen = f"ddp_nic is {name} on {host.name}, but that interface {state}; there are {known}"
            self.refuse(
                "address-refused",
                host.name,
                seen,
                f"Bring it up (sudo ip link set {name} up), or set ddp_nic to another one.",
            )
            return None
        return nic

    def nic_of_address(self, host: Host, address: str, name: str | None) -> Mapping[str, Any] | None:
        """The interface with the inventory's address, and with its name if that is set too."""
        seen = f"ddp_address is {address} on {host.name}"
        try:
            bearer = nic_with(host, address)
        except ValueError:
            self.refuse("address-refused", host.name, f"{seen}; it must be an IP address of that host")
            return None
        if bearer is None or (name is not None and bearer["name"] != name):
            has = bearer["name"] if bearer else "no interface"
            seen += f", but {has} has that address{f' and ddp_nic is {name}' if name else ''}"
            self.refuse("address-refused", host.name, f"{seen}; it has {self.addresses_in_words(host)}")
            return None
        return bearer

    @staticmethod
    def addresses_in_words(host: Host) -> str:
        found = [f"{interface.ip} on {nic['name']}" for nic in host.fact("nics") for interface in interfaces(nic)]
        return ", ".join(found) or "no address"

    def routed_nic(self, host: Host) -> Mapping[str, Any] | None:
        """The interface that packets to the peers really use; an overlay or bridge only if requested."""
        refused = None
        for entry in self.routes(host):
            nic = nic_named(host, entry.get("nic"))
            if nic is not None and usable(nic):
                return nic
            if nic is not None and nic["kind"] != "loopback":
                refused = refused or nic
        shared = self.shared_nic(host) or self.only_nic(host)
        if shared is not None:
            return shared
        if refused is not None:
            seen = f"{host.name} reaches its peers over {refused['name']}, which is {self.kind_in_words(refused)}"
            interface = f"the interface of the shared network, or to {refused['name']} to use it anyway"
            self.refuse("address-refused", host.name, seen, f"Set ddp_nic on {host.name} to {interface}.")
        else:
            has = self.addresses_in_words(host)
            seen = f"{host.name} has no interface that is up and reaches its peers (it has {has})"
            self.refuse("address-refused", host.name, seen, f"Set ddp_nic or ddp_address on {host.name}.")
        return None

    @staticmethod
    def kind_in_words(nic: Mapping[str, Any]) -> str:
        words = {"overlay": "an overlay network", "bridge": "a bridge for virtual machines or containers"}
        state = "" if nic["up"] else " and down"
        return words.get(nic["kind"], f"a {nic['kind']} interface") + state

    @staticmethod
    def routes(host: Host) -> list[Mapping[str, Any]]:
        """Routes to the peers first, the default route last."""
        found = host.fact("routes") or []
        peers = [entry for entry in found if entry["peer"] != "default"]
        if any(entry.get("nic") for entry in peers):
            return peers
        return sorted(found, key=lambda entry: entry["peer"] == "default")

    def shared_nic(self, host: Host) -> Mapping[str, Any] | None:
        """An interface in a network that every other host can use too, cable before Wi-Fi."""
        best_first = sorted(
            usable_nics(host), key=lambda nic: (USABLE.index(nic["kind"]), -(nic.get("speed_mbit") or 0))
        )
        for nic in best_first:
            networks = [interface.network for interface in interfaces(nic)]
            if all(self.within(networks, other) for other in self.hosts if other.name != host.name):
                return nic
        return None

    @staticmethod
    def within(networks: Sequence[Any], host: Host) -> bool:
        return any(
            interface.ip in network
            for nic in usable_nics(host)
            for interface in interfaces(nic)
            for network in networks
            if interface.version == network.version
        )

    def only_nic(self, host: Host) -> Mapping[str, Any] | None:
        """For a single host, or if the default route is the only one."""
        found = usable_nics(host)
        return found[0] if len(found) == 1 else None

    def address_of(self, host: Host, nic: Mapping[str, Any]) -> str:
        """The interface's address: the route's, or else the first, IPv4 before IPv6."""
        own = [str(interface.ip) for interface in interfaces(nic)]
        sources = [str(entry.get("source")) for entry in self.routes(host) if entry.get("nic") == nic["name"]]
        found = [source for source in sources if source in own] + own
        return min(found, key=lambda address: ":" in address)

    def remark(self, host: Host, nic: Mapping[str, Any]) -> None:
        """Add findings about the choice."""
        if nic["kind"] not in USABLE and nic["kind"] != "loopback":
            self.note("nic-overlay", host.name, f"{nic['name']} is {self.kind_in_words(nic)}")
        if nic["kind"] == "wifi":
            self.note("nic-wifi", host.name, f"{nic['name']} is a Wi-Fi interface")
        faster = [other for other in usable_nics(host) if other is not nic and quicker(other, nic)]
        if faster:
            names = ", ".join(f"{other['name']} ({speed_in_words(other)})" for other in faster)
            seen = f"the peers are reached over {nic['name']} ({speed_in_words(nic)}) while {names} is up"
            self.note("nic-faster-up", host.name, seen)

    def check_addresses(self, chosen: Mapping[str, Endpoint]) -> None:
        """Refuse addresses of two families, of loopback among several machines, and of two machines at once."""
        addresses = {name: link.address for name, link in chosen.items() if link.address}
        six = [name for name, address in addresses.items() if ":" in address]
        four = [name for name in addresses if name not in six]
        if six and four:
            seen = f"{', '.join(four)} would be reached by IPv4 but {', '.join(six)} by IPv6"
            self.refuse("address-refused", six[0], seen)
        others = [host for host in self.hosts if not same_network_stack(self.hosts[0], host)]
        for name, address in addresses.items() if others else []:
            if is_loopback(address):
                seen = f"ddp_address is {address} on {name}, which only {name} can reach"
                self.refuse("address-refused", name, seen, "Use its address in the shared network.")
        by_address: dict[str, Host] = {}
        for host in self.hosts:
            address = addresses.get(host.name, "")
            other = by_address.setdefault(address, host) if address else host
            if not same_network_stack(host, other) and other is not host:
                seen = f"{other.name} and {host.name} are different machines with the same address {address}"
                remedy = "Set ddp_address or ddp_nic so that each has its own."
                self.refuse("address-refused", host.name, seen, remedy)


def is_loopback(address: str) -> bool:
    """Whether only the machine itself can use an address; malformed ones have been reported before."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def quicker(other: Mapping[str, Any], nic: Mapping[str, Any]) -> bool:
    if nic["kind"] == "wifi" and other["kind"] == "wired":
        return True
    return other["kind"] == nic["kind"] and (other.get("speed_mbit") or 0) > (nic.get("speed_mbit") or 10**9)


def speed_in_words(nic: Mapping[str, Any]) -> str:
    speed = nic.get("speed_mbit")
    return f"{nic['kind']}, {speed} Mbit/s" if speed else str(nic["kind"])
