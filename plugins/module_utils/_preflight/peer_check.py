# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests from one host to the others' responders: every port, delay, rate, full-size packets, interface."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence, TypedDict

from .._kit import bare
from .peer_responder import ANSWER, CHUNK, GREETING, sockaddr

if TYPE_CHECKING:
    from .._contract.decode import Duration, Rate

# Constants missing from Python's socket module.
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO, IPV6_MTU = 23, 2, 24

PINGS = 15
PATH_SIZES = (8192, 4000, 1500, 1492, 1450, 1400, 1350, 1280, 576)
SEND_BUFFER = 1 << 18  # its content must drain over a slow link before the timeout
PATIENCE = 5.0
RATE_SECONDS = 0.5  # of sending, for the rate
DEADLINE = 60.0  # seconds after which no further peer's rate is measured

KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "no-route",
    errno.EADDRNOTAVAIL: "no-address",
    errno.EPERM: "forbidden",
    errno.EACCES: "forbidden",
    errno.ETIMEDOUT: "dropped",
    errno.ECONNRESET: "reset",
}


class CheckedPeer(NamedTuple):
    """The addresses and ports of another host's responder."""

    address: str
    ports: list[int]
    token: str


class PortTry(TypedDict):
    """One port of a peer, and how it fails if it does."""

    port: int
    error: str  # empty, dropped, refused, unreachable, no-route, no-address, forbidden, reset, stranger or failed
    words: str  # of the system; dropped: no answer in time, stranger: the port is open, but another program answers


class _PeerName(TypedDict, total=False):
    host: str  # the peer's name, which the controller adds


class LinkTry(_PeerName):
    """One peer: its ports and measurements; None if not measurable."""

    address: str
    ports: list[PortTry]
    latency_ms: Duration | None  # median round trip
    bandwidth_mbit: Rate | None  # rate while both send, as in a training step; on a shared Wi-Fi channel half of it
    mtu: int | None  # the path MTU according to the kernel
    passing_size: int | None  # of packets that arrive, where those of that size do not
    error: str  # what went wrong in the measurements
    nic: str | None  # the interface on the route


class Stranger(OSError):
    """Something answers, but it is not our responder."""


def kind_of(error: OSError) -> str:
    """One word for a connection failure."""
    if isinstance(error, Stranger):
        return "stranger"
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "dropped"
    return KINDS.get(error.errno or 0, "failed")


