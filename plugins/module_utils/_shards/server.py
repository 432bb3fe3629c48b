# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Serves the pieces of a folder's files to the other hosts of the job, also those of a file that is still arriving.

Runs as a separate process (_kit/host_code.py makes the program), with only the standard library. It listens on one address, serves only
the listed peers, requires each request to be signed with the secret of this transfer (which never crosses the network), and offers
nothing but the manifest's files. It exits when idle, when its settings file disappears, or on SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import http.server
import ipaddress
import json
import os
import random
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.parse
from typing import Any, BinaryIO, NamedTuple, TypedDict, cast

from .._contract.document import number
from .._contract.manifest import Manifest
from .._kit import host_code, processes
from .._kit.files import read_object, read_text, write_json, write_whole
from .folder import DIGESTS, Digests, ManifestEntry, ShardsError, entries, part_of

PROOF = "X-Shards-Proof"
# How long a request waits for a piece that has not arrived yet.
PIECE_WAIT_SECONDS = 0.5
SHARE = ".share"
START_SECONDS = 15
STOP_SECONDS = 10  # for each of the two signals
LIFETIME = 86400


def proof(secret: str, path: str) -> str:
    """Sign a request; used by client and server."""
    return hmac.new(secret.encode(), path.encode(), hashlib.sha256).hexdigest()


