# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A short-lived process that answers the job's other hosts on the ports that the job will use.

It binds one address, serves only clients with its token, and exits at its deadline, whatever happens to the controller;
the next start ends one that an interrupted play left behind. It returns what it gets, so that a client sees
delay and rate.
"""

from __future__ import annotations

import errno
import hmac
import os
import random
import secrets
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Sequence, TypedDict

from .._kit import background
from .._kit.processes import PORT_CHECK, is_check, port_holders

if TYPE_CHECKING:
    from .._contract.decode import Port

GREETING = "NANOCHAT-DDP-CHECK"
ANSWER = b"OK\n"
CHUNK = 1 << 16
PATIENCE = 10.0  # seconds that a connection may be idle
DATA_PORTS = 3  # of the range that are tried
STALE_SECONDS = 30.0  # the age of a responder that nobody uses any more
LINE = 200  # maximum bytes of a request


class PeerCheckError(Exception):
    """The check could not run; the text says what was tried and what was seen."""


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
        raise PeerCheckError(f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}") from error


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
            connection.settimeout(PATIENCE)
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
