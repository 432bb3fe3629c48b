# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Selects the files of a run folder to collect, and the parts that the controller lacks.

Metrics and logs only grow, so the rest suffices if the beginning is known. Text is sent up to its
last complete line, so that a reader of the copy never sees a partial one.
"""

from __future__ import annotations

import base64
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import zlib
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, TypedDict

from .._contract import validate
from .._contract.document import Document, items, number, section, text, words
from .._contract.run_folder import CHECKPOINTS, MEMBER_EVENTS, TOKENIZER
from .._kit.files import write_whole
from .find import find_run_dir

# Approximate maximum size of one answer in bytes.
ROOM = 4000000
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
TOKENIZER_FILES = tuple("tokenizer/%s" % name for name in TOKENIZER)
MASK = "********"


class KnownCopy(NamedTuple):
    """The copy of a file on the other side."""

    size: int
    sha256: str
    mtime: float


class FilePiece(TypedDict):
    """A chunk of a file; the digest covers the file up to the chunk's end."""

    path: str
    offset: int
    sha256: str
    data: str
    last: bool


class BigFile(TypedDict):
    """A file that is fetched as a whole, by other means."""

    path: str
    size: int
    mtime: int


class MissingFiles(TypedDict):
    """Parts that the other side lacks, as far as they fit into one answer."""

    pieces: List[FilePiece]
    more: bool
    whole: List[BigFile]


class CopyError(Exception):
    """A file that does not match, or leads out of the folder; the text is for the user."""


def sha256_of(data: bytes) -> str:
    """The digest that identifies a chunk."""
    return hashlib.sha256(data).hexdigest()


def matches(path: str, patterns: Any) -> bool:
    """Whether a path relative to the run folder matches a pattern, level by level."""
    return any(path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern) for pattern in patterns)


def files_in(folder: str, patterns: Sequence[str]) -> List[str]:
    """Relative paths of the files that match, sorted."""
    places = (place for pattern in patterns for place in glob.glob(os.path.join(glob.escape(folder), pattern)))
    return sorted(os.path.relpath(place, folder) for place in places if os.path.isfile(place))


def masked(data: bytes) -> bytes:
    """A plan without its secrets: the environment values named by env_secret."""
    try:
        plan = json.loads(data)
        for node in items(plan, "nodes"):
            environment = section(node, "env")
            environment.update({name: MASK for name in words(node, "env_secret") if name in environment})
        return (json.dumps(plan, indent=1, sort_keys=True) + "\n").encode()
    except (ValueError, RecursionError):
        return data


def content(run_dir: str, path: str) -> Optional[bytes]:
    """A small file as it may be sent now; None if it disappeared."""
    try:
        with open(os.path.join(run_dir, path), "rb") as stream:
            data = stream.read()
    except OSError:
        return None
    if path == "plan.json":
        return masked(data)
    return data[: data.rfind(b"\n") + 1] if matches(path, GROWING) else data


def piece(path: str, data: bytes, have: Optional[KnownCopy], room: int) -> Optional[FilePiece]:
    """The next missing part of a file, at most `room` bytes; None if nothing is missing."""
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
    """The newest checkpoint's model and meta file, of the folder's training."""
    found: Dict[int, List[str]] = {}
    for path in files_in(run_dir, CHECKPOINT_FILES):
        found.setdefault(step_of(path), []).append(path)
    whole = [step for step, paths in found.items() if step >= 0 and any(path.endswith(".pt") for path in paths)]
    # The meta file last: it tells that the model is there.
    return sorted(found[max(whole)], reverse=True) if whole else []


def step_of(path: str) -> int:
    """The step in the name of a checkpoint's file; -1 if there is none."""
    found = re.search(r"(?:model|meta)_(\d+)\.(?:pt|json)$", path)
    return int(found.group(1)) if found else -1