def plain_address(address: str) -> str:
    """The canonical spelling of an address; IPv4 inside IPv6 is IPv4."""
    found = ipaddress.ip_address(address.split("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


# ---------------------------------------------------------------------------------------------------------------------
# The program


class ServedPieces:
    """The pieces that this host has: of whole files, and of those that are arriving."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder = folder
        self.files = {one.path: one for one in entries(manifest)}
        self.last_asked = time.monotonic()
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._digests = Digests(folder, use_stored=False)

    def place(self, entry: ManifestEntry, number: int) -> str | None:
        """The file that holds the piece; None if it has not arrived yet."""
        self.last_asked = time.monotonic()
        with self._lock:
            self._reload()
            if self._digests.known(entry.path) == entry.sha256:
                return os.path.join(self.folder, entry.path)
        part = part_of(self.folder, entry)
        # What is appended to it has been proven.
        return part if os.path.exists(part) and os.path.getsize(part) >= sum(entry.span(number)) else None

    def _reload(self) -> None:
        """Another process writes the digests."""
        with contextlib.suppress(OSError):
            found = os.stat(os.path.join(self.folder, DIGESTS))
            if (found.st_mtime_ns, found.st_ino) != self._stamp:
                self._stamp, self._digests = (found.st_mtime_ns, found.st_ino), Digests(self.folder)


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /NUMBER/PATH, signed, answers with that piece of that file, HEAD says whether it is here; everything else is refused silently."""

    protocol_version = "HTTP/1.1"
    server_version = "shards"
    sys_version = ""
    timeout = 60
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        found = re.fullmatch(r"/(\d{1,9})/(.+)", urllib.parse.unquote(self.path))
        entry = self.server.pieces.files.get(found[2]) if found else None
        if not hmac.compare_digest(proof(self.server.secret, self.path), self.headers.get(PROOF, "")):
            self._refuse(403)
        elif found is None or entry is None or int(found[1]) >= len(entry.proofs()):
            self._refuse(404)
        else:
            try:
                self._answer(entry, int(found[1]))
            except FileNotFoundError:  # it has just got its name
                self._refuse(503)

    def _answer(self, entry: ManifestEntry, number: int) -> None:
        is_question = self.command == "HEAD"
        until = time.monotonic() + PIECE_WAIT_SECONDS
        place = self.server.pieces.place(entry, number)
        while place is None and not is_question and time.monotonic() < until:
            time.sleep(0.01)
            place = self.server.pieces.place(entry, number)
        if place is None:
            self._refuse(503)
            return
        with open(place, "rb") as file:
            self._head(200, entry.span(number)[1])
            if not is_question:
                self._send(file, *entry.span(number))

    def _send(self, file: BinaryIO, begin: int, size: int) -> None:
        self.wfile.flush()
        while size > 0:
            sent = self.connection.sendfile(file, begin, size)
            if not sent:
                self.close_connection = True
                return
            begin, size = begin + sent, size - sent

    def _refuse(self, code: int) -> None:
        self._head(code, 0)

    def _head(self, code: int, size: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Bound to one address; closes connections from others than the peers unread."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, port: int, pieces: ServedPieces, secret: str, allow: list[str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.pieces = pieces
        self.secret = secret
        self.allow = {plain_address(one) for one in allow}
        super().__init__((address, port), Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which does a slow and useless DNS lookup.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return plain_address(client_address[0]) in self.allow

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A disconnecting peer is not worth reporting."""


def bind(address: str, low: int, high: int, pieces: ServedPieces, secret: str, allow: list[str]) -> Server:
    """Bind any free port of the range, in random order, because others take ports from it too."""
    ports = random.sample(range(low, high + 1), min(high - low + 1, 200)) if high else [0]
    seen: OSError | None = None
    for port in ports:
        try:
            return Server(address, port, pieces, secret, allow)
        except OSError as why:
            seen = why
            if why.errno != errno.EADDRINUSE:
                break
    raise OSError(f"{address} ports {low}-{high}: {seen.strerror if seen else 'none free'}")


def _watch(server: Server, config: str, idle: float) -> None:
    """Stop the server at its deadline, when it is idle, or when it is forgotten."""
    begun = time.monotonic()
    while time.monotonic() < min(begun + LIFETIME, server.pieces.last_asked + idle) and os.path.exists(config):
        time.sleep(0.5)
    server.shutdown()


def main() -> int:
    """The program: its argument is its settings file."""
    config_path = sys.argv[1]
    with open(config_path, encoding="utf-8") as file:
        config = json.load(file)
    state_path = os.path.join(os.path.dirname(config_path), "server.state")
    try:
        pieces = ServedPieces(config["folder"], config["manifest"])
        server = bind(config["address"], config["low"], config["high"], pieces, config["secret"], config["allow"])
    except OSError as why:
        write_json(state_path, {"error": str(why)})
        return 1

    def stop(*dummy: Any) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    state = {"pid": os.getpid(), "pid_start": processes.start_ticks(os.getpid()), "address": config["address"]}
    write_json(state_path, {**state, "port": server.server_port})
    threading.Thread(target=_watch, args=(server, config_path, config["idle"]), daemon=True).start()
    server.serve_forever(poll_interval=0.1)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Its start and end


class ServerSettings(NamedTuple):
    """The config of a server."""

    host: str
    folder: str
    manifest: Manifest
    address: str
    low: int
    high: int
    allow: list[str]
    secret: str
    idle: int  # seconds without a request after which it ends

    @property
    def place(self) -> str:
        return place_of(self.folder, self.secret)


class ServerState(TypedDict, total=False):
    """A server's state file; empty if there is none."""

    pid: int
    pid_start: int
    address: str
    port: int
    error: str


def place_of(folder: str, secret: str) -> str:
    """A folder per transfer for its server's files, so that two controllers do not stop each other's."""
    return os.path.join(folder, SHARE, hashlib.sha256(secret.encode()).hexdigest()[:16])


def places(folder: str) -> list[str]:
    """Those of all transfers, including ones that were never stopped."""
    share = os.path.join(folder, SHARE)
    return [os.path.join(share, name) for name in sorted(os.listdir(share))] if os.path.isdir(share) else []


def running(place: str) -> ServerState | None:
    """The state of a server if its process is alive."""
    state = _state(place)
    found = processes.process(number(state, "pid"))
    is_ours = found and found.start == state.get("pid_start") and os.path.join(place, "server.py") in found.argv
    return state if is_ours else None


def is_same(settings: ServerSettings) -> bool:
    """Whether the server that runs for this transfer has the same settings."""
    return read_object(os.path.join(settings.place, "server.json")) == settings._asdict()


def start(settings: ServerSettings) -> ServerState:
    """Start the server in a separate session; returns its state once it listens."""
    for old in places(settings.folder):
        # Remains of servers that exited by themselves.
        if _state(old) and running(old) is None:
            _remove_tree(old)
    place = settings.place
    # makedirs applies the mode only to the last folder.
    os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
    os.makedirs(place, mode=0o700, exist_ok=True)
    for name in ("server.state", "server.log"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(place, name))
    program, config = os.path.join(place, "server.py"), os.path.join(place, "server.json")
    write_whole(program, host_code.program(__name__, "main"), 0o600)
    write_json(config, settings._asdict(), 0o600)
    with open(os.path.join(place, "server.log"), "wb") as log:
        process = subprocess.Popen(  # pylint: disable=ansible-bad-function
            [sys.executable, "-I", program, config],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd="/",
        )
    return _wait_until_listening(settings, process)


def _wait_until_listening(settings: ServerSettings, process: subprocess.Popen[bytes]) -> ServerState:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        state = _state(settings.place)
        if state.get("error"):
            process.wait()
            raise ShardsError(
                f"{settings.host}: the shard server cannot listen on {state['error']}; the address must be one of this "
                "host's own and the range must hold a free port"
            )
        if state.get("port"):
            return state
        if process.poll() is not None:
            break
        time.sleep(0.02)
    said = read_text(os.path.join(settings.place, "server.log")).strip().splitlines()[-1:] or ["nothing"]
    raise ShardsError(f"{settings.host}: the shard server of {settings.folder} did not start; it said: {said[0]}")


def stop(place: str) -> ServerState | None:
    """Stop exactly this server; returns its state, None if it was not running."""
    state = running(place)
    if state is not None:
        pid, started = state["pid"], state["pid_start"]
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if processes.alive(pid, started):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
            deadline = time.monotonic() + STOP_SECONDS
            while processes.alive(pid, started) and time.monotonic() < deadline:
                time.sleep(0.02)
    _remove_tree(place)
    with contextlib.suppress(OSError):  # another transfer goes on
        os.rmdir(os.path.dirname(place))
    return state


def _state(place: str) -> ServerState:
    return cast(ServerState, read_object(os.path.join(place, "server.state")))


def _remove_tree(path: str) -> None:
    """Remove a folder or file of any kind; it may be missing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
