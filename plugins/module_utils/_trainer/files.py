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

from .._contract.document import words
from .._contract.run_folder import DEPLOYED
from .._kit import processes
from .._kit.files import hash_file, read_object, write_whole

LEFT_OUT = (".*", "__pycache__", "*.pyc")


def read_tree(folder: str) -> dict[str, bytes]:
    """Every file in a folder by path, without hidden and generated ones."""
    found: dict[str, bytes] = {}
    for root, folders, names in os.walk(folder):
        folders[:] = _kept(folders)
        for full in (os.path.join(root, name) for name in _kept(names)):
            with open(full, "rb") as file:
                found[os.path.relpath(full, folder)] = file.read()
    return found


def _kept(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT))


def digests_of(tree: Mapping[str, bytes]) -> dict[str, str]:
    """The digest of each file."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in tree.items()}


def trainer_files(
    dest: str, files: Mapping[str, str], contents: Mapping[str, str] | None = None, host: str = "", check: bool = False
) -> dict[str, object]:
    """Bring a folder to the trainer's files (path -> digest), or tell what that would change.

    Without contents (path -> base64), of the files that would be written, it only compares. Files in use are not changed, and only
    files that were deployed earlier are removed.
    """
    there = {path: digest_at(os.path.join(dest, path)) for path in sorted(files)}
    write = [path for path, old in there.items() if old != files[path]]
    earlier = words(read_object(os.path.join(dest, DEPLOYED)), "files")
    # Only in this folder: somebody may have edited the record.
    inside = (path for path in earlier if not os.path.isabs(path) and ".." not in path.split("/"))
    remove = sorted(path for path in inside if path not in files and os.path.lexists(os.path.join(dest, path)))
    if (write or remove) and (use := use_of(dest)):
        return {"failed": True, "msg": f"{host}: {use}"}
    if (write or remove) and contents is not None and not check:
        try:
            for path in write:
                _write(os.path.join(dest, path), base64.b64decode(contents[path]))
            for path in remove:
                place = os.path.dirname(os.path.join(dest, path))
                os.unlink(os.path.join(dest, path))
                shutil.rmtree(os.path.join(place, "__pycache__"), ignore_errors=True)
                with contextlib.suppress(OSError):  # somebody else has files there
                    os.removedirs(place)
            _write(os.path.join(dest, DEPLOYED), json.dumps({"files": sorted(files)}, indent=1).encode())
        except OSError as why:
            must = f"the user with id {os.getuid()} must be able to write there"
            return {"failed": True, "msg": f"{host}: {why.filename or dest}: {why.strerror or why}; {must}"}
    before = [*(f"{path} {there[path][:12]}\n" for path in write if there[path]), *(f"{path}\n" for path in remove)]
    after = [f"{path} {files[path][:12]}\n" for path in write]
    return {
        "changed": bool(write or remove),
        "written": write,
        "removed": remove,
        "diff": {"before_header": dest, "after_header": dest, "before": "".join(before), "after": "".join(after)},
    }


def digest_at(path: str) -> str:
    """The digest of a file; empty if there is none."""
    try:
        return hash_file(path)
    except OSError:
        return ""


def use_of(folder: str) -> str:
    """Why files there must not be changed: a session's process runs them, and a restarted rank would differ from the others. Else empty."""
    places = {folder, os.path.realpath(folder)}
    inside = tuple(place + "/" for place in places)
    for pid, one in sorted(processes.processes().items()):
        where = ""
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/{pid}/cwd")
        if one.marker and (where in places or any(word.startswith(inside) for word in one.argv)):
            return (
                f"the files in {folder} would have to change, but {f'the run {one.run}' if one.run else 'a training'} uses them "
                f"(process {pid}). Stop it first, with a checkpoint: ansible-playbook nanochat.ddp.stop -i INVENTORY "
                f"-e ddp_run={one.run or 'NAME'}; or give the new run its own folders (ddp_base_dir, ddp_venv_dir)"
            )
    return ""


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, content, 0o755 if content.startswith(b"#!") else 0o644)