def big_files(run_dir: str, have: Dict[str, KnownCopy]) -> List[BigFile]:
    """The missing files for a chat: the newest checkpoint and its tokenizer. They never change, so size and time suffice."""
    wanted: List[BigFile] = []
    newest = newest_checkpoint(run_dir)
    for path in [*newest, *(files_in(run_dir, TOKENIZER_FILES) if newest else [])]:
        try:
            status = os.stat(os.path.join(run_dir, path))
        except OSError:
            continue
        there = have.get(path)
        if there is None or (there.size, int(there.mtime)) != (status.st_size, int(status.st_mtime)):
            wanted.append({"path": path, "size": status.st_size, "mtime": int(status.st_mtime)})
    return wanted


def missing_files(run_dir: str, have: Dict[str, KnownCopy], checkpoints: bool, room: int) -> MissingFiles:
    """Everything that the other side lacks, up to the size of one answer."""
    pieces: List[FilePiece] = []
    more = False
    for path in files_in(run_dir, SMALL):
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


def run_files(
    have: Mapping[str, Any],
    base_dir: str = "",
    run_dir: Optional[str] = None,
    run: Optional[str] = None,
    checkpoints: bool = False,
    room: int = ROOM,
) -> Dict[str, object]:
    """The run (null if there is none), and what the controller, which has some files, lacks of it, up to the room of one answer."""
    run_dir = find_run_dir(run_dir, base_dir, run)
    known = {path: KnownCopy(**copy) for path, copy in have.items()}
    if run_dir is None or not os.path.isdir(run_dir):
        return {"run": None, "run_dir": run_dir, "pieces": [], "whole": [], "more": False}
    found = missing_files(run_dir, known, checkpoints, room)
    return {"run": os.path.basename(run_dir.rstrip("/")), "run_dir": run_dir, **found}


# Other files that a host may send.
BIG = (*CHECKPOINT_FILES, *TOKENIZER_FILES)
# Where checkpoints of trainings go that a host has set aside.
EARLIER = "earlier"
# Maximum size of an unpacked chunk; a compromised host could send a decompression bomb.
LONGEST_PIECE = 1 << 28


def place_of(folder: str, path: Any, patterns: Any) -> str:
    """The destination of a file from a host; rejects files that do not belong to a run, or lead out of the folder."""
    try:
        is_one = matches(validate.file_path(path), patterns)
    except validate.InvalidHostData:
        is_one = False
    if not is_one:
        raise CopyError("the host offers %.200s, which is not a run file; %s" % (ascii(path), validate.STILL))
    place = os.path.join(folder, path)
    if not os.path.realpath(place).startswith(os.path.realpath(folder) + os.sep):
        raise CopyError("%s leads out of %s through a symlink; remove that link" % (path, folder))
    return place


def apply_piece(folder: str, part: Document) -> None:
    """Add a chunk to its file atomically; the digest must match."""
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


def known_copies(folder: str) -> Dict[str, Dict[str, object]]:
    """The files of a run already in a folder, as the host expects them."""
    known: Dict[str, Dict[str, object]] = {}
    for path in files_in(folder, SMALL):
        with open(os.path.join(folder, path), "rb") as stream:
            data = stream.read()
        known[path] = {"size": len(data), "sha256": sha256_of(data), "mtime": 0.0}
    # All, not just the newest: an earlier training may have reached a higher step.
    for path in files_in(folder, BIG):
        status = os.stat(os.path.join(folder, path))
        known[path] = {"size": status.st_size, "sha256": "", "mtime": status.st_mtime}
    return known


def set_aside_beyond(folder: str, path: str) -> None:
    """Move checkpoints of steps later than the newest collected one to EARLIER/NUMBER/.

    They belong to a training that the host set aside; code that picks the highest step would use them.
    """
    place = os.path.join(folder, os.path.dirname(path))
    later = [name for name in os.listdir(place) if path.endswith(".pt") and step_of(name) > step_of(path)]
    if not later:
        return
    numbered = (os.path.join(folder, EARLIER, str(number)) for number in itertools.count(1))
    aside = next(path for path in numbered if not os.path.exists(path))
    os.makedirs(aside)
    for name in later:
        os.rename(os.path.join(place, name), os.path.join(aside, name))
