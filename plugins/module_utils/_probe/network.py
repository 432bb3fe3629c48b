# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Linux host's network: interfaces, addresses, routes to given peers, names.

Reads /sys and /proc; uses `ip` if it is installed.
"""

from __future__ import annotations

import fcntl
import glob
import ipaddress
import json
import os
import re
import socket
import struct
import threading
import time
from typing import Any, Callable, Mapping, Sequence, Tuple

from .._contract.document import Document, items, text
from .._contract.probe import Names, Nic, Route
from .._kit.files import read_text

Run = Callable[[Sequence[str]], Tuple[int, str, str]]

NET = "/sys/class/net"
# Timeout for all names together; otherwise an unresponsive name server would cost tens of seconds each.
RESOLVE_SECONDS = 8.0
OVERLAY_NAME = re.compile(
    r"^(tailscale|ts|wg|tun|tap|zt|nebula|utun|ppp|vpn|nordlynx|proton|cscotun|gpd|warp)[0-9a-z-]*$", re.I
)
BRIDGE_NAME = re.compile(r"^(docker|br-|virbr|lxcbr|lxdbr|cni|podman|flannel|cali)", re.I)
IFF_UP = 0x1
PASSING = 0x01 | 0x20  # IFA_F_TEMPORARY and IFA_F_DEPRECATED
TYPE_LOOPBACK = "772"
TYPE_NONE = "65534"


def read(path: str, default: str = "") -> str:
    """A small file of /proc or /sys, or the default."""
    return read_text(path).strip() or default


def nic_names() -> list[str]:
    try:
        return sorted(name for dummy, name in socket.if_nameindex())
    except OSError:
        return []


def kind_of(name: str, root: str = NET) -> str:
    """wired, wifi, virtual, overlay, bridge or loopback; the kernel's information takes precedence over the name."""
    base = os.path.join(root, name)
    device_type = read(os.path.join(base, "type"))
    event = read(os.path.join(base, "uevent"))
    if device_type == TYPE_LOOPBACK or name == "lo":
        return "loopback"
    if os.path.isdir(os.path.join(base, "wireless")) or os.path.exists(os.path.join(base, "phy80211")):
        return "wifi"
    if "DEVTYPE=wireguard" in event or os.path.exists(os.path.join(base, "tun_flags")) or device_type == TYPE_NONE:
        return "overlay"
    if os.path.isdir(os.path.join(base, "bridge")):
        return _kind_of_bridge(base, root)
    if os.path.exists(os.path.join(base, "device")) or "DEVTYPE=bond" in event or "DEVTYPE=vlan" in event:
        return "wired"
    if OVERLAY_NAME.match(name):
        return "overlay"
    return "bridge" if BRIDGE_NAME.match(name) else "virtual"


def _kind_of_bridge(base: str, root: str) -> str:
    """Many home servers reach their LAN through a bridge over a real NIC; one over containers leads nowhere else."""
    members = map(os.path.basename, glob.glob(os.path.join(glob.escape(base), "brif", "*")))
    return "wired" if any(kind_of(member, root) == "wired" for member in members) else "bridge"


def is_up(name: str, root: str = NET) -> bool:
    state = read(os.path.join(root, name, "operstate"), "unknown")
    return state == "up" or (
        state == "unknown" and bool(int(read(os.path.join(root, name, "flags"), "0x1"), 16) & IFF_UP)
    )


def _speed(text: str) -> int | None:
    """In Mbit/s; the kernel says -1 if it does not know."""
    return int(text) if text.isdigit() else None


def nics(run: Run, root: str = NET) -> list[Nic]:
    """Every interface with its kind, state, speed and addresses."""
    addresses = addresses_by_ip(run)
    found: list[Nic] = []
    for name in nic_names():
        base = os.path.join(root, name)
        four, six = addresses.get(name) or (ipv4_of(name), ipv6_of(name))
        found.append(
            {
                "name": name,
                "kind": kind_of(name, root),
                "up": is_up(name, root),
                "speed_mbit": _speed(read(os.path.join(base, "speed"))),
                "enslaved": os.path.exists(os.path.join(base, "master")),
                "ipv4": four,
                "ipv6": six,
            }
        )
    return promote_container_nics(found)


def promote_container_nics(found: list[Nic]) -> list[Nic]:
    """In a container or network namespace the virtual NICs are the only way out, and as fast as cables."""
    if any(nic["kind"] in ("wired", "wifi") for nic in found):
        return found
    return [
        {**nic, "kind": "wired"}
        if nic["kind"] == "virtual" and not nic["enslaved"] and (nic["ipv4"] or nic["ipv6"])
        else nic
        for nic in found
    ]


