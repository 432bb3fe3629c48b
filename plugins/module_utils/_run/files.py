# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a run folder that are worth bringing back, and of each only what the other side has not.

Metrics and logs only grow, so that of a file whose beginning is known the rest is enough. Text is handed over up to its
last whole line, so that a reader of the copy never sees half of one.
"""

from __future__ import annotations

import base64
import fnmatch
import glob
import hashlib
import json
import os
import re
import zlib
from typing import Any, Dict, List, NamedTuple, Optional, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import (
    Document,
    items,
    number,
    section,
    text,
    words,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import (
    CHECKPOINTS,
    MEMBER_EVENTS,
    TOKENIZER,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import write_whole

SMALL = (
    "plan.json",
    "session.json",
    "training.json",
    MEMBER_EVENTS,
    "heartbeat-rank*.json",
    "metrics-rank*.jsonl",
    "log/*.log",
    "report/*",
)
GROWING = ("metrics-rank*.jsonl", MEMBER_EVENTS, "log/*.log")
CHECKPOINT_FILES = tuple("%s/*/%s" % (folder, name) for folder in CHECKPOINTS for name in ("model_*.pt", "meta_*.json"))
MASK = "********"


class Have(NamedTuple):
    """The copy of a file on the other side."""

    size: int
    sha256: str
    mtime: float


class FilePiece(TypedDict):
    """Some bytes of a file; the digest is of all of it up to their end."""

    path: str
    offset: int
    sha256: str
    data: str
    last: bool


class BigFile(TypedDict):
    """A file that is fetched whole, by other means."""

    path: str
    size: int
    mtime: int


class Missing(TypedDict):
    """The parts that the other side lacks, as far as one answer has room for them."""

    pieces: List[FilePiece]
    more: bool
    whole: List[BigFile]


class CopyError(Exception):
    """A description of a file that does not match the file, or leads out of the folder; the text is for the user."""


def had(known: Any) -> Have:
    """Read the other side's description of its copy."""
    try:
        return Have(int(known["size"]), str(known["sha256"]), float(known["mtime"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CopyError("have must give size, sha256 and mtime of each file, not %.80r" % (known,)) from None


def sha256_of(data: bytes) -> str:
    """The digest by which a piece is known."""
    return hashlib.sha256(data).hexdigest()


def matches(path: str, patterns: Any) -> bool:
    """Whether a path relative to the run folder is one of these, level by level."""
    return any(path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern) for pattern in patterns)


def small_files(run_dir: str) -> List[str]:
    """Paths, relative to the run folder, of everything small that tells about the run."""
    found = []
    for folder in ("", "log", "report"):
        try:
            names = os.listdir(os.path.join(run_dir, folder))
        except OSError:
            continue
        paths = [os.path.join(folder, name) if folder else name for name in names]
        found += [path for path in paths if matches(path, SMALL) and os.path.isfile(os.path.join(run_dir, path))]
    return sorted(found)


def masked(data: bytes) -> bytes:
    """A plan without its secrets: the values of the environment that env_secret names are not for results folders."""
    try:
        plan = json.loads(data)
        for node in items(plan, "nodes"):
            environment = section(node, "env")
            environment.update({name: MASK for name in words(node, "env_secret") if name in environment})
        return (json.dumps(plan, indent=1, sort_keys=True) + "\n").encode()
    except (ValueError, RecursionError):
        return data


def content(run_dir: str, path: str) -> Optional[bytes]:
    """A small file as it may leave the host now; None when it went away."""
    try:
        with open(os.path.join(run_dir, path), "rb") as stream:
            data = stream.read()
    except OSError:
        return None
    if path == "plan.json":
        return masked(data)
    return data[: data.rfind(b"\n") + 1] if matches(path, GROWING) else data


def piece(path: str, data: bytes, have: Optional[Have], room: int) -> Optional[FilePiece]:
    """The part of a file that is missing on the other side, at most `room` bytes; None when nothing is."""
    offset = 0
    if have is not None and have.size <= len(data) and sha256_of(data[: have.size]) == have.sha256:
        if have.size == len(data):
            return None
        offset = have.size
    new = data[offset : offset + room]
    return {
        "path": path,
        "offset": offset,
        "sha256": sha256_of(data[: offset + len(new)]),
        "data": base64.b64encode(zlib.compress(new)).decode("ascii"),
        "last": offset + len(new) == len(data),
    }


def newest_checkpoint(run_dir: str) -> List[str]:
    """The model and its description of the newest checkpoint of the folder's training."""
    found: Dict[int, List[str]] = {}
    for pattern in CHECKPOINT_FILES:
        for path in glob.glob(os.path.join(glob.escape(run_dir), pattern)):
            match = re.search(r"(?:model|meta)_(\d+)\.(?:pt|json)$", path)
            if match:
                found.setdefault(int(match.group(1)), []).append(os.path.relpath(path, run_dir))
    whole = [step for step, paths in found.items() if any(path.endswith(".pt") for path in paths)]
    return found[max(whole)] if whole else []


def to_talk_to(run_dir: str) -> List[str]:
    """The files for a chat: the newest checkpoint, and the tokenizer that it was trained with."""
    newest = newest_checkpoint(run_dir)
    paths = [os.path.join("tokenizer", name) for name in TOKENIZER] if newest else []
    return [*newest, *(path for path in paths if os.path.isfile(os.path.join(run_dir, path)))]


def big_files(run_dir: str, have: Dict[str, Have]) -> List[BigFile]:
    """Those of to_talk_to that the other side has not; they are immutable, so size and time tell."""
    wanted: List[BigFile] = []
    for path in to_talk_to(run_dir):
        try:
            status = os.stat(os.path.join(run_dir, path))
        except OSError:
            continue
        there = have.get(path)
        if there is None or (there.size, int(there.mtime)) != (status.st_size, int(status.st_mtime)):
            wanted.append({"path": path, "size": status.st_size, "mtime": int(status.st_mtime)})
    return wanted


def missing_files(run_dir: str, have: Dict[str, Have], checkpoints: bool, room: int) -> Missing:
    """Everything that the other side lacks, as much of it as there is room for in one answer."""
    pieces: List[FilePiece] = []
    more = False
    for path in small_files(run_dir):
        data = content(run_dir, path)
        found = None if data is None else piece(path, data, have.get(path), max(room, 1))
        if found is None:
            continue
        if room <= 0:
            more = True
            break
        pieces.append(found)
        room -= len(found["data"])
        more = more or not found["last"]
    return {"pieces": pieces, "more": more, "whole": big_files(run_dir, have) if checkpoints else []}


# What a host may hand over beside the small files.
BIG = (*CHECKPOINT_FILES, *("tokenizer/%s" % name for name in TOKENIZER))
# Where checkpoints go of trainings that a host has set aside.
EARLIER = "earlier"
# The most that a piece may come to; a host that is not what it was could send one that unpacks to anything.
LONGEST_PIECE = 1 << 28


def place_of(folder: str, path: Any, patterns: Any) -> str:
    """Where a file that a host names belongs below the folder; whatever is no file of a run, or leads out, is refused."""
    try:
        is_one = matches(told.file_path(path), patterns)
    except told.Untrue:
        is_one = False
    if not is_one:
        raise CopyError("the host offers %.200s, which is not a run file; %s" % (ascii(path), told.STILL))
    place = os.path.join(folder, path)
    if not os.path.realpath(place).startswith(os.path.realpath(folder) + os.sep):
        raise CopyError("%s leads out of %s through a symlink; remove that link" % (path, folder))
    return place


def apply_piece(folder: str, part: Document) -> None:
    """Put a piece where it belongs, the file changing all at once; the digest must fit."""
    path = place_of(folder, part.get("path"), SMALL)
    try:
        before = _beginning(path, number(part, "offset")) if part["offset"] else b""
        unpacking = zlib.decompressobj()
        data = before + unpacking.decompress(base64.b64decode(text(part, "data") or ""), LONGEST_PIECE)
        fits = not unpacking.unconsumed_tail and sha256_of(data) == part["sha256"]
    except (KeyError, TypeError, ValueError, OverflowError, OSError, zlib.error) as error:
        raise CopyError("%s arrived unreadable (%s)" % (part.get("path"), error)) from error
    if not fits:
        raise CopyError(
            "%s does not match what was collected before; remove %s and collect again" % (part["path"], path)
        )
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, data)


def _beginning(path: str, count: int) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(count)


def have_of(folder: str) -> Dict[str, Dict[str, object]]:
    """The files of a run that a folder holds already, as the host expects them."""
    known: Dict[str, Dict[str, object]] = {}
    for path in small_files(folder):
        with open(os.path.join(folder, path), "rb") as stream:
            data = stream.read()
        known[path] = {"size": len(data), "sha256": sha256_of(data), "mtime": 0.0}
    # All, not the newest alone: that of a training before may have come further.
    for place in [place for pattern in BIG for place in glob.glob(os.path.join(glob.escape(folder), pattern))]:
        path, status = os.path.relpath(place, folder), os.stat(place)
        known[path] = {"size": status.st_size, "sha256": "", "mtime": status.st_mtime}
    return known


def set_aside_beyond(folder: str, path: str) -> List[str]:
    """Of a folder into which this checkpoint was brought as the newest, move those of later steps to EARLIER/NUMBER/.

    They are of a training that its host has set aside, and whoever takes the highest step would take theirs.
    """
    fetched = re.search(r"model_(\d+)\.pt$", path)
    if fetched is None:
        return []
    place, later = os.path.join(folder, os.path.dirname(path)), []
    for name in sorted(os.listdir(place)):
        found = re.match(r"(?:model|meta)_(\d+)\.(?:pt|json)$", name)
        if found and int(found.group(1)) > int(fetched.group(1)):
            later.append(name)
    if not later:
        return []
    number = 1
    while os.path.exists(os.path.join(folder, EARLIER, str(number))):
        number += 1
    aside = os.path.join(folder, EARLIER, str(number))
    os.makedirs(aside)
    for name in later:
        os.rename(os.path.join(place, name), os.path.join(aside, name))
    return later
