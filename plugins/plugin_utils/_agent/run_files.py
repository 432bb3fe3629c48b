# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests missing files of a run from a host until none are missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ...module_utils._contract import validate
from ...module_utils._contract.document import Document, items, number
from ...module_utils._contract.run_folder import RunNameError, plain_run_name
from ...module_utils._run import files
from ...module_utils._run.collected import host_folder
from ...module_utils._run.files import BIG, SMALL, CopyError, place_of
from .carrier import Call, across_sleep

ROUNDS = 1000


def bring(call: Call, arguments: Mapping[str, Any], folder: Path) -> set[str] | None:
    """Copy everything; returns the files that were (or in check mode would be) written, None if there is no such run."""
    written: set[str] = set()
    for dummy in range(ROUNDS):
        have = files.known_copies(str(folder)) if folder.is_dir() else {}
        seen = call.ask("run_files", **arguments, have=have)
        if seen.get("failed"):
            raise CopyError(str(seen.get("msg")))
        if seen.get("run") is None:
            return None
        pieces, whole = items(seen, "pieces"), items(seen, "whole")
        for part, patterns in [*((part, SMALL) for part in pieces), *((part, BIG) for part in whole)]:
            place_of(str(folder), part.get("path"), patterns)
            written.add(str(part["path"]))
        if call.check:
            return written
        for part in pieces:
            files.apply_piece(str(folder), part)
        if not seen.get("more"):
            for part in whole:
                fetch(call.action, validate.absolute_path(seen.get("run_dir")), part, folder)
            for part in whole:
                files.set_aside_beyond(str(folder), str(part["path"]))
            return written
    raise CopyError(f"it has more than {ROUNDS} chunks")


def fetch(action: ActionBase, run_dir: str, part: Document, folder: Path) -> None:
    """Copy a big file with the connection plugin; it gets its name once complete."""
    path = Path(place_of(str(folder), part["path"], BIG))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        across_sleep(action, lambda: action._connection.fetch_file(f"{run_dir}/{part['path']}", str(beside)))
        if beside.stat().st_size != part.get("size"):
            raise CopyError(f"{part['path']} came with {beside.stat().st_size} of {part.get('size')} bytes")
        # The host's own stamp; while it is the same, so is the file.
        stamp = number(part, "mtime")
        os.utime(beside, (stamp, stamp))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def run_files(call: Call) -> dict[str, object]:
    """Copy the new files of a run to `dest`/RUN/HOST."""
    arguments = call.located
    dest = arguments.pop("dest")
    name = arguments.get("run") or os.path.basename(str(arguments.get("run_dir") or "").rstrip("/"))
    if not name:
        # Only the host knows its newest run.
        seen = call.ask("run_files", **arguments, have={}, room=0)
        if seen.get("failed"):
            return seen
        name = arguments["run"] = seen.get("run")
    if not name:
        return {"changed": False, "run": None, "folder": None, "files": []}
    try:
        # It becomes a folder here, from an untrusted source.
        folder = Path(dest).expanduser().absolute() / plain_run_name(name) / host_folder(call.host)
        written = bring(call, arguments, folder)
    except (CopyError, RunNameError, validate.InvalidHostData, OSError) as error:
        message = f"Files of the run {str(name)[:80]!r} could not be copied from {call.host}: {error}"
        return {"failed": True, "msg": message}
    there = written is not None
    found = {"run": name, "folder": str(folder)} if there else {"run": None, "folder": None}
    return {"changed": bool(written), **found, "files": sorted(written or ())}
