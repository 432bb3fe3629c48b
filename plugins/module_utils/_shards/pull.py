# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pulls missing files of a folder from the hosts of the job that already have them.

Every host serves what it has finished, and the rarest file is fetched first, so the first source sends each file
about once regardless of the number of hosts. An interrupted transfer resumes, from another host if necessary; a file gets
its name only if its digest is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import socket
import threading
import time
import urllib.parse
from typing import Any, NamedTuple

from .._contract import validate
from .._contract.manifest import Offered
from .._contract.run_folder import MANIFEST
from .._kit.words import plural
from .folder import CHUNK, Digests, ManifestEntry, ShardsError
from .server import PROOF, TIMES, proof

CONNECT_SECONDS = 10.0
ASK_AGAIN_SECONDS = 0.5
ASK_SOON_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
LONGEST_ANSWER = 64 * 1024 * 1024  # timeout of asking a peer for its files


class ShardPeer(NamedTuple):
    """A host of the job that serves its folder."""

    host: str
    address: str
    port: int


class BusyError(Exception):
    """The peer has no free slot now."""


class WrongBytesError(Exception):
    """A complete file arrived, but it does not match the manifest."""


class Transfer(NamedTuple):
    """A file to fetch from a peer."""

    entry: ManifestEntry
    peer: ShardPeer
    times: int  # how often the peer is believed to have sent it


class Swarm:
    """Missing files and those that the others offer; shared by all threads."""

    def __init__(self, wanted: list[ManifestEntry], peers: list[ShardPeer], patience: float) -> None:
        self.todo: dict[str, ManifestEntry] = {one.path: one for one in wanted}
        self.peers = peers
        self.patience = patience
        self.pulled: dict[str, int] = {}  # by host: bytes of the files whose last byte it sent
        self.trouble: dict[str, str] = {}  # by host: the last thing that went wrong with it
        self.failure: BaseException | None = None  # here, so that no peer can help
        self.lock = threading.RLock()
        self._busy: set[str] = set()
        self._have: dict[ShardPeer, dict[str, Offered]] = {}
        self._wrong: set[tuple[ShardPeer, str]] = set()
        self._pause: dict[tuple[ShardPeer, str], float] = {}
        self._failures: dict[ShardPeer, int] = {}
        self._last_progress = time.monotonic()
        self.news_wanted = threading.Event()

    def next_transfer(self) -> Transfer | None:
        """The rarest file that a peer offers, from the peer that sent it least; None if there is none now."""
        with self.lock:
            now = time.monotonic()
            offers = []
            for path, entry in self.todo.items():
                if path in self._busy:
                    continue
                holders = [peer for peer in self.peers if self._holds(peer, entry)]
                for peer in holders:
                    if max(self._pause.get((peer, path), 0), self._pause.get((peer, ""), 0)) <= now:
                        times = self._have[peer][path]["times"]
                        offers.append((len(holders), times, random.random(), Transfer(entry, peer, times)))
            if not offers:
                return None
            transfer = min(offers)[3]
            self._busy.add(transfer.entry.path)
            return transfer

    def _holds(self, peer: ShardPeer, entry: ManifestEntry) -> bool:
        known = self._have.get(peer, {}).get(entry.path)
        return known is not None and known["sha256"] == entry.sha256 and (peer, entry.path) not in self._wrong

    def note_offers(self, peer: ShardPeer, files: dict[str, Offered]) -> None:
        """A peer listed its files; any news means that the swarm is alive."""
        with self.lock:
            if set(files) != set(self._have.get(peer, {})):
                self._last_progress = time.monotonic()
            self._have[peer] = files
            self._failures[peer] = 0

    def note_progress(self) -> None:
        """Bytes have arrived."""
        with self.lock:
            self._last_progress = time.monotonic()

    def note_arrival(self, transfer: Transfer) -> None:
        with self.lock:
            self._busy.discard(transfer.entry.path)
            self.todo.pop(transfer.entry.path, None)
            self.pulled[transfer.peer.host] = self.pulled.get(transfer.peer.host, 0) + transfer.entry.bytes
            self._last_progress = time.monotonic()

    def note_failure(self, transfer: Transfer, why: Exception) -> None:
        """Let somebody else try: another peer, or this one a little later."""
        with self.lock:
            self._busy.discard(transfer.entry.path)
            if isinstance(why, BusyError):
                self._pause[(transfer.peer, transfer.entry.path)] = time.monotonic() + random.uniform(0.05, 0.3)
                self.news_wanted.set()
            elif isinstance(why, WrongBytesError):
                self._wrong.add((transfer.peer, transfer.entry.path))
                self.trouble[transfer.peer.host] = str(why)
            else:
                self.note_unreachable(transfer.peer, why)

    def note_unreachable(self, peer: ShardPeer, why: Exception) -> None:
        with self.lock:
            self._failures[peer] = self._failures.get(peer, 0) + 1
            pause = min(LONGEST_PAUSE_SECONDS, 0.2 * 2 ** self._failures[peer])
            self._pause[(peer, "")] = time.monotonic() + pause
            self.trouble[peer.host] = f"{peer.address}:{peer.port}: {network_error_text(why)}"

    def may_ask(self, peer: ShardPeer) -> bool:
        with self.lock:
            return self._pause.get((peer, ""), 0) <= time.monotonic()

    def goes_on(self) -> bool:
        """Whether there is still something to do, and a chance that it succeeds."""
        return not self.is_over() and not self.is_stuck() and self.failure is None

    def is_stuck(self) -> bool:
        """No progress, or nobody has what is missing."""
        with self.lock:
            if not self._busy and self._is_hopeless():
                return True
            return time.monotonic() - self._last_progress > self.patience

    def _is_hopeless(self) -> bool:
        """All peers answered, and none has what is missing: it cannot turn up later."""
        everyone = all(peer in self._have for peer in self.peers)
        return everyone and not any(self._holds(peer, entry) for peer in self.peers for entry in self.todo.values())

    def is_over(self) -> bool:
        with self.lock:
            return not self.todo