def addresses_by_ip(run: Run) -> dict[str, tuple[list[str], list[str]]]:
    found: dict[str, tuple[list[str], list[str]]] = {}
    for link in json_objects(run, ["ip", "-j", "addr"]):
        name = str(link.get("ifname", "")).split("@", 1)[0]
        entries = [entry for entry in items(link, "addr_info") if entry.get("local") and not passing(entry)]
        four, six = (
            [
                "{}/{}".format(entry["local"], entry.get("prefixlen"))
                for entry in entries
                if entry.get("family") == family
            ]
            for family in ("inet", "inet6")
        )
        found[name] = (four, six)
    return found


def passing(entry: Mapping[str, Any]) -> bool:
    """Temporary IPv6 addresses change by tomorrow, and deprecated ones are about to go."""
    return entry.get("family") == "inet6" and bool(entry.get("temporary") or entry.get("deprecated"))


def json_objects(run: Run, argv: Sequence[str]) -> list[Document]:
    """The objects in a command's JSON list; none if its output is different."""
    code, out, _dummy = run(list(argv))
    try:
        found = json.loads(out) if code == 0 else None
    except (ValueError, RecursionError):
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def ipv4_of(name: str) -> list[str]:
    """The first IPv4 address of an interface, from the kernel."""
    siocgifaddr, siocgifnetmask = 0x8915, 0x891B
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            address = fcntl.ioctl(sock.fileno(), siocgifaddr, request)[20:24]
            mask = fcntl.ioctl(sock.fileno(), siocgifnetmask, request)[20:24]
        except OSError:
            return []
    prefix = bin(int.from_bytes(mask, "big")).count("1")
    return ["%s/%d" % (socket.inet_ntoa(address), prefix)]


def ipv6_of(name: str) -> list[str]:
    """The stable addresses, without those that privacy extensions change daily."""
    found = []
    for line in read("/proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6 and fields[5] == name and not int(fields[4], 16) & PASSING:
            address = ipaddress.IPv6Address(int(fields[0], 16))
            found.append("%s/%d" % (address, int(fields[2], 16)))
    return found


def resolve_all(names: Sequence[str], patience: float = RESOLVE_SECONDS) -> dict[str, list[str]]:
    """Resolve all names in parallel; an unresponsive name server costs `patience` once.

    The threads are daemons, because a lookup cannot be cancelled.
    """
    found: dict[str, list[str]] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: resolve(name)}), daemon=True)
        for name in dict.fromkeys(names)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    told = dict(found)
    return {name: told.get(name, []) for name in names}


def resolve(name: str) -> list[str]:
    """The addresses of a name on this host, in the order it would try them."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(str(answer[4][0]).split("%", 1)[0] for answer in answers))


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def route(peer: str, address: str, interfaces: Sequence[Nic], run: Run) -> Route:
    """The route of packets to an address; sends nothing."""
    found: Route = {"peer": peer, "address": address, "nic": None, "source": None}
    answer = next(iter(json_objects(run, ["ip", "-j", "route", "get", address])), {})
    if text(answer, "dev"):
        found["nic"], found["source"] = text(answer, "dev"), text(answer, "prefsrc")
        return found
    source = source_towards(address)
    if source:
        owner = [
            nic["name"] for nic in interfaces if source in [cidr.split("/")[0] for cidr in nic["ipv4"] + nic["ipv6"]]
        ]
        found["source"], found["nic"] = source, owner[0] if owner else None
    return found


def source_towards(address: str) -> str | None:
    """The source address that the kernel would use; connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0]).split("%", 1)[0]
    except OSError:
        return None


def names_and_routes(peers: Sequence[str], interfaces: Sequence[Nic], run: Run) -> tuple[Names, list[Route]]:
    """Resolve the peers' names and find the route to each."""
    own, named = socket.gethostname(), [peer for peer in peers if not is_address(peer)]
    resolved = resolve_all([own, *named])
    names: Names = {"own": resolved[own], "peers": {peer: resolved[peer] for peer in named}}
    targets = [(peer, resolved[peer] if peer in named else [peer]) for peer in peers]
    # If no peer has a name here, the default route shows the machine's main interface.
    targets.append(("default", ["203.0.113.1"]))
    routes = [route(peer, addresses[0], interfaces, run) for peer, addresses in targets if addresses]
    return names, routes
