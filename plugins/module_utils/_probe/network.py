# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Linux host's network: interfaces, addresses, routes to given peers, names.

Reads /sys and /proc, and asks the kernel.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import glob
import ipaddress
import os
import re
import socket
import struct
import threading
import time
from typing import Sequence

from .._contract.probe import Names, Nic, Route
from .._kit.files import read_text

NET = "/sys/class/net"
# Timeout for all names together; otherwise an unresponsive name server would cost tens of seconds each.
RESOLVE_SECONDS = 8.0
OVERLAY_NAME = re.compile(
    r"^(tailscale|ts|wg|tun|tap|zt|nebula|utun|ppp|vpn|nordlynx|proton|cscotun|gpd|warp)[0-9a-z-]*$", re.I
)
BRIDGE_NAME = re.compile(r"^(docker|br-|virbr|lxcbr|lxdbr|cni|podman|flannel|cali)", re.I)
IFF_UP = 0x1
MOST_ADDRESSES = 1024
PASSING = 0x01 | 0x20  # IFA_F_TEMPORARY and IFA_F_DEPRECATED
TYPE_LOOPBACK = "772"
TYPE_NONE = "65534"


def read(path: str, default: str = "") -> str:
    """A small file of /proc or /sys, or the default."""
    return read_text(path).strip() or default


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
        # Many home servers reach their LAN through a bridge over a real NIC; one over containers leads nowhere else.
        members = map(os.path.basename, glob.glob(os.path.join(glob.escape(base), "brif", "*")))
        return "wired" if any(kind_of(member, root) == "wired" for member in members) else "bridge"
    if os.path.exists(os.path.join(base, "device")) or "DEVTYPE=bond" in event or "DEVTYPE=vlan" in event:
        return "wired"
    if OVERLAY_NAME.match(name):
        return "overlay"
    return "bridge" if BRIDGE_NAME.match(name) else "virtual"


def is_up(name: str, root: str = NET) -> bool:
    state = read(os.path.join(root, name, "operstate"), "unknown")
    flags = int(read(os.path.join(root, name, "flags"), "0x1"), 16)
    return state == "up" or (state == "unknown" and bool(flags & IFF_UP))


def nics(root: str = NET) -> list[Nic]:
    """Every interface with its kind, state, speed and addresses."""
    four, six, found = ipv4_addresses(), ipv6_addresses(), []
    for name in sorted(name for dummy, name in socket.if_nameindex()):
        base = os.path.join(root, name)
        speed = read(os.path.join(base, "speed"))  # -1 if the kernel does not know
        nic: Nic = {
            "name": name,
            "kind": kind_of(name, root),
            "up": is_up(name, root),
            "speed_mbit": int(speed) if speed.isdigit() else None,
            "enslaved": os.path.exists(os.path.join(base, "master")),
            "ipv4": four.get(name, []),
            "ipv6": six.get(name, []),
        }
        found.append(nic)
    return promote_container_nics(found)


def promote_container_nics(found: list[Nic]) -> list[Nic]:
    """In a container or network namespace the virtual NICs are the only way out, and as fast as cables."""
    if any(nic["kind"] in ("wired", "wifi") for nic in found):
        return found
    own = [nic for nic in found if nic["kind"] == "virtual" and not nic["enslaved"] and (nic["ipv4"] or nic["ipv6"])]
    return [{**nic, "kind": "wired"} if nic in own else nic for nic in found]


def ipv4_addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of all interfaces, from the kernel."""
    siocgifconf, siocgifnetmask, entry = 0x8912, 0x891B, struct.calcsize("16s16sq")
    room = array.array("B", bytes(MOST_ADDRESSES * entry))
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(sock.fileno(), siocgifconf, request))[0]
        for at in range(0, used, entry):
            one = room[at : at + entry].tobytes()
            try:
                # Of several addresses of an interface, the mask of this one.
                mask = fcntl.ioctl(sock.fileno(), siocgifnetmask, one)[20:24]
            except OSError:
                continue  # it has just gone
            # Labels of further addresses, such as eth0:1.
            name = os.fsdecode(one[:16].split(b"\0", 1)[0]).partition(":")[0]
            prefix = bin(int.from_bytes(mask, "big")).count("1")
            found.setdefault(name, []).append("%s/%d" % (socket.inet_ntoa(one[20:24]), prefix))
    return found


def ipv6_addresses() -> dict[str, list[str]]:
    """The stable IPv6 addresses, without those that privacy extensions change daily."""
    found: dict[str, list[str]] = {}
    for line in read("/proc/net/if_inet6").splitlines():
        address, dummy, prefix, dummy, flags, name = line.split()
        if not int(flags, 16) & PASSING:
            found.setdefault(name, []).append("%s/%d" % (ipaddress.IPv6Address(int(address, 16)), int(prefix, 16)))
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
    return {name: found.get(name, []) for name in names}


def resolve(name: str) -> list[str]:
    """The addresses of a name on this host, in the order it would try them."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(str(answer[4][0]).split("%", 1)[0] for answer in answers))


def route(peer: str, address: str, interfaces: Sequence[Nic]) -> Route:
    """The source address that the kernel would use for packets to an address, and the interface that has it."""
    source: str | None = None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # which sends nothing
        source = str(sock.getsockname()[0]).split("%", 1)[0]
    owners = [nic["name"] for nic in interfaces if source in [cidr.split("/")[0] for cidr in nic["ipv4"] + nic["ipv6"]]]
    return {"peer": peer, "nic": owners[0] if owners else None, "source": source}


def names_and_routes(peers: Sequence[str], interfaces: Sequence[Nic]) -> tuple[Names, list[Route]]:
    """Resolve the peers' names and find the route to each."""
    own = socket.gethostname()
    resolved = resolve_all([own, *peers])
    # An address is its own answer.
    named = [peer for peer in peers if peer not in resolved[peer]]
    names: Names = {"own": resolved[own], "peers": {peer: resolved[peer] for peer in named}}
    targets = [(peer, resolved[peer]) for peer in peers]
    # If no peer has a name here, the default route shows the machine's main interface.
    targets.append(("default", ["203.0.113.1"]))
    routes = [route(peer, addresses[0], interfaces) for peer, addresses in targets if addresses]
    return names, routes
