# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the missing files of a folder from the other hosts of the job, which form a chain.

Each host takes piece by piece from the one before it, while that one still receives, so the first source sends every file about once
and all hosts have it at nearly the same time. Each piece is proven by its digest before it is kept or handed on. Where the host before
is gone, lies, or is much slower than another one, the next nearest takes its place.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import os
import time
import urllib.parse
from typing import BinaryIO, NamedTuple

from .._contract.run_folder import MANIFEST
from .._kit.words import plural
from .folder import CHUNK, Digests, ManifestEntry, ShardsError, part_of
from .server import PROOF, proof

SILENCE_SECONDS = 10.0
LONGEST_PIECE_SECONDS = 120.0
# Where the host before lacks a piece so many further on, which the one before that has, it is slow and left out.
AHEAD = 8
# How long it tries to get a piece, and further files once one could not be had.
PATIENCE, LITTLE_PATIENCE = 60.0, 2.0


class ShardPeer(NamedTuple):
    """A host of the job that serves its folder."""

    host: str
    address: str
    port: int


class Piece(NamedTuple):
    """A part of a file, as hosts send it to each other."""

    entry: ManifestEntry
    number: int

    @property
    def url(self) -> str:
        return f"/{self.number}/{urllib.parse.quote(self.entry.path)}"

    @property
    def size(self) -> int:
        return self.entry.span(self.number)[1]


class Source:
    """A host of which pieces are asked, over one connection."""

    def __init__(self, peer: ShardPeer, secret: str, address: str) -> None:
        self.peer = peer
        self.received = 0  # bytes
        self.failures = 0
        self.lied = False
        self.trouble = ""  # the last thing that went wrong
        self._secret = secret
        bound = (address, 0) if address else None
        self._link = http.client.HTTPConnection(peer.address, peer.port, timeout=SILENCE_SECONDS, source_address=bound)

    def piece(self, piece: Piece) -> bytearray | None:
        """A piece that is right; None if this host does not have it soon."""
        try:
            data = self._receive(piece)
            self.received += len(data or b"")
            return data
        except (OSError, http.client.HTTPException) as why:
            self.failures += 1
            said = getattr(why, "strerror", None) or str(why) or type(why).__name__
            self.trouble = f"{self.peer.address}:{self.peer.port}: {said}"
        self.close()
        return None

    def has(self, piece: Piece) -> bool:
        """Whether it has a piece now."""
        try:
            response = self._asked("HEAD", piece)
            response.read()
            return response.status == 200
        except (OSError, http.client.HTTPException):
            self.close()
            return False

    def close(self) -> None:
        self._link.close()

    def _asked(self, method: str, piece: Piece) -> http.client.HTTPResponse:
        self._link.request(method, piece.url, headers={PROOF: proof(self._secret, piece.url)})
        return self._link.getresponse()

    def _receive(self, piece: Piece) -> bytearray | None:
        begun, response = time.monotonic(), self._asked("GET", piece)
        size = piece.size if response.status == 200 else 0
        if response.length != size or response.status not in (200, 503):
            raise http.client.HTTPException(f"it answered {response.status} for {piece.url}")
        data, digest, got = bytearray(size), hashlib.sha256(), 0
        view = memoryview(data)
        while got < size:
            count = response.readinto(view[got : got + CHUNK])
            if not count:
                raise ConnectionResetError(None, f"the transfer of {piece.url} broke off")
            if time.monotonic() > begun + LONGEST_PIECE_SECONDS:
                raise TimeoutError
            digest.update(view[got : got + count])
            got += count
        response.read()
        if response.status == 503:
            return None
        if digest.hexdigest().startswith(piece.entry.proofs()[piece.number]):
            return data
        self.lied = True
        self.trouble = f"piece {piece.number} of {piece.entry.path} arrived whole, but with a wrong digest"
        return None


