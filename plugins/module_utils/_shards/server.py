# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Serves the pieces of a folder's files to the other hosts of the job, also those of a file that is still arriving.

The module forks it. It listens on one address, serves only the listed peers, requires each request to be signed with the secret of this
transfer (which never crosses the network, and is in no file), and offers nothing but the manifest's files. It ends when idle, when its
state file disappears, or on SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import http.server
import ipaddress
import os
import random
import re
import signal
import socket
import socketserver
import threading
import time
import urllib.parse
from typing import Any, NamedTuple

from .._contract.document import Document, digest_of, number
from .._kit import background, processes
from .._kit.files import paths_in, read_object, write_json
from .folder import Digests, Manifest, ManifestEntry, ShardsError, part_of

PROOF = "X-Shards-Proof"
# How long a request waits for a piece that has not arrived yet.
PIECE_WAIT_SECONDS = 0.5
SHARE = ".share"
NAME = "nanochat-shards"
STOP_SECONDS = 10
LIFETIME = 86400
IDLE_SECONDS = 900  # without a request, after which it ends


class ServerSettings(NamedTuple):
    """Files that a server offers, to whom, and where it listens."""

    folder: str
    manifest: Manifest
    address: str
    low: int
    high: int
    allow: list[str]
    secret: str

    @property
    def place(self) -> str:
        return place_of(self.folder, self.secret)


def proof(secret: str, path: str) -> str:
    """Sign a request; used by client and server."""
    return hmac.new(secret.encode(), path.encode(), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The process


def place_of_piece(folder: str, entry: ManifestEntry, piece: int) -> str | None:
    """The file that holds the piece: whole and as described, or arriving; None if there is none yet."""
    part, full = part_of(folder, entry), os.path.join(folder, entry.path)
    # What is appended to a part has been proven.
    if os.path.exists(part) and os.path.getsize(part) >= sum(entry.span(piece)):
        return part
    # Another process writes the digests.
    is_right = os.path.exists(full) and Digests(folder).known(entry.path) == entry.sha256
    return full if is_right else None


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /NUMBER/PATH, signed, answers with that piece of that file, HEAD says whether it is here; everything else is refused silently."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server: Server

    def do_GET(self) -> None:
        settings, self.server.last_asked = self.server.settings, time.monotonic()
        found = re.fullmatch(r"/(\d{1,9})/(.+)", urllib.parse.unquote(self.path))
        entry = self.server.files.get(found[2]) if found else None
        if not hmac.compare_digest(proof(settings.secret, self.path), self.headers.get(PROOF, "")):
            self._head(403)
        elif found is None or entry is None or int(found[1]) >= len(entry.proofs()):
            self._head(404)
        else:
            try:
                self._answer(settings.folder, entry, int(found[1]))
            except FileNotFoundError:  # it has just got its name
                self._head(503)

    do_HEAD = do_GET

    def _answer(self, folder: str, entry: ManifestEntry, piece: int) -> None:
        is_question = self.command == "HEAD"
        until = time.monotonic() + PIECE_WAIT_SECONDS
        place = place_of_piece(folder, entry, piece)
        while place is None and not is_question and time.monotonic() < until:
            time.sleep(0.01)
            place = place_of_piece(folder, entry, piece)
        if place is None:
            self._head(503)
            return
        begin, size = entry.span(piece)
        with open(place, "rb") as file:
            self._head(200, size)
            if not is_question and self.connection.sendfile(file, begin, size) < size:
                self.close_connection = True

    def _head(self, code: int, size: int = 0) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class Server(socketserver.ThreadingTCPServer):
    """Bound to one address; closes connections from others than the peers unread."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, settings: ServerSettings, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
        self.settings = settings
        self.files = {one.path: one for one in settings.manifest.files}
        self.allow = {ipaddress.ip_address(one) for one in settings.allow}
        self.last_asked = time.monotonic()
        super().__init__((settings.address, port), Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return ipaddress.ip_address(client_address[0]) in self.allow

    def work(self) -> None:
        """Serve until idle or forgotten; the alarm ends even what hangs."""
        signal.alarm(LIFETIME)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.last_asked = time.monotonic()
        time.sleep(1.0)  # its state is written meanwhile
        while time.monotonic() < self.last_asked + IDLE_SECONDS and os.path.exists(self.settings.place):
            time.sleep(0.5)


def bound(settings: ServerSettings) -> Server:
    """A server on any free port of the range, in random order, because others take ports from it too."""
    low, high, seen = settings.low, settings.high, "none is free"
    ports = range(low, high + 1)
    for port in random.sample(ports, min(len(ports), 200)) if high else [0]:
        try:
            return Server(settings, port)
        except OSError as why:
            seen = str(why.strerror)
            if why.errno != errno.EADDRINUSE:
                break
    raise ShardsError(
        f"the shard server cannot listen on {settings.address} ports {low}-{high}: {seen}; the address must be one of "
        "this host's own and the range must hold a free port"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Its start and end


def place_of(folder: str, secret: str) -> str:
    """The state file of a transfer's server: one each, so that two controllers do not stop each other's."""
    return os.path.join(folder, SHARE, hashlib.sha256(secret.encode()).hexdigest()[:16])


def places(folder: str) -> list[str]:
    """Those of all transfers, including ones that were never stopped."""
    return [path for path in paths_in(os.path.join(folder, SHARE)) if not os.path.basename(path).startswith(".")]


def running(place: str) -> Document | None:
    """The state of a server if its process is alive."""
    state = read_object(place)
    found = processes.process(number(state, "pid"))
    return state if found and found.start == state.get("pid_start") and found.name == NAME else None


def start(settings: ServerSettings) -> Document:
    """Start the server in a process of its own; returns its state once it listens."""
    for old in places(settings.folder):
        if running(old) is None:  # it ended by itself
            stop(old)
    with bound(settings) as server:
        pid, begun = background.spawn(NAME, [server.socket], server.work)
        state: Document = {
            "pid": pid,
            "pid_start": begun,
            "address": settings.address,
            "port": server.server_address[1],
        }
    state["settings"] = digest_of(settings)
    os.makedirs(os.path.dirname(settings.place), mode=0o700, exist_ok=True)
    write_json(settings.place, state, 0o600)
    return state


def stop(place: str) -> None:
    """Stop exactly this server, if it runs."""
    state = running(place)
    if state is not None:
        background.end(number(state, "pid"), number(state, "pid_start"), STOP_SECONDS)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place)
    with contextlib.suppress(OSError):  # another transfer goes on
        os.rmdir(os.path.dirname(place))
