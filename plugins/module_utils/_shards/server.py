# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Serves a folder's verified files to the other hosts of the job during a transfer.

Runs as a separate process (_kit/host_code.py makes the program, `python3 server.py server.json`), with only
the standard library. It listens on one address, serves only the listed peers, requires each request to be signed with the secret
of this transfer (which never crosses the network), and offers no file without a known digest. It exits at
its deadline, when idle, when its settings file disappears, or on SIGTERM.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import http.server
import ipaddress
import json
import os
import random
import re
import signal
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from typing import Any

from .._contract.manifest import Offered, Remembered, remembered
from .._kit import processes
from .._kit.files import read_object, write_json

PROOF = "X-Shards-Proof"
TIMES = "X-Shards-Times"
SLOTS_OF_A_FILE = 2
SLOTS = 6


def proof(secret: str, method: str, path: str, ranges: str) -> str:
    """Sign a request; used by client and server."""
    return hmac.new(secret.encode(), f"{method} {path}\n{ranges}".encode(), hashlib.sha256).hexdigest()


def plain_address(address: str) -> str:
    """The canonical spelling of an address; IPv4 inside IPv6 is IPv4."""
    found = ipaddress.ip_address(address.split("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


class ServedFiles:
    """The files on offer, and the transfers in progress."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.served: dict[str, int] = {}  # bytes of each file that were sent
        self.times: dict[str, int] = {}  # how often each file was asked for
        self.active: dict[str, int] = {}
        self.last_asked = time.monotonic()
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] = (0, 0)
        self._known: dict[str, Remembered] = {}

    def offer(self) -> dict[str, Offered]:
        """All files with a known digest that have not changed since."""
        with self._lock:
            self._reload()
            return {
                path: {"bytes": known["bytes"], "sha256": known["sha256"], "times": self.times.get(path, 0)}
                for path, known in self._known.items()
                if self._is_unchanged(path, known)
            }

    def take_slot(self, path: str, believed: str) -> bool:
        """Limit parallel transfers; peers that wait soon find the file on hosts already served.

        A peer sends how often it believes this file was served. If that is outdated, it must first ask again who else has
        the file, so a third copy nearly always comes from another host.
        """
        with self._lock:
            self.last_asked = time.monotonic()
            times = self.times.get(path, 0)
            is_full = self.active.get(path, 0) >= SLOTS_OF_A_FILE or sum(self.active.values()) >= SLOTS
            if is_full or believed not in ("", str(times)):
                return False
            self.times[path] = times + 1
            self.active[path] = self.active.get(path, 0) + 1
            return True

    def free_slot(self, path: str) -> None:
        with self._lock:
            self.last_asked = time.monotonic()
            self.active[path] -= 1

    def count(self, path: str, sent: int) -> None:
        with self._lock:
            self.last_asked = time.monotonic()
            self.served[path] = self.served.get(path, 0) + sent

    def quiet_seconds(self) -> float:
        with self._lock:
            return 0.0 if any(self.active.values()) else time.monotonic() - self.last_asked

    def _reload(self) -> None:
        try:
            name = os.path.join(self.folder, ".digests.json")
            found = os.stat(name)
            if (found.st_mtime_ns, found.st_ino) != self._stamp:
                self._known = remembered(read_object(name))
                self._stamp = (found.st_mtime_ns, found.st_ino)
        except OSError:
            self._known = {}

    def _is_unchanged(self, path: str, known: Remembered) -> bool:
        try:
            found = os.stat(os.path.join(self.folder, path))
        except (OSError, ValueError):  # an impossible file name
            return False
        now = [found.st_size, found.st_mtime_ns, found.st_ino]
        return now == [known.get("bytes"), known.get("mtime_ns"), known.get("inode")]


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /have and GET /files/PATH, signed; everything else is refused silently."""

    protocol_version = "HTTP/1.1"
    server_version = "shards"
    sys_version = ""
    timeout = 60
    server: Server

    def do_GET(self) -> None:
        wanted = proof(self.server.secret, "GET", self.path, self.headers.get("Range", ""))
        if not hmac.compare_digest(wanted, self.headers.get(PROOF, "")):
            self._answer(403)
        elif self.path == "/have":
            body = json.dumps({"files": self.server.files.offer(), "active": sum(self.server.files.active.values())})
            self._answer(200, body.encode())
        elif self.path.startswith("/files/"):
            self._send_file(urllib.parse.unquote(self.path[len("/files/") :]))
        else:
            self._answer(404)

    def _send_file(self, path: str) -> None:
        files = self.server.files
        known = files.offer().get(path)
        if known is None:
            self._answer(404)
            return
        begin = _range_start(self.headers.get("Range", ""), known["bytes"])
        if begin is None:
            self._answer(416)
        elif not files.take_slot(path, self.headers.get(TIMES, "")):
            self._answer(503)
        else:
            try:
                self._stream(path, begin, known)
            finally:
                files.free_slot(path)

    def _stream(self, path: str, begin: int, known: Offered) -> None:
        length = known["bytes"] - begin
        with open(os.path.join(self.server.files.folder, path), "rb") as file:
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(length))
            self.send_header("Content-Range", f"bytes {begin}-{known['bytes'] - 1}/{known['bytes']}")
            self.end_headers()
            self.wfile.flush()
            while length > 0:
                # In chunks, so that the count is right if the other side disconnects.
                sent = self.connection.sendfile(file, begin, min(length, 8 << 20))
                if not sent:
                    self.close_connection = True
                    break
                self.server.files.count(path, sent)
                begin += sent
                length -= sent

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged; the counts suffice."""


def _range_start(header: str, size: int) -> int | None:
    if not header:
        return 0
    found = re.match(r"bytes=(\d+)-$", header)
    return int(found.group(1)) if found and int(found.group(1)) < size else None


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Bound to one address; closes connections from others than the peers unread."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, port: int, files: ServedFiles, secret: str, allow: list[str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.files = files
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


def bind(address: str, low: int, high: int, files: ServedFiles, secret: str, allow: list[str]) -> Server:
    """Bind any free port of the range, in random order, because others take ports from it too."""
    ports = random.sample(range(low, high + 1), min(high - low + 1, 200)) if high else [0]
    seen: OSError | None = None
    for port in ports:
        try:
            return Server(address, port, files, secret, allow)
        except OSError as why:
            seen = why
            if why.errno != errno.EADDRINUSE:
                break
    raise OSError(f"{address} ports {low}-{high}: {seen.strerror if seen else 'none free'}")


def watch(server: Server, config: str, deadline: float, idle: float) -> None:
    """Stop the server at its deadline, when it is idle, or when it is forgotten."""
    while time.monotonic() < deadline and server.files.quiet_seconds() < idle and os.path.exists(config):
        time.sleep(0.5)
    server.shutdown()


def main() -> int:
    """The program: its argument is its settings file."""
    config_path = sys.argv[1]
    with open(config_path, encoding="utf-8") as file:
        config = json.load(file)
    state_path = config["state"]
    files = ServedFiles(config["folder"])
    try:
        server = bind(config["address"], config["low"], config["high"], files, config["secret"], config["allow"])
    except OSError as why:
        write_json(state_path, {"error": str(why)})
        return 1
    state = {"pid": os.getpid(), "pid_start": processes.start_ticks(os.getpid()), "address": config["address"]}
    state.update(port=server.server_port, started=time.time(), config=config_path, ended=None, served={})

    def stop(*dummy: Any) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    write_json(state_path, state)
    limits = (time.monotonic() + config["lifetime"], config["idle"])
    threading.Thread(target=watch, args=(server, config_path, *limits), daemon=True).start()
    server.serve_forever(poll_interval=0.1)
    write_json(state_path, {**state, "ended": time.time(), "served": dict(files.served)})
    return 0