class Chain:
    """A host that receives files from the others."""

    def __init__(
        self, digests: Digests, before: list[Source], behind: list[Source], patience: float = PATIENCE
    ) -> None:
        """`before`: the hosts before this one, the nearest first."""
        self.digests = digests
        self.sources = [*before, *behind]
        self.first = before[-1] if before else None
        self.patience = patience
        self._pieces: list[Piece] = []

    def pull(self, wanted: list[ManifestEntry]) -> dict[str, int]:
        """Receive all wanted files, or raise one sentence about those that failed; returns the bytes from each host."""
        self._pieces = [Piece(entry, number) for entry in wanted for number in range(len(entry.proofs()))]
        places = itertools.accumulate((len(entry.proofs()) for entry in wanted), initial=0)
        try:
            missing = [entry.path for entry, place in zip(wanted, places) if not self._file(entry, place)]
        finally:
            for source in self.sources:
                source.close()
        if missing:
            raise ShardsError(self._what_is_missing(sorted(missing)))
        return {source.peer.host: source.received for source in self.sources if source.received}

    def _file(self, entry: ManifestEntry, place: int) -> bool:
        """Whether it is here now; `place` is that of its first piece."""
        part = part_of(self.digests.folder, entry)
        os.makedirs(os.path.dirname(part), mode=0o755, exist_ok=True)
        with open(part, "ab+") as file:
            for number in range(keep_right_pieces(file, entry), len(entry.proofs())):
                data = self._piece(place + number)
                if data is None:
                    return False
                file.write(data)
                file.flush()
        os.replace(part, os.path.join(self.digests.folder, entry.path))
        self.digests.learn(entry.path, entry.sha256)
        self.digests.save()
        return True

    def _piece(self, place: int) -> bytearray | None:
        """The piece from the nearest source that has it; None if nobody has it, or nobody answers, for too long."""
        begun, first = time.monotonic(), self._leave_out_the_slow(place)
        while first is not None and time.monotonic() < begun + self.patience:
            data = first.piece(self._pieces[place])
            if data is not None:
                return data
            if first.failures or first.lied:
                time.sleep(0.05)
            elif time.monotonic() > begun + self.patience / 2:
                # It may wait without end itself.
                first.failures += 1
            first = next(iter(self._ranked()), None)
        self.patience = min(self.patience, LITTLE_PATIENCE)
        return None

    def _ranked(self) -> list[Source]:
        """The nearest first; each failure puts a source behind those that have failed less."""
        return sorted((one for one in self.sources if not one.lied), key=lambda one: one.failures)

    def _leave_out_the_slow(self, place: int) -> Source | None:
        """The nearest source; it becomes the second one if it is slow."""
        nearest, second = [*self._ranked(), None, None][:2]
        later = self._pieces[min(place + AHEAD, len(self._pieces) - 1)]
        # The first host has had everything from the start, which tells nothing of the one behind it.
        if nearest and second and second is not self.first and second.has(later) and not nearest.has(later):
            self.sources.remove(second)
            self.sources.insert(0, second)
            second.failures = min(second.failures, nearest.failures)
            return second
        return nearest

    def _what_is_missing(self, names: list[str]) -> str:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        asked = ", ".join(sorted(one.peer.host for one in self.sources)) or "nobody"
        seen = "; ".join(sorted(f"{one.peer.host}: {one.trouble}" for one in self.sources if one.trouble))
        if not seen:
            seen = (
                "none of them has a copy that matches the manifest. Restore it on any host; or, if it was changed on purpose, "
                f"remove {os.path.join(self.digests.folder, MANIFEST)} here and on the first host to rebuild the manifest"
            )
        return (
            f"{plural(len(names), 'file')} could not be copied ({some}); asked {asked}: {seen}. "
            "Partial files are kept, and the next attempt resumes from them"
        )


def keep_right_pieces(file: BinaryIO, entry: ManifestEntry) -> int:
    """How many pieces an earlier transfer left in the part; what follows them is cut off."""
    file.seek(0)
    for number, wanted in enumerate(entry.proofs()):
        begin, size = entry.span(number)
        digest, left = hashlib.sha256(), size
        while left > 0 and (chunk := file.read(min(CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
        if left or not digest.hexdigest().startswith(wanted):
            file.truncate(begin)
            return number
    file.truncate(entry.bytes)
    return len(entry.proofs())
