# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder of files and the manifest that says which files, of which size and digest, belong in it.

A data set has numbered parquet shards, the last of them validation, and a tokenizer folder. Digests are remembered with size,
time and inode of the file, so that only what changed is read again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
from typing import Any, Mapping, NamedTuple

from .._contract import validate
from .._contract.document import section, text
from .._contract.run_folder import MANIFEST, TOKENIZER
from .._kit.files import folder_problem, hash_file, locked, paths_in, read_object, write_json

DIGESTS = ".digests.json"
LOCK = ".lock"
# How long one process may wait for another that writes into the same folder.
WRITER_PATIENCE = 600.0
CHUNK = 1 << 20
# What hosts send each other at a time, and what of its digest is in the manifest.
PIECE = 1 << 22
PIECE_DIGITS = 32
# The lists of files in a manifest, and the folder in which they are.
SECTIONS = {"shards": "", "tokenizer": "tokenizer/"}


class ShardsError(Exception):
    """Which file, what was seen, what to do, in one sentence; who raises it further names the host."""


class ManifestEntry(NamedTuple):
    """One file of a manifest; path is relative to the folder, with slashes."""

    path: str
    bytes: int
    sha256: str
    # The beginnings of the digests of its pieces; empty if it is one, as all files were in earlier versions.
    pieces: str = ""

    def line(self) -> str:
        """For people and diffs."""
        return f"{self.path} {self.bytes} {self.sha256[:16]}\n"

    def proofs(self) -> list[str]:
        """The beginning of the digest of each piece."""
        digits = PIECE_DIGITS if self.pieces else len(self.sha256)
        digests = self.pieces or self.sha256
        return [digests[begin : begin + digits] for begin in range(0, len(digests), digits)]

    def span(self, number: int) -> tuple[int, int]:
        """Where a piece begins, and its length."""
        size = PIECE if self.pieces else self.bytes
        return number * size, min(size, self.bytes - number * size)


class Manifest(NamedTuple):
    """Shards and tokenizer of a data set, in training order."""

    id: str
    files: list[ManifestEntry]

    @classmethod
    def read(cls, document: Mapping[str, object]) -> Manifest:
        """Decode a manifest; rejects paths that lead out of the folder."""
        files = []
        for kind, prefix in SECTIONS.items():
            entries = document.get(kind) or []
            for item in entries if isinstance(entries, list) else [entries]:
                try:
                    files.append(_entry_in(item, prefix))
                except (AttributeError, LookupError, TypeError, validate.InvalidHostData) as why:
                    raise ShardsError(
                        f"the manifest's entry {item!a} below {kind} is not {{name, bytes, sha256}}: {why}"
                    ) from why
        return cls(str(document.get("id")), files)

    def document(self) -> dict[str, object]:
        """The content of the file and the module's result."""
        found: dict[str, list[dict[str, object]]] = {kind: [] for kind in SECTIONS}
        for one in self.files:
            kind = "tokenizer" if "/" in one.path else "shards"
            item = {"name": one.path[len(SECTIONS[kind]) :], "bytes": one.bytes, "sha256": one.sha256}
            found[kind].append({**item, "pieces": one.pieces} if one.pieces else item)
        return {"format": 1, "id": self.id, **found}

    def digest(self) -> str:
        """One short digest of these files and their bytes."""
        lines = "".join(f"{one.path} {one.bytes} {one.sha256}\n" for one in sorted(self.files))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def listing(self) -> str:
        """One line per file, for people and diffs."""
        return "".join(one.line() for one in self.files)


