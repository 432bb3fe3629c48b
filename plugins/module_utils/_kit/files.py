# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Atomic writes, tolerant JSON reading, and locks with a timeout."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import time
from typing import Any, Iterator, List

from .words import bytes_text

# Larger than any file of ours; larger files are not read into memory.
LONGEST_JSON = 64 * 1024 * 1024
FULL = (errno.ENOSPC, errno.EDQUOT)


class Busy(Exception):
    """Somebody else held a lock until the timeout, in one sentence."""


def write_whole(path: str, content: bytes | str, mode: int = 0o644, durable: bool = False) -> None:
    """Write a file atomically, with this mode from its first byte; durable: also across a power cut."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    # mkstemp opens with 0600.
    handle, draft = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = path  # a disk that is full names no file
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def write_unless_same(path: str, content: bytes, mode: int = 0o644) -> None:
    """`write_whole`, without needing room for what is there already."""
    if read_bytes(path) != content or os.stat(path).st_mode & 0o7777 != mode:
        write_whole(path, content, mode)


def write_json(path: str, document: Any, mode: int = 0o644, durable: bool = False) -> None:
    """`write_whole` of a document as JSON."""
    write_whole(path, json.dumps(document, indent=1) + "\n", mode, durable)


def write_json_when_full(path: str, document: Any, mode: int = 0o644) -> None:
    """`write_json` that also survives a power cut; on a full disk it overwrites the file in the space that it has, if any."""
    try:
        write_json(path, document, mode, durable=True)
    except OSError as error:
        if error.errno not in FULL or not os.path.isfile(path):
            raise
        with open(path, "r+b", buffering=0) as file:
            data = (json.dumps(document) + "\n").encode()
            if file.write(data) != len(data):
                raise
            file.truncate()
            os.fsync(file.fileno())


def read_text(path: str) -> str:
    """Read a small text file, such as those of /proc and /sys; empty if that fails."""
    return read_bytes(path).decode("utf-8", "replace")


def read_bytes(path: str) -> bytes:
    """Read a small file; empty if that fails."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def hash_file(path: str) -> str:
    """The sha256 of a file's bytes."""
    import hashlib  # which costs a tenth of a bare poll, and most polls do not need it

    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def read_object(path: str) -> dict[str, object]:
    """The JSON object in a file; empty if it does not exist, or is not (yet) complete or something else."""
    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST_JSON + 1)
        found = json.loads(data) if len(data) <= LONGEST_JSON else None
    except (OSError, ValueError, RecursionError):  # nesting deeper than our own files
        return {}
    return found if isinstance(found, dict) else {}


def paths_in(folder: str) -> List[str]:
    """The paths in a folder, sorted by name; empty if it cannot be read."""
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


@contextlib.contextmanager
def locked(path: str, patience: float) -> Iterator[None]:
    """Lock a file (created if missing) or a folder; Busy after `patience` seconds."""
    folder = os.path.isdir(path)
    flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    told = f"another process has been using {path} for {patience:.0f} s"
                    raise Busy(f"{told}; wait until it has ended, then try again") from None
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def folder_problem(folder: str, need: int = 0) -> str:
    """Make a folder; why that or room for so many more bytes is impossible, after its name; empty if all is well."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    except OSError as why:
        return f"cannot be created: {why.strerror}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot be written by this user (id {os.getuid()})"
    free = free_bytes(folder)
    return f"needs {bytes_text(need)} more, but its file system has {bytes_text(free)} free" if free < need else ""


def free_bytes(folder: str) -> int:
    """Bytes that this user may still write; the folder need not exist yet."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
