# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A tree of small text files, equal on every host: read on the controller, compared and written on the host.

Deployed files are recorded, so that those no longer in the tree are removed without touching anybody else's.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .._contract.run_folder import DEPLOYED
from .._kit import processes
from .._kit.files import read_object, write_whole

LEFT_OUT = (".*", "__pycache__", "*.pyc", "venv", "node_modules", "*.egg-info")
LARGEST_TREE = 64_000_000


class TreeError(Exception):
    """A sentence about a problem with the folder."""


class TreeChanges(NamedTuple):
    """Files to write, with the digests of those that are there, and files to remove."""

    write: dict[str, str]
    remove: list[str]


def read_tree(folder: str, left_out: Iterable[str] = LEFT_OUT) -> dict[str, bytes]:
    """Every file in a folder by path, without hidden and generated ones."""
    patterns = tuple(left_out)
    found: dict[str, bytes] = {}
    total = 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _matches(name, patterns))
        for name in sorted(names):
            full = os.path.join(root, name)
            if _matches(name, patterns) or not os.path.isfile(full):
                continue
            total += os.path.getsize(full)
            if total > LARGEST_TREE:
                raise TreeError(
                    f"{folder} holds more than {LARGEST_TREE // 1_000_000} MB, too much for a trainer's sources "
                    f"(the last file looked at was {full}); move data, checkpoints and virtual environments elsewhere"
                )
            with open(full, "rb") as file:
                found[os.path.relpath(full, folder)] = file.read()
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def digests_of(tree: Mapping[str, bytes]) -> dict[str, str]:
    """The digest of each file."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in tree.items()}


def digest_of(digests: Mapping[str, str]) -> str:
    """A digest of the whole tree."""
    lines = "".join(f"{path} {digest}\n" for path, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def compare(folder: str, wanted: Mapping[str, str]) -> TreeChanges:
    """Compare a folder with the wanted digests; only previously deployed files are ever removed."""
    there = {path: _digest_at(os.path.join(folder, path)) for path in sorted(wanted)}
    stale = [path for path in _recorded(folder) if path not in wanted and os.path.lexists(os.path.join(folder, path))]
    return TreeChanges({path: old for path, old in there.items() if old != wanted[path]}, sorted(stale))


def _digest_at(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _recorded(folder: str) -> list[str]:
    recorded = read_object(os.path.join(folder, DEPLOYED)).get("files")
    return (
        [path for path in recorded if isinstance(path, str) and is_inside(path)] if isinstance(recorded, list) else []
    )


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder."""
    return not os.path.isabs(path) and ".." not in path.split("/")


def refuse_in_use(folder: str) -> None:
    """Refuse to change files that a session's process runs: a restarted rank would differ from those still running the old ones."""
    places = {folder, os.path.realpath(folder)}
    inside = tuple(place + "/" for place in places)
    for pid, one in sorted(processes.processes().items()):
        if one.marker and (_place_of(pid) in places or any(word.startswith(inside) for word in one.argv)):
            raise TreeError(
                f"the files in {folder} would have to change, but {f'the run {one.run}' if one.run else 'a training'} uses them "
                f"(process {pid}). Stop it first, with a checkpoint: ansible-playbook nanochat.ddp.stop -i INVENTORY "
                f"-e ddp_run={one.run or 'NAME'}; or give the new run its own folders (ddp_base_dir, ddp_venv_dir)"
            )


def _place_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def trainer_files(
    dest: str, files: Mapping[str, str], contents: Mapping[str, str] | None = None, host: str = "", check: bool = False
) -> dict[str, object]:
    """Bring a folder to the trainer's files (path -> digest), or tell what that would change.

    Without contents (path -> base64), of the files that would be written, it only compares. Files in use are not changed.
    """
    if not all(is_inside(path) for path in files):
        raise TreeError(f"{host}: the path of a file leads out of {dest}")
    try:
        changes = compare(dest, files)
        changed = bool(changes.write or changes.remove)
        if changed:
            refuse_in_use(dest)
        if changed and contents is not None and not check:
            apply(dest, files, changes, contents)
    except TreeError as why:
        raise TreeError(f"{host}: {why}") from why
    except OSError as why:
        raise TreeError(
            f"{host}: {why.filename or dest}: {why.strerror or why}; the user with id {os.getuid()} must be able to write there"
        ) from why
    gone = [f"{path}\n" for path in changes.remove]
    before = "".join([*(f"{path} {old[:12]}\n" for path, old in changes.write.items() if old), *gone])
    after = "".join(f"{path} {files[path][:12]}\n" for path in changes.write)
    return {
        "changed": changed,
        "digest": digest_of(files),
        "written": list(changes.write),
        "removed": changes.remove,
        "diff": {"before_header": dest, "after_header": dest, "before": before, "after": after},
    }


def apply(folder: str, wanted: Mapping[str, str], changes: TreeChanges, contents: Mapping[str, str]) -> None:
    """Write and remove what differs, each file atomically."""
    os.makedirs(folder, exist_ok=True)
    for path in changes.write:
        content = base64.b64decode(contents[path])
        if hashlib.sha256(content).hexdigest() != wanted[path]:
            raise TreeError(f"{path} changed while it was being sent; run this again")
        _write(os.path.join(folder, path), content)
    for path in changes.remove:
        os.unlink(os.path.join(folder, path))
        place = os.path.dirname(os.path.join(folder, path))
        shutil.rmtree(os.path.join(place, "__pycache__"), ignore_errors=True)
        with contextlib.suppress(OSError):  # others have files there, too
            os.removedirs(place)
    record = {"digest": digest_of(wanted), "files": sorted(wanted)}
    _write(os.path.join(folder, DEPLOYED), json.dumps(record, indent=1).encode())


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, content, 0o755 if content.startswith(b"#!") else 0o644)