def _entry_in(item: Any, prefix: str) -> ManifestEntry:
    path, size = validate.file_path(prefix + str(item["name"])), validate.whole(item["bytes"])
    pieces = item.get("pieces") or ""
    count = -(-size // PIECE) if pieces else 0
    if not re.fullmatch("[0-9a-f]{%d}" % (PIECE_DIGITS * count), pieces):
        raise validate.InvalidHostData("its pieces are not those of so many bytes")
    return ManifestEntry(path, size, validate.sha256(item["sha256"]), pieces)


def load_manifest(folder: str) -> Manifest | None:
    """The folder's manifest; None if missing or invalid."""
    document = read_object(os.path.join(folder, MANIFEST))
    try:
        return Manifest.read(document) if document.get("format") == 1 else None
    except ShardsError:
        return None


def save_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest if it differs."""
    if load_manifest(folder) != manifest:
        write_json(os.path.join(folder, MANIFEST), manifest.document())


# ---------------------------------------------------------------------------------------------------------------------
# Digests


class Digests:
    """Digests of a folder's files, valid while size, time and inode do not change."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._known = section(read_object(os.path.join(folder, DIGESTS)), "files")
        self._dirty = False

    def of(self, path: str) -> str:
        """The digest of a file as it is now; empty if missing."""
        full = os.path.join(self.folder, path)
        if not self.known(path) and os.path.isfile(full):
            self.learn(path, found=os.stat(full), sha256=hash_file(full))
        return self.known(path)

    def known(self, path: str) -> str:
        """The digest if nothing must be read for it; otherwise empty."""
        known = section(self._known, path)
        try:
            found = _identity(os.stat(os.path.join(self.folder, path)))
        except OSError:
            return ""
        return text(known, "sha256") or "" if known.items() >= found.items() else ""

    def described(self, path: str) -> ManifestEntry:
        """The manifest's entry for a file, which is read for the digests of its pieces."""
        full, whole, pieces = os.path.join(self.folder, path), hashlib.sha256(), []
        found = os.stat(full)
        with open(full, "rb") as file:
            for piece in iter(lambda: file.read(PIECE), b""):
                whole.update(piece)
                pieces.append(hashlib.sha256(piece).hexdigest()[:PIECE_DIGITS])
        self.learn(path, whole.hexdigest(), found)
        return ManifestEntry(path, found.st_size, whole.hexdigest(), "".join(pieces) if len(pieces) > 1 else "")

    def learn(self, path: str, sha256: str, found: os.stat_result | None = None) -> None:
        """Store a digest that was computed while writing the file, or reading it (found: as it was before)."""
        found = found or os.stat(os.path.join(self.folder, path))
        self._known[path] = {**_identity(found), "sha256": sha256}
        self._dirty = True

    def save(self) -> None:
        """Other processes may read the file at any time."""
        if self._dirty and os.path.isdir(self.folder):
            write_json(os.path.join(self.folder, DIGESTS), {"format": 1, "files": self._known})
            self._dirty = False


def _identity(found: os.stat_result) -> dict[str, object]:
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def compare(wanted: list[ManifestEntry], digests: Digests) -> dict[ManifestEntry, str]:
    """The state of each wanted file: ok, missing, truncated, oversized or corrupted; those of the wrong size are not read."""
    return {entry: _state_of(entry, digests) for entry in wanted}


def _state_of(entry: ManifestEntry, digests: Digests) -> str:
    try:
        size = os.path.getsize(os.path.join(digests.folder, entry.path))
    except OSError:
        return "missing"
    if size != entry.bytes:
        return "truncated" if size < entry.bytes else "oversized"
    return "ok" if digests.of(entry.path) == entry.sha256 else "corrupted"


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def data_files(folder: str) -> list[str]:
    """The files of a data set, in training order, without hidden files and the manifest."""
    shards = [name for name in names_in(folder) if name.endswith(".parquet") and not name.startswith(".")]
    have = names_in(os.path.join(folder, "tokenizer"))
    return shards + ["tokenizer/" + name for name in TOKENIZER if name in have]


def names_in(folder: str) -> list[str]:
    """The files and links in a folder; none if it cannot be read."""
    return [os.path.basename(path) for path in paths_in(folder) if os.path.islink(path) or os.path.isfile(path)]


def writing(folder: str) -> contextlib.AbstractContextManager[None]:
    """One writer at a time in a folder."""
    return locked(os.path.join(folder, LOCK), WRITER_PATIENCE)


def make_folder(folder: str, need: int = 0) -> None:
    """Make a folder, with room for what is to be copied, or say in one sentence why that is impossible."""
    if problem := folder_problem(folder, need):
        what = "make room, take fewer shards (ddp_data_shards)" if "free" in problem else "give the folder to that user"
        raise ShardsError(f"{folder} {problem}; {what}, or give this host another base folder (ddp_base_dir)")


def link(source: str, target: str) -> None:
    """Make target another name of source: a hard link, or a symlink across file systems."""
    temporary = os.path.join(os.path.dirname(target), f".linking-{os.path.basename(target)}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    source = os.path.realpath(source)
    try:
        os.link(source, temporary)
    except OSError:
        os.symlink(source, temporary)
    os.replace(temporary, target)


def is_link_to(source: str, target: str) -> bool:
    """Whether both names lead to the same bytes on disk."""
    try:
        return os.path.samefile(source, target)
    except OSError:
        return False


def link_exactly(folder: str, make: Mapping[str, str], remove: list[str]) -> None:
    """Make links in a folder, by path the file that it leads to, and remove other paths."""
    for path, source in make.items():
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        link(source, target)
    for path in remove:
        os.unlink(os.path.join(folder, path))


def run_path(path: str) -> str:
    """A data set file's path in the run folder."""
    return path if path.startswith("tokenizer/") else "data/" + path


def take_seed(entry: ManifestEntry, seed: str, digests: Digests) -> bool:
    """Link a file from another folder of this host; whether that has it, with the right digest."""
    target = os.path.join(digests.folder, entry.path)
    for name in (entry.path, os.path.basename(entry.path)):
        source = os.path.join(seed, name)
        if not os.path.isfile(source) or is_link_to(source, target):
            continue
        if os.path.getsize(source) == entry.bytes and hash_file(source) == entry.sha256:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            link(source, target)
            digests.learn(entry.path, entry.sha256)
            return True
    return False


def part_of(folder: str, entry: ManifestEntry) -> str:
    """Path of a growing file; the digest in the name keeps another file's beginning out."""
    name = f".{os.path.basename(entry.path)}.{entry.sha256[:12]}.part"
    return os.path.join(folder, os.path.dirname(entry.path), name)


def part_bytes(folder: str, wanted: list[ManifestEntry]) -> int:
    """Bytes already received by interrupted transfers."""
    total = 0
    for entry in wanted:
        with contextlib.suppress(OSError):
            total += min(entry.bytes, os.path.getsize(part_of(folder, entry)))
    return total


def sweep_parts(folder: str) -> None:
    """Remove remains of interrupted transfers, once everything wanted is there."""
    for path in glob.glob(os.path.join(glob.escape(folder), "**", ".*.part*"), recursive=True):
        with contextlib.suppress(OSError):
            os.unlink(path)
