# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests from one host to the others: every port, delay, rate, interface. On each a short-lived process answers on the ports of the job.

That responder binds one address, serves only clients with its token, and exits at its deadline, whatever happens to the controller;
the next start ends one that an interrupted play left behind. It returns what it gets, so that a client sees delay and rate.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import secrets
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Iterator, Sequence, TypedDict

from .._kit import background, bare
from .._kit.processes import PORT_CHECK, is_check, port_holders

if TYPE_CHECKING:
    from typing import NotRequired

    from .._contract.decode import Duration, Port, Rate

GREETING = "NANOCHAT-DDP-CHECK"
ANSWER = b"OK\n"
CHUNK = 1 << 16
PINGS = 15
SEND_BUFFER = 1 << 18  # its content must drain over a slow link before the timeout
PATIENCE = 5.0
RATE_SECONDS = 0.5  # of sending, for the rate
IDLE_SECONDS = 10.0  # that a responder keeps a connection without data
DATA_PORTS = 3  # of the range that are tried
STALE_SECONDS = 30.0  # the age of a responder that nobody uses any more
LINE = 200  # maximum bytes of a request

# How a connection fails, for people; the system's own words if it is none of these.
FORBIDDEN = "forbidden by an outgoing firewall rule"
FAILURES = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "rejected or unreachable",
    errno.ENETUNREACH: "no route",
    errno.EADDRNOTAVAIL: "this host lost its address",
    errno.EPERM: FORBIDDEN,
    errno.EACCES: FORBIDDEN,
    errno.ETIMEDOUT: "no answer (dropped)",
    errno.ECONNRESET: "cut off",
}


class CheckedPeer(TypedDict):
    """The addresses and ports of another host's responder."""

    address: str
    ports: list[int]
    token: str


class PortTry(TypedDict):
    """One port of a peer, and how it fails if it does."""

    port: int
    error: str


class LinkTry(TypedDict):
    """One peer: its ports and measurements; None if not measurable."""

    host: NotRequired[str]  # the peer's name, which the controller adds
    address: str
    ports: list[PortTry]
    latency_ms: Duration | None  # median round trip
    bandwidth_mbit: Rate | None  # rate while both send, as in a training step; on a shared Wi-Fi channel half of it
    error: str  # what went wrong in the measurements
    nic: str | None  # the interface on the route


@contextlib.contextmanager
def asked(source: str, peer: CheckedPeer, port: int, timeout: float) -> Iterator[socket.socket]:
    """A connection from our planned address that has shown the token. Any other answer comes from a stranger."""
    with socket.create_connection((peer["address"], port), timeout, (source, 0) if source else None) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.sendall(f"{GREETING} {peer['token']}\n".encode())
        if _exactly(sock, len(ANSWER)) != ANSWER:
            raise OSError(None, "another program answers there")
        yield sock


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
        with asked(source, peer, port, timeout):
            return {"port": port, "error": ""}
    except OSError as why:
        number = errno.ETIMEDOUT if isinstance(why, socket.timeout) else why.errno or 0
        return {"port": port, "error": FAILURES.get(number, why.strerror or str(why))}


