# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder of files and the manifest that says which files, of which size and digest, belong in it.

A data set (`layout` data) has numbered parquet shards, the last of them validation, and a tokenizer folder; any other
folder, such as one of wheels, is `layout` files. Digests are remembered with size, time and inode of the file, so that
only what changed is read again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from typing import Any, Iterator, NamedTuple, cast

from .._contract import validate
from .._contract.manifest import Manifest, ManifestFile, Remembered, remembered
from .._contract.run_folder import MANIFEST, TOKENIZER
from .._kit.files import Busy, free_bytes, locked, read_object, write_json
from .._kit.words import bytes_text

DIGESTS = ".digests.json"
LOCK = ".lock"
# How long one process may wait for another that writes into the same folder.
WRITER_PATIENCE = 600.0
CHUNK = 1 << 20
# What hosts send each other at a time, and what of its digest is in the manifest.
PIECE = 1 << 22
PIECE_DIGITS = 32


class ShardsError(Exception):
    """Which host and file, what was seen, what to do, in one sentence."""


class ManifestEntry(NamedTuple):
    """One file of a manifest; path is relative to the folder, with slashes."""

    path: str
    bytes: int
    sha256: str
    pieces: str = ""  # the beginnings of the digests of its pieces, one after the other; empty if it is one piece

    def line(self) -> str:
        """For people and diffs."""
        return f"{self.path} {self.bytes} {self.sha256[:16]}\n"

    def is_in_pieces(self) -> bool:
        """Whether the manifest has the digests of its pieces, which one of an earlier version has not."""
        return bool(self.pieces) or self.bytes <= PIECE

    def proofs(self) -> list[str]:
        """The beginning of the digest of each piece."""
        digits = PIECE_DIGITS if self.pieces else len(self.sha256)
        digests = self.pieces or self.sha256
        return [digests[begin : begin + digits] for begin in range(0, len(digests), digits)]

    def span(self, number: int) -> tuple[int, int]:
        """Where a piece begins, and its length."""
        size = PIECE if self.pieces else self.bytes
        return number * size, min(size, self.bytes - number * size)


class State(NamedTuple):
    """State of a manifest's file in the folder: ok, missing, truncated, oversized or corrupted."""

    entry: ManifestEntry
    state: str


# ---------------------------------------------------------------------------------------------------------------------
# Manifests


def entries(manifest: Manifest) -> list[ManifestEntry]:
    """A manifest's files; rejects paths that lead out of the folder."""
    found = []
    for key, prefix in (("shards", ""), ("tokenizer", "tokenizer/"), ("files", "")):
        # A host's file may contain anything, whatever its type says.
        listed: Any = manifest.get(key)
        for item in listed or []:
            try:
                path = validate.file_path(prefix + str(item["name"]))
                size, sha256 = validate.whole(item["bytes"]), validate.sha256(item["sha256"])
                found.append(ManifestEntry(path, size, sha256, _pieces_in(item, size)))
            except (KeyError, TypeError, validate.InvalidHostData) as why:
                raise ShardsError(
                    f"the manifest's entry {item!a} below {key} is not {{name, bytes, sha256}}: {why}"
                ) from why
    return found


