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
import shutil
from typing import Any, Callable, Iterator, NamedTuple, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.manifest import (
    Manifest,
    ManifestFile,
    Remembered,
    remembered,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import MANIFEST, TOKENIZER
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import Busy, locked, read_object, write_json
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import bytes_text

DIGESTS = ".digests.json"
LOCK = ".lock"
# How long one process may wait for another that writes into the same folder.
WRITER_PATIENCE = 600.0
CHUNK = 1 << 20


class ShardsError(Exception):
    """One sentence: which host and file, what was seen, what to do."""


class Entry(NamedTuple):
    """One file of a manifest; path is relative to the folder, with slashes."""

    path: str
    bytes: int
    sha256: str


class State(NamedTuple):
    """How a file of the manifest stands in the folder: ok, missing, truncated, oversized or corrupted."""

    entry: Entry
    state: str


# ---------------------------------------------------------------------------------------------------------------------
# Manifests


def entries(manifest: Manifest) -> list[Entry]:
    """The files of a manifest; whatever could lead out of the folder is refused."""
    found = []
    for key, prefix in (("shards", ""), ("tokenizer", "tokenizer/"), ("files", "")):
        # A file of the host may hold anything, whatever its type says.
        listed: Any = manifest.get(key)
        for item in listed or []:
            try:
                path = told.file_path(prefix + str(item["name"]))
                found.append(Entry(path, told.whole(item["bytes"]), told.sha256(item["sha256"])))
            except (KeyError, TypeError, told.Untrue) as why:
                raise ShardsError(
                    f"the manifest's entry {item!a} below {key} is not {{name, bytes, sha256}}: {why}"
                ) from why
    return found


def manifest_of(name: str, layout: str, files: list[Entry]) -> Manifest:
    """The document; its order is the order of training."""

    def items(prefix: str) -> list[ManifestFile]:
        return [
            {"name": one.path[len(prefix) :], "bytes": one.bytes, "sha256": one.sha256}
            for one in files
            if one.path.startswith(prefix) and "/" not in one.path[len(prefix) :]
        ]

    if layout == "files":
        return {
            "format": 1,
            "id": name,
            "files": [{"name": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in files],
        }
    return {"format": 1, "id": name, "shards": items(""), "tokenizer": items("tokenizer/")}


def digest_of(manifest: Manifest) -> str:
    """One short name for exactly these files with exactly these bytes."""
    lines = "".join(f"{one.path} {one.bytes} {one.sha256}\n" for one in sorted(entries(manifest)))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def listing(manifest: Manifest | None) -> str:
    """For people and diffs: one line a file."""
    return "".join(f"{one.path} {one.bytes} {one.sha256[:16]}\n" for one in entries(manifest or {}))


def load_manifest(folder: str) -> Manifest | None:
    """The folder's own manifest, None where there is none or where it cannot be read as one."""
    document = read_object(os.path.join(folder, MANIFEST))
    return cast(Manifest, document) if document.get("format") == 1 else None


def save_manifest(folder: str, manifest: Manifest) -> bool:
    """Writes the manifest where it differs from what is there."""
    if load_manifest(folder) == manifest:
        return False
    write_json(os.path.join(folder, MANIFEST), manifest)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Digests


class Digests:
    """Digests of a folder's files, believed as long as size, time and inode do not change."""

    def __init__(self, folder: str, believe: bool = True) -> None:
        self.folder = folder
        self.hashed_bytes = 0
        self._known: dict[str, Remembered] = {}
        self._dirty = False
        if believe:
            self._known = remembered(read_object(os.path.join(folder, DIGESTS)))

    def of(self, path: str) -> Entry | None:
        """The entry for a file as it is now; None if it is not there."""
        full = os.path.join(self.folder, path)
        try:
            found = os.stat(full)
        except OSError:
            self.forget(path)
            return None
        known = self._known.get(path)
        if known and [known.get("bytes"), known.get("mtime_ns"), known.get("inode")] == _identity(found):
            return Entry(path, found.st_size, str(known["sha256"]))
        sha256 = hash_file(full)
        self.hashed_bytes += found.st_size
        self._remember(path, found, sha256)
        return Entry(path, found.st_size, sha256)

    def learn(self, path: str, sha256: str) -> None:
        """Takes a digest that was computed while the file was written."""
        self._remember(path, os.stat(os.path.join(self.folder, path)), sha256)

    def forget(self, path: str) -> None:
        """Drops what is known about a path."""
        if self._known.pop(path, None) is not None:
            self._dirty = True

    def save(self) -> None:
        """Keeps what was learnt; other processes may read the file at any time."""
        if self._dirty and os.path.isdir(self.folder):
            write_json(os.path.join(self.folder, DIGESTS), {"format": 1, "files": self._known})
            self._dirty = False

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


def compare(wanted: list[Entry], digests: Digests) -> list[State]:
    """How each wanted file stands; a file of the wrong size is not even read."""
    states = []
    for entry in wanted:
        try:
            size = os.stat(os.path.join(digests.folder, entry.path)).st_size
        except OSError:
            states.append(State(entry, "missing"))
            continue
        if size != entry.bytes:
            states.append(State(entry, "truncated" if size < entry.bytes else "oversized"))
            continue
        found = digests.of(entry.path)
        states.append(State(entry, "ok" if found and found.sha256 == entry.sha256 else "corrupted"))
    return states


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def files_below(folder: str, layout: str) -> list[str]:
    """The files that belong to the layout, in the order of training; hidden files and the manifest do not."""
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
    """Says that the disk is too small before anything is moved."""
    free = free_bytes(folder)
    if need > free:
        raise ShardsError(
            f"{host}: {folder} needs {bytes_text(need)} more, but its file system has {bytes_text(free)} free; "
            "make room there, or give this host another base folder (ddp_base_dir)"
        )


def free_bytes(folder: str) -> int:
    """Bytes that this user may still write; the folder need not exist yet."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def make_folder(folder: str, host: str) -> bool:
    """Makes a folder and says in one sentence why it cannot be made or written."""
    try:
        existed = os.path.isdir(folder)
        os.makedirs(folder, mode=0o755, exist_ok=True)
    except OSError as why:
        raise ShardsError(f"{host}: {folder} cannot be created: {why.strerror}; {_who_may(folder)}") from why
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ShardsError(f"{host}: {folder} cannot be written by this user; {_who_may(folder)}")
    return not existed


def _who_may(folder: str) -> str:
    return f"give the folder to user id {os.getuid()}, or give this host another base folder (ddp_base_dir)"


def link(source: str, target: str) -> str:
    """Makes target another name of source: a hard link, a symlink where the file systems differ."""
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
    """Links to make and files to remove so that a run has exactly the manifest's files."""

    make: list[str]
    remove: list[str]


def plan_links(store: str, run: str, wanted: list[Entry]) -> Linking:
    """Compares run/data and run/tokenizer with the manifest."""
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
    """Where a file of the data set stands in the run's folder."""
    return path if path.startswith("tokenizer/") else "data/" + path


def apply_links(store: str, run: str, links: Linking) -> dict[str, int]:
    """Makes the run's folders hold exactly what was planned; returns how many links of each kind were made."""
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
    """The first count-1 shards of a sorted collection and its last one, which is validation; 0 takes all."""
    names = sorted(names)
    if count <= 0 or count >= len(names):
        return names
    return [*names[: count - 1], names[-1]]


def take_seeds(
    folder: str, wanted: list[State], seeds: list[str], digests: Digests, report: Callable[[str, int], None]
) -> list[State]:
    """Links what other folders of this host already hold with the right digest; returns what is still wanted."""
    left = []
    for state in wanted:
        if not any(_take_seed(folder, state.entry, seed, digests) for seed in seeds):
            left.append(state)
        else:
            report(state.entry.path, state.entry.bytes)
    return left


def _take_seed(folder: str, entry: Entry, seed: str, digests: Digests) -> bool:
    for name in (entry.path, os.path.basename(entry.path)):
        source = os.path.join(seed, name)
        target = os.path.join(folder, entry.path)
        if not os.path.isfile(source) or is_link_to(source, target):
            continue
        if os.path.getsize(source) == entry.bytes and hash_file(source) == entry.sha256:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            link(source, target)
            digests.learn(entry.path, entry.sha256)
            return True
    return False


def sweep_parts(folder: str) -> None:
    """Removes what cut transfers left behind; called when everything wanted is there."""
    for root, _folders, names in os.walk(folder):
        for name in names:
            if name.startswith(".") and name.endswith((".part", ".part.etag")):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(root, name))


def remove_tree(path: str) -> None:
    """Removes a folder or file, whatever it is; nothing there is fine."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