def latency(source: str, peer: CheckedPeer, port: int, timeout: float) -> float:
    """The median round trip in milliseconds."""
    with asked(source, peer, port, timeout) as sock:
        trips = []
        for number in range(PINGS):
            begin = time.monotonic()
            sock.sendall(struct.pack("!Q", number))
            if len(_exactly(sock, 8)) < 8:
                break
            trips.append(time.monotonic() - begin)
    return round(sorted(trips)[len(trips) // 2] * 1000, 3) if trips else 0.0


def both_ways(source: str, peer: CheckedPeer, port: int, timeout: float) -> float:
    """The Mbit/s that come back while as much is sent."""
    with asked(source, peer, port, timeout) as sock:
        sock.settimeout(max(PATIENCE, timeout))
        threading.Thread(target=_send_until_closed, args=(sock,), daemon=True).start()
        buffer, total = bytearray(CHUNK), 0
        count, first = sock.recv_into(buffer), time.monotonic()
        last = begin = first + RATE_SECONDS / 5  # the first packets met no others
        while count and last < first + RATE_SECONDS:
            count = sock.recv_into(buffer)
            if time.monotonic() >= begin:
                total, last = total + count, time.monotonic()
        sock.shutdown(socket.SHUT_RDWR)
    if not count:
        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
    return round(total * 8 / max(last - begin, 1e-9) / 1e6, 1)


def _send_until_closed(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(bytes(CHUNK))


def nic_towards(source: str, peer: str) -> str | None:
    """The interface that packets to the peer really use; None if `ip` cannot tell."""
    plain = peer.split("%", 1)[0]
    code, out, dummy = bare.tool(["ip", "route", "get", plain, *(["from", source.split("%", 1)[0]] if source else [])])
    words = out.split()
    return dict(zip(words, words[1:])).get("dev") if code == 0 else None


def check_peer(source: str, peer: CheckedPeer, timeout: float) -> LinkTry:
    """All ports of one peer at once, then the delay and the interface; the rate is measured later, one peer at a time."""
    with ThreadPoolExecutor(max_workers=max(1, len(peer["ports"]))) as pool:
        ports = list(pool.map(lambda port: try_port(source, peer, port, timeout), peer["ports"]))
    link: LinkTry = {
        "address": peer["address"], "ports": ports, "latency_ms": None, "bandwidth_mbit": None, "error": "",
        "nic": nic_towards(source, peer["address"]),
    }  # fmt: skip
    usable = usable_port(link)
    if usable is not None:
        try:
            link["latency_ms"] = latency(source, peer, usable, timeout)
        except OSError as error:
            link["error"] = f"round trips: {error.strerror or error}"
    return link


def closed_ports(link: LinkTry) -> list[PortTry]:
    """The unreachable ones."""
    return [port for port in link["ports"] if port["error"]]


def usable_port(link: LinkTry) -> int | None:
    """A port where the responder itself answered."""
    return next((port["port"] for port in link["ports"] if not port["error"]), None)


def peer_check(
    address: str, peers: Sequence[CheckedPeer], timeout: float = 3.0, rates: bool = True
) -> dict[str, list[LinkTry]]:
    """The links to the peers (see CheckedPeer): reachable on every port, delay, rate (unless without rates), interface."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        links = list(pool.map(lambda peer: check_peer(address, peer, timeout), peers))
    for peer, link in zip(peers, links if rates else []):
        port = usable_port(link)
        if port is None or link["error"]:
            continue
        try:
            link["bandwidth_mbit"] = both_ways(address, peer, port, timeout)
        except OSError as error:
            link["error"] = f"bulk data: {error.strerror or error}"
    return {"links": links}


# -- the responder ------------------------------------------------------------------------------------------------------


class Responder(TypedDict):
    """Data for the peers and for stopping."""

    ports: list[Port]
    token: str
    pid: int
    started: int


def start_responder(
    address: str, rendezvous_port: int, others: Sequence[int], low: int, high: int, seconds: int
) -> dict[str, object]:
    """Start answering at an address for so many seconds, on the rendezvous port (0 if this host is not the master), others where the
    job will listen, such as the keeper's port, and some of the data ports from low to high."""
    sockets: list[socket.socket] = []
    if rendezvous_port:
        wait_for_checks(rendezvous_port)
        sockets += _try_bind(address, rendezvous_port)
    for port in others:
        sockets += _try_bind(address, port)
    wanted = len(sockets) + DATA_PORTS
    # Both ends of the range and random ports between them, more than needed because some may be taken.
    for port in dict.fromkeys([low, high, *(random.randint(low, high) for dummy in range(60))]):
        if len(sockets) < wanted and port not in (rendezvous_port, *others):
            sockets += _try_bind(address, port)
    token = secrets.token_hex(16)
    pid, started = background.spawn(PORT_CHECK, sockets, lambda: _serve(sockets, token, seconds))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return {"responder": {"ports": ports, "token": token, "pid": pid, "started": started}}


def stop_responder(pid: int, started: int) -> dict[str, bool]:
    """Stop the responder that is this process and started at that clock tick; whether it ran."""
    return {"stopped": background.end(pid, started)}


def _try_bind(address: str, port: int) -> list[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return [socket.create_server((address, port), family=family, backlog=64)]
    except OSError as error:
        # Low ports belong to root; otherwise SELinux or AppArmor denied it, which preflight should know.
        if error.errno == errno.EADDRINUSE or (error.errno == errno.EACCES and port < 1024):
            return []
        raise OSError(f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}") from error


def wait_for_checks(port: int, patience: float = 40.0) -> None:
    """Wait until our own checks on the port are over: another controller's takes seconds, and one that an interrupted play left
    behind is ended."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        holders = [one.process for one in port_holders([port]) if one.process and one.uid == os.getuid()]
        checks = [one for one in holders if is_check(one.command)]
        if not checks:
            return
        for one in checks:
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - one.start / os.sysconf("SC_CLK_TCK")
            if one.command == PORT_CHECK and age > STALE_SECONDS:
                background.end(one.pid, one.start)
        time.sleep(0.1)


def _serve(sockets: Sequence[socket.socket], token: str, seconds: int) -> None:
    signal.alarm(max(1, seconds))
    for listener in sockets:
        threading.Thread(target=_accept, args=(listener, token), daemon=True).start()
    while True:
        signal.pause()


def _accept(listener: socket.socket, token: str) -> None:
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            time.sleep(0.05)  # out of descriptors; the next one may get some
            continue
        threading.Thread(target=answer, args=(connection, token), daemon=True).start()


def answer(connection: socket.socket, token: str) -> None:
    """Serve one connection; clients without the token are disconnected silently."""
    with connection:
        try:
            connection.settimeout(IDLE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Unbuffered, so that the bytes after the line stay in the socket.
            words = connection.makefile("rb", buffering=0).readline(LINE).decode("ascii").split()
            if len(words) != 2 or words[0] != GREETING or not hmac.compare_digest(words[1], token):
                return
            connection.sendall(ANSWER)
            while part := connection.recv(CHUNK):
                connection.sendall(part)
        except (OSError, UnicodeError):
            return