def _pieces_in(item: Any, size: int) -> str:
    found = item.get("pieces") or ""
    if not found or re.fullmatch("[0-9a-f]{%d}" % (PIECE_DIGITS * -(-size // PIECE)), found):
        return str(found)
    raise validate.InvalidHostData("its pieces are not those of so many bytes")


def manifest_of(name: str, layout: str, files: list[ManifestEntry]) -> Manifest:
    """The document, in training order."""
    if layout == "files":
        return {"format": 1, "id": name, "files": [_named(one.path, one) for one in files]}
    shards = [_named(one.path, one) for one in files if "/" not in one.path]
    tokenizer = [_named(os.path.basename(one.path), one) for one in files if "/" in one.path]
    return {"format": 1, "id": name, "shards": shards, "tokenizer": tokenizer}


def _named(name: str, file: ManifestEntry) -> ManifestFile:
    found: ManifestFile = {"name": name, "bytes": file.bytes, "sha256": file.sha256}
    return {**found, "pieces": file.pieces} if file.pieces else found


def digest_of(manifest: Manifest) -> str:
    """One short digest of these files and their bytes."""
    lines = "".join(f"{one.path} {one.bytes} {one.sha256}\n" for one in sorted(entries(manifest)))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def listing(manifest: Manifest | None) -> str:
    """One line per file, for people and diffs."""
    return "".join(one.line() for one in entries(manifest or {}))


def load_manifest(folder: str) -> Manifest | None:
    """The folder's manifest; None if missing or invalid."""
    document = read_object(os.path.join(folder, MANIFEST))
    return cast(Manifest, document) if document.get("format") == 1 else None


def save_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest if it differs."""
    if load_manifest(folder) != manifest:
        write_json(os.path.join(folder, MANIFEST), manifest)


# ---------------------------------------------------------------------------------------------------------------------
# Digests


class Digests:
    """Digests of a folder's files, valid while size, time and inode do not change."""

    def __init__(self, folder: str, use_stored: bool = True) -> None:
        self.folder = folder
        self.hashed_bytes = 0
        self._known: dict[str, Remembered] = {}
        self._dirty = False
        if use_stored:
            self._known = remembered(read_object(os.path.join(folder, DIGESTS)))

    def of(self, path: str) -> ManifestEntry | None:
        """The entry for a file as it is now; None if missing."""
        full = os.path.join(self.folder, path)
        try:
            found = os.stat(full)
        except OSError:
            self._dirty = self._known.pop(path, None) is not None or self._dirty
            return None
        sha256 = self._unchanged(path, found)
        if not sha256:
            sha256 = hash_file(full)
            self.hashed_bytes += found.st_size
            self._remember(path, found, sha256)
        return ManifestEntry(path, found.st_size, sha256)

    def known(self, path: str) -> str:
        """The digest if nothing must be read for it; otherwise empty."""
        try:
            return self._unchanged(path, os.stat(os.path.join(self.folder, path)))
        except OSError:
            return ""

    def in_pieces(self, path: str) -> ManifestEntry | None:
        """The entry with the digests of its pieces, for which it reads a file of several pieces; None if missing."""
        full = os.path.join(self.folder, path)
        if not os.path.isfile(full) or os.path.getsize(full) <= PIECE:
            return self.of(path)
        whole, pieces = hashlib.sha256(), ""
        with open(full, "rb") as file:
            found = os.fstat(file.fileno())
            for piece in iter(lambda: file.read(PIECE), b""):
                whole.update(piece)
                pieces += hashlib.sha256(piece).hexdigest()[:PIECE_DIGITS]
        self._remember(path, found, whole.hexdigest())
        return ManifestEntry(path, found.st_size, whole.hexdigest(), pieces)

    def learn(self, path: str, sha256: str) -> None:
        """Store a digest that was computed while writing the file."""
        self._remember(path, os.stat(os.path.join(self.folder, path)), sha256)

    def save(self) -> None:
        """Save the digests; other processes may read the file at any time."""
        if self._dirty and os.path.isdir(self.folder):
            write_json(os.path.join(self.folder, DIGESTS), {"format": 1, "files": self._known})
            self._dirty = False

    def _unchanged(self, path: str, found: os.stat_result) -> str:
        known = self._known.get(path, {})
        same = [known.get("bytes"), known.get("mtime_ns"), known.get("inode")] == _identity(found)
        return str(known["sha256"]) if same else ""

    def _remember(self, path: str, found: os.stat_result, sha256: str) -> None:
        size, mtime_ns, inode = _identity(found)
        self._known[path] = {"bytes": size, "mtime_ns": mtime_ns, "inode": inode, "sha256": sha256}
        self._dirty = True


def _identity(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def hash_file(path: str) -> str:
    """The sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def compare(wanted: list[ManifestEntry], digests: Digests) -> list[State]:
    """The state of each wanted file; files of the wrong size are not read."""
    return [State(entry, _state_of(entry, digests)) for entry in wanted]


def _state_of(entry: ManifestEntry, digests: Digests) -> str:
    try:
        size = os.path.getsize(os.path.join(digests.folder, entry.path))
    except OSError:
        return "missing"
    if size != entry.bytes:
        return "truncated" if size < entry.bytes else "oversized"
    found = digests.of(entry.path)
    return "ok" if found and found.sha256 == entry.sha256 else "corrupted"


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def files_below(folder: str, layout: str) -> list[str]:
    """The files that belong to the layout, in training order, without hidden files and the manifest."""
    if layout == "data":
        shards = sorted(name for name in _names(folder) if name.endswith(".parquet") and not name.startswith("."))
        have = set(_names(os.path.join(folder, "tokenizer")))
        return shards + ["tokenizer/" + name for name in TOKENIZER if name in have]
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(root, folder)
        for name in sorted(names):
            path = name if inside == "." else f"{inside}/{name}"
            if not name.startswith(".") and path != MANIFEST:
                found.append(path)
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@contextlib.contextmanager
def writing(folder: str, host: str) -> Iterator[None]:
    """One writer at a time in a folder."""
    try:
        with locked(os.path.join(folder, LOCK), WRITER_PATIENCE):
            yield
    except Busy:
        raise ShardsError(
            f"{host}: another process has been writing to {folder} for {WRITER_PATIENCE:.0f} s (it holds {LOCK} there); "
            "wait until that playbook has ended, then run this one again"
        ) from None


def check_space(folder: str, need: int, host: str) -> None:
    """Fail before anything is copied if the disk is too small."""
    free = free_bytes(folder)
    if need > free:
        raise ShardsError(
            f"{host}: {folder} needs {bytes_text(need)} more, but its file system has {bytes_text(free)} free; "
            "make room there, or give this host another base folder (ddp_base_dir)"
        )


def make_folder(folder: str, host: str) -> None:
    """Create a folder, or say in one sentence why it cannot be created or written."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    except OSError as why:
        raise ShardsError(f"{host}: {folder} cannot be created: {why.strerror}; {_access_hint(folder)}") from why
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ShardsError(f"{host}: {folder} cannot be written by this user; {_access_hint(folder)}")


def _access_hint(folder: str) -> str:
    return f"give the folder to user id {os.getuid()}, or give this host another base folder (ddp_base_dir)"


def link(source: str, target: str) -> str:
    """Make target another name of source: a hard link, or a symlink across file systems."""
    temporary = os.path.join(os.path.dirname(target), f".linking-{os.path.basename(target)}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    source = os.path.realpath(source)
    kind = "hard"
    try:
        os.link(source, temporary)
    except OSError as why:
        if why.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            raise
        os.symlink(source, temporary)
        kind = "symbolic"
    os.replace(temporary, target)
    return kind


def is_link_to(source: str, target: str) -> bool:
    """Whether both names lead to the same bytes on disk."""
    try:
        return os.path.samefile(source, target)
    except OSError:
        return False


class Linking(NamedTuple):
    """Links to create and files to remove, so that a run has exactly the manifest's files."""

    make: list[str]
    remove: list[str]


def plan_links(store: str, run: str, wanted: list[ManifestEntry]) -> Linking:
    """Compare run/data and run/tokenizer with the manifest."""
    targets = {run_path(one.path): one.path for one in wanted}
    make = [
        target
        for target, path in targets.items()
        if not is_link_to(os.path.join(store, path), os.path.join(run, target))
    ]
    there = [f"{part}/{name}" for part in ("data", "tokenizer") for name in sorted(_names(os.path.join(run, part)))]
    remove = [
        path
        for path in there
        if path not in targets and (os.path.islink(os.path.join(run, path)) or os.path.isfile(os.path.join(run, path)))
    ]
    return Linking(make, remove)


def run_path(path: str) -> str:
    """A data set file's path in the run folder."""
    return path if path.startswith("tokenizer/") else "data/" + path


def apply_links(store: str, run: str, links: Linking) -> dict[str, int]:
    """Apply the planned links; returns the number of links of each kind."""
    kinds = {"hard": 0, "symbolic": 0}
    for part in ("data", "tokenizer"):
        os.makedirs(os.path.join(run, part), mode=0o755, exist_ok=True)
    for target in links.make:
        path = target[len("data/") :] if target.startswith("data/") else target
        kinds[link(os.path.join(store, path), os.path.join(run, target))] += 1
    for path in links.remove:
        os.unlink(os.path.join(run, path))
    return kinds


def choose(names: list[str], count: int) -> list[str]:
    """The first count-1 shards of a sorted collection and its last one, for validation; 0 means all."""
    names = sorted(names)
    if count <= 0 or count >= len(names):
        return names
    return [*names[: count - 1], names[-1]]


def take_seeds(wanted: list[ManifestEntry], seeds: list[str], digests: Digests) -> list[ManifestEntry]:
    """Link files with the right digest from other folders of this host; returns the still missing ones."""
    return [entry for entry in wanted if not any(_take_seed(entry, seed, digests) for seed in seeds)]


def _take_seed(entry: ManifestEntry, seed: str, digests: Digests) -> bool:
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
    for root, _folders, names in os.walk(folder):
        for name in names:
            if name.startswith(".") and name.endswith((".part", ".part.etag")):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(root, name))