def connect(source: str, peer: str, port: int, timeout: float, segment: int = 0) -> socket.socket:
    """A connection from our planned address with fragmentation disabled."""
    family, where = sockaddr(peer, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        if segment:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if source:
            sock.bind(sockaddr(source, 0)[1])
        sock.connect(where)
    except OSError:
        sock.close()
        raise
    return sock


def ask(sock: socket.socket, token: str) -> None:
    """Show the token. Any other answer comes from a stranger."""
    sock.sendall(f"{GREETING} {token}\n".encode())
    if _exactly(sock, len(ANSWER)) != ANSWER:
        raise Stranger(0, "another program answers there")


def _exactly(sock: socket.socket, count: int) -> bytes:
    reply = b""
    while len(reply) < count:
        part = sock.recv(count - len(reply))
        if not part:
            break
        reply += part
    return reply


def try_port(source: str, peer: CheckedPeer, port: int, timeout: float) -> PortTry:
    """Whether a port of a peer is reachable, or how it fails."""
    try:
        with connect(source, peer.address, port, timeout) as sock:
            ask(sock, peer.token)
    except OSError as why:
        # A foreign program that accepts the connection still proves that the port is open.
        return {"port": port, "error": kind_of(why), "words": why.strerror or str(why)}
    return {"port": port, "error": "", "words": ""}


def latency(source: str, peer: CheckedPeer, port: int, timeout: float) -> float:
    """The median round trip in milliseconds."""
    with connect(source, peer.address, port, timeout) as sock:
        ask(sock, peer.token)
        trips = []
        for number in range(PINGS):
            begin = time.monotonic()
            sock.sendall(struct.pack("!Q", number))
            if len(_exactly(sock, 8)) < 8:
                break
            trips.append(time.monotonic() - begin)
    return round(sorted(trips)[len(trips) // 2] * 1000, 3) if trips else 0.0


def both_ways(source: str, peer: CheckedPeer, port: int, timeout: float) -> tuple[float, int]:
    """(Mbit/s that come back while as much is sent, path MTU known to the kernel by then)."""
    with connect(source, peer.address, port, timeout) as sock:
        ask(sock, peer.token)
        sock.settimeout(max(PATIENCE, timeout))
        threading.Thread(target=_send_until_closed, args=(sock,), daemon=True).start()
        buffer, total = bytearray(CHUNK), 0
        count, first = sock.recv_into(buffer), time.monotonic()
        last = begin = first + RATE_SECONDS / 5  # the first packets met no others
        while count and last < first + RATE_SECONDS:
            count = sock.recv_into(buffer)
            if time.monotonic() >= begin:
                total, last = total + count, time.monotonic()
        mtu = path_mtu(sock)
        sock.shutdown(socket.SHUT_RDWR)
    if not count:
        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
    return round(total * 8 / max(last - begin, 1e-9) / 1e6, 1), mtu


def _send_until_closed(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(bytes(CHUNK))


def path_mtu(sock: socket.socket) -> int:
    """The path MTU as the kernel knows it; 0 if it does not."""
    six = sock.family == socket.AF_INET6
    try:
        return sock.getsockopt(socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP, IPV6_MTU if six else IP_MTU)
    except OSError:
        return 0


def passing_size(source: str, peer: CheckedPeer, port: int, timeout: float) -> int | None:
    """The largest packet that arrives if full-size ones do not; None if none does."""
    headers = 60 if ":" in peer.address else 40
    return next((size for size in PATH_SIZES if _passes(source, peer, port, min(timeout, 1.0), size - headers)), None)


def _passes(source: str, peer: CheckedPeer, port: int, timeout: float, segment: int) -> bool:
    """Whether data in TCP segments of this size arrive."""
    try:
        with connect(source, peer.address, port, timeout, segment) as sock:
            ask(sock, peer.token)
            sock.sendall(bytes(CHUNK))
            return len(_exactly(sock, CHUNK)) == CHUNK
    except OSError:
        return False


def nic_towards(source: str, peer: str) -> str | None:
    """The interface that packets to the peer really use; None if `ip` cannot tell."""
    plain = peer.split("%", 1)[0]
    code, out, dummy = bare.tool(["ip", "route", "get", plain, *(["from", source.split("%", 1)[0]] if source else [])])
    words = out.split()
    return dict(zip(words, words[1:])).get("dev") if code == 0 else None


def check_peer(source: str, peer: CheckedPeer, timeout: float) -> LinkTry:
    """All ports of one peer at once, then the delay and the interface; the rate is measured later, one peer at a time."""
    with ThreadPoolExecutor(max_workers=max(1, len(peer.ports))) as pool:
        ports = list(pool.map(lambda port: try_port(source, peer, port, timeout), peer.ports))
    link: LinkTry = {
        "address": peer.address, "ports": ports, "latency_ms": None, "bandwidth_mbit": None, "mtu": None,
        "passing_size": None, "error": "", "nic": nic_towards(source, peer.address),
    }  # fmt: skip
    usable = usable_port(link)
    if usable is not None:
        try:
            link["latency_ms"] = latency(source, peer, usable, timeout)
        except OSError as error:
            link["error"] = f"round trips: {error.strerror or error}"
    return link


def closed_ports(link: LinkTry) -> list[PortTry]:
    """The unreachable ones; a port where a stranger answers is reachable."""
    return [port for port in link["ports"] if port["error"] not in ("", "stranger")]


def usable_port(link: LinkTry) -> int | None:
    """A port where the responder itself answered."""
    return next((port["port"] for port in link["ports"] if not port["error"]), None)


def measure_rate(source: str, peer: CheckedPeer, link: LinkTry, timeout: float) -> None:
    """Rate and path MTU; if only small packets pass, their size."""
    port = usable_port(link)
    if port is None or link["latency_ms"] is None:
        return
    try:
        link["bandwidth_mbit"], link["mtu"] = both_ways(source, peer, port, timeout)
    except OSError as error:
        link["passing_size"] = passing_size(source, peer, port, timeout)
        link["error"] = f"bulk data: {error.strerror or error}"


def peer_check(
    address: str, peers: Sequence[Mapping[str, Any]], timeout: float = 3.0, rates: bool = True
) -> dict[str, list[LinkTry]]:
    """The links to the peers (see CheckedPeer): reachable on every port, delay, rate (unless without rates), packet size, interface."""
    checked = [CheckedPeer(**peer) for peer in peers]
    end = time.monotonic() + DEADLINE
    with ThreadPoolExecutor(max_workers=16) as pool:
        links = list(pool.map(lambda peer: check_peer(address, peer, timeout), checked))
    for peer, link in zip(checked, links):
        if rates and time.monotonic() < end:
            measure_rate(address, peer, link, timeout)
        elif rates and not link["error"]:
            link["error"] = f"bulk data: the time limit of {DEADLINE:g} s for all peers was reached"
    return {"links": links}