def _offered(one: Any) -> Offered | None:
    """A peer's offer of a file; None if invalid."""
    try:
        return {
            "bytes": validate.whole(one["bytes"]), "sha256": validate.sha256(one["sha256"]), "times": validate.whole(one.get("times", 0))
        }  # fmt: skip
    except (KeyError, TypeError, AttributeError, validate.InvalidHostData):
        return None


def network_error_text(why: Exception) -> str:
    """A network exception as text."""
    if isinstance(why, (socket.timeout, TimeoutError)):
        return "timed out (a firewall drops packets, or the host is gone)"
    if isinstance(why, ConnectionRefusedError):
        return "connection refused (its shard server has ended)"
    if isinstance(why, OSError) and why.strerror:
        return why.strerror
    return str(why) or type(why).__name__


class Puller(NamedTuple):
    """Fetches files into a folder with a few threads."""

    host: str
    digests: Digests
    peers: list[ShardPeer]
    secret: str
    address: str  # this host's own, to connect from
    parallel: int = 3

    def pull(self, wanted: list[ManifestEntry], patience: float) -> dict[str, int]:
        """Fetch all wanted files, or raise one sentence about those that failed; returns the bytes from each host."""
        swarm = Swarm(wanted, self.peers, patience)
        workers = [
            threading.Thread(target=self._work, args=(swarm,), daemon=True)
            for dummy in range(min(self.parallel, len(wanted)))
        ]
        for worker in workers:
            worker.start()
        while swarm.goes_on():
            self._ask_all(swarm)
            _wait(swarm, ASK_AGAIN_SECONDS)
        if swarm.failure is not None:
            why = local_error_text(swarm.failure)
            raise ShardsError(f"{self.host}: {self.digests.folder} could not be completed: {why}")
        if not swarm.is_over():
            raise ShardsError(self._what_is_missing(swarm))
        for worker in workers:
            worker.join()
        return swarm.pulled

    def _ask_all(self, swarm: Swarm) -> None:
        """Ask all peers at once, so that an unresponsive one does not delay the others."""

        def ask(peer: ShardPeer) -> None:
            try:
                swarm.note_offers(peer, self._have(peer))
            except Exception as why:  # a peer may answer anything
                swarm.note_unreachable(peer, why)

        threads = [
            threading.Thread(target=ask, args=(peer,), daemon=True) for peer in self.peers if swarm.may_ask(peer)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(1.0)

    def _have(self, peer: ShardPeer) -> dict[str, Offered]:
        with self._request(peer, "/have") as response:
            if response.status != 200:
                raise ValueError(f"it answered {response.status} when asked for its files")
            files = json.loads(response.read(LONGEST_ANSWER))["files"]
            offers = {path: _offered(one) for path, one in files.items()}
            return {path: known for path, known in offers.items() if known}

    @contextlib.contextmanager
    def _request(self, peer: ShardPeer, path: str, **more: str) -> Any:
        headers = {**more, PROOF: proof(self.secret, "GET", path, more.get("Range", ""))}
        source = (self.address, 0) if self.address else None
        connection = http.client.HTTPConnection(peer.address, peer.port, timeout=CONNECT_SECONDS, source_address=source)
        try:
            connection.request("GET", path, headers=headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def _work(self, swarm: Swarm) -> None:
        while swarm.goes_on():
            transfer = swarm.next_transfer()
            if transfer is None:
                time.sleep(0.05)
                continue
            try:
                self._fetch(swarm, transfer)
                swarm.note_arrival(transfer)
            except (BusyError, WrongBytesError, http.client.HTTPException, ConnectionError, socket.timeout) as why:
                swarm.note_failure(transfer, why)
            except OSError as why:
                if why.filename is None and not _is_about_disk(why):
                    swarm.note_failure(transfer, why)
                else:
                    swarm.failure = why
            except Exception as why:
                swarm.failure = why

    def _fetch(self, swarm: Swarm, transfer: Transfer) -> None:
        """Fetch a file from a peer into its .part, and rename it if the digest is right."""
        part = part_of(self.digests.folder, transfer.entry)
        os.makedirs(os.path.dirname(part), exist_ok=True)
        digest, begin = _resume(part, transfer.entry.bytes)
        if begin < transfer.entry.bytes:
            more = {"Range": f"bytes={begin}-"} if begin else {}
            more[TIMES] = str(transfer.times)
            path = "/files/" + urllib.parse.quote(transfer.entry.path)
            with self._request(transfer.peer, path, **more) as response:
                if response.status in (404, 503):
                    raise BusyError
                if response.status != (206 if begin else 200):
                    raise http.client.HTTPException(f"it answered {response.status} for {transfer.entry.path}")
                self._receive(swarm, transfer, response, part, begin, digest)
        if os.path.getsize(part) < transfer.entry.bytes:
            raise ConnectionResetError(None, f"the transfer of {transfer.entry.path} broke off")
        if digest.hexdigest() != transfer.entry.sha256:
            os.unlink(part)
            if begin:
                raise BusyError  # The first half came from somebody else: nobody is to blame yet, start over.
            raise WrongBytesError(
                f"{transfer.entry.path} arrived whole from {transfer.peer.host} but with a wrong digest"
            )
        with swarm.lock:
            os.replace(part, os.path.join(self.digests.folder, transfer.entry.path))
            self.digests.learn(transfer.entry.path, transfer.entry.sha256)
            self.digests.save()

    def _receive(self, swarm: Swarm, transfer: Transfer, response: Any, part: str, begin: int, digest: Any) -> None:
        with open(part, "ab") as file:
            left = transfer.entry.bytes - begin
            while left > 0:
                chunk = response.read1(min(CHUNK, left))
                if not chunk:
                    return
                file.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
                swarm.note_progress()

    def _what_is_missing(self, swarm: Swarm) -> str:
        names = sorted(swarm.todo)
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        asked = ", ".join(peer.host for peer in self.peers) or "nobody"
        seen = "; ".join(f"{host}: {what}" for host, what in sorted(swarm.trouble.items()))
        if not seen:
            seen = (
                "none of them has a copy that matches the manifest. Restore it on any host; or, if it was changed on purpose, "
                f"remove {os.path.join(self.digests.folder, MANIFEST)} here and on the first host to rebuild the manifest"
            )
        return (
            f"{self.host}: {plural(len(names), 'file')} could not be copied ({some}); asked {asked}: {seen}. "
            "Partial files are kept, and the next attempt resumes from them"
        )


def part_of(folder: str, entry: ManifestEntry) -> str:
    """Path of a growing file; the digest in the name keeps another file's beginning out."""
    name = f".{os.path.basename(entry.path)}.{entry.sha256[:12]}.part"
    return os.path.join(folder, os.path.dirname(entry.path), name)


def _resume(part: str, size: int) -> tuple[Any, int]:
    """The digest and length of an interrupted transfer."""
    digest = hashlib.sha256()
    begin = 0
    with open(part, "ab+") as file:
        if file.tell() > size:
            file.truncate(0)
        file.seek(0)
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
            begin += len(chunk)
    return digest, begin


def _wait(swarm: Swarm, seconds: float) -> None:
    """Wait until the peers should be asked again; sooner if one of them had outdated information."""
    begun = time.monotonic()
    while time.monotonic() < begun + seconds and not swarm.is_over():
        time.sleep(0.02)
        if swarm.news_wanted.is_set() and time.monotonic() > begun + ASK_SOON_SECONDS:
            swarm.news_wanted.clear()
            return


def _is_about_disk(why: OSError) -> bool:
    return why.errno in (28, 30, 122, 27, 5)  # full, read-only, quota, too big, input/output error


def local_error_text(why: BaseException) -> str:
    """A local disk error as text."""
    if isinstance(why, OSError) and why.strerror:
        return f"{why.filename}: {why.strerror}" if why.filename else why.strerror
    return f"{type(why).__name__}: {why}"


def part_bytes(folder: str, wanted: list[ManifestEntry]) -> int:
    """Bytes already received by interrupted transfers."""
    total = 0
    for entry in wanted:
        with contextlib.suppress(OSError):
            total += min(entry.bytes, os.path.getsize(part_of(folder, entry)))
    return total
