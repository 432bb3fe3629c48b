# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Atomic checkpoints on this rank's disk, in upstream's file format.

    model_000100.pt  meta_000100.json  optim_000100_rank0.pt      as upstream writes and reads them (optim_file.py)
    ckpt_000100_rank0.json                                        ours, written last: bytes and sha256 of what this rank wrote

Every file is written under a temporary name, synced and renamed; the last one makes the checkpoint count. A full or failing
disk raises NotSaved and leaves nothing behind: earlier checkpoints stay whole, and the run continues with a warning.
Upstream's checkpoints have no such list; they count if each of their files is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from nanochat.kit.common import BadCheckpoint, UserError, disk_cause
from nanochat.run import lineage

# Our parts of the optimizer's file; upstream's loader skips unknown keys.
LOADER_KEY, FEEDBACK_KEY = "nanochat_ddp_loader", "nanochat_ddp_feedback"
# Errors from reading a list or meta file with arbitrary content.
NOT_OURS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
STEP_FILE = re.compile(r"(?:model|meta|optim|ckpt)_(\d{6,})(?:_rank\d+)?\.(?:pt|json)")
# Partly written files, and the marks with which ranks that share a folder find each other.
LEFTOVER = re.compile(r"\..*\.rank\d+\.tmp|\.rank\d+-[0-9a-f]{16}|\.writable-[0-9a-f]{16}")
# Suffix of a list whose files are being removed.
GONE = ".gone"
SPARE_BYTES = 16 * 2**20

Json = dict[str, Any]


class NotSaved(UserError):
    """A checkpoint could not be written; earlier ones are intact."""


class Saved(NamedTuple):
    """The cost of a save."""

    path: str
    bytes: int
    seconds: float


class FileEntry(NamedTuple):
    """A file of a checkpoint, as our list names it."""

    name: str
    bytes: int
    sha256: str


def model_name(step: int) -> str:
    return f"model_{step:06d}.pt"


def meta_name(step: int) -> str:
    return f"meta_{step:06d}.json"


def optimizer_name(step: int, rank: int) -> str:
    return f"optim_{step:06d}_rank{rank}.pt"


def list_name(step: int, rank: int) -> str:
    return f"ckpt_{step:06d}_rank{rank}.json"


# -- writing


def save(
    folder: Path,
    step: int,
    rank: int,
    optimizer: Mapping[str, Any],
    loader: Mapping[str, Any] | None = None,
    model: Mapping[str, torch.Tensor] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Saved:
    """Write this rank's part of a checkpoint; model and meta are given on the ranks that write for their folder."""
    begun = time.perf_counter()
    contents: dict[str, Callable[[Any], None]] = {}
    if model is not None:
        contents[model_name(step)] = lambda file: torch.save(dict(model), file)
    if meta is not None:
        contents[meta_name(step)] = lambda file: _dump(dict(meta), file)
    whole = dict(optimizer) if loader is None else {**optimizer, LOADER_KEY: dict(loader)}
    contents[optimizer_name(step, rank)] = lambda file: torch.save(whole, file)
    placed: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_space(folder, _tensor_bytes(whole) + _tensor_bytes(model or {}))
        written = _write_all(folder, rank, contents, placed)
        write_list(folder, step, rank, written, placed)
        _force_folder(folder)
    except OSError as error:
        # Without a list nothing would ever prune these.
        for path in placed:
            with contextlib.suppress(OSError):
                path.unlink()
        why = error.strerror or error
        raise NotSaved(f"rank {rank} could not save step {step} to {folder}: {why}.", disk_cause(error)) from None
    return Saved(str(folder / list_name(step, rank)), sum(file.bytes for file in written), time.perf_counter() - begun)


def write_list(folder: Path, step: int, rank: int, files: Sequence[FileEntry], placed: list[Path]) -> None:
    """Write the list that makes this rank's part of a checkpoint count."""
    entry = {"format": 1, "step": step, "rank": rank, "files": [file._asdict() for file in files]}
    _write_all(folder, rank, {list_name(step, rank): lambda file: _dump(entry, file)}, placed)


def _dump(value: Json, file: Any) -> None:
    file.write(json.dumps(value, indent=2).encode())


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    return sum(_tensor_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def check_space(folder: Path, needed: int) -> None:
    """Refuse a checkpoint that would not fit."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise OSError(28, f"the disk has {free / 1e6:.0f} MB left, but the checkpoint needs {needed / 1e6:.0f} MB")


class NewFile:
    """A file that is written under a temporary name, with the sha256 of its content."""

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.place, self.fresh = folder / name, folder / f".{name}.rank{rank}.tmp"
        self.file: BinaryIO = self.fresh.open("wb")
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Add the next chunk."""
        self.sha256.update(data)
        self.bytes += memoryview(data).nbytes
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> FileEntry:
        """Force the content to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return FileEntry(self.place.name, self.bytes, self.sha256.hexdigest())

    def finish(self, sha256: str) -> None:
        """Rename a file that was received, if it arrived intact."""
        if self.close().sha256 != sha256:
            self.fresh.unlink()
            raise BadCheckpoint(f"{self.place} was corrupted in transit; start again.")
        self.fresh.rename(self.place)

    def tidy(self) -> None:
        """Remove what was not renamed."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.fresh.unlink()


def _write_all(
    folder: Path, rank: int, contents: Mapping[str, Callable[[Any], None]], placed: list[Path]
) -> list[FileEntry]:
    """Write every file to a temporary name first, so that a full disk is noticed before anything is replaced.

    placed: receives the renamed files, even if a later one fails.
    """
    files: list[NewFile] = []
    written = []
    try:
        for name, write in contents.items():
            files.append(NewFile(folder, name, rank))
            try:
                write(files[-1])
            except RuntimeError as error:
                # torch reports its archive's state, not the disk's error.
                raise files[-1].failure or error from None
            written.append(files[-1].close())
        for file in files:
            file.fresh.rename(file.place)
            placed.append(file.place)
    finally:
        for file in files:
            file.tidy()
    return written


def _force_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rewrite(folder: Path, name: str, rank: int, change: Callable[[Json], Json]) -> FileEntry | None:
    """Modify a torch file; returns its new entry, or None if unchanged.

    Nothing is lost if writing fails.
    """
    found = _load(folder / name)
    value = change(found) if isinstance(found, dict) else found
    if value is found:
        return None
    try:
        [written] = _write_all(folder, rank, {name: lambda file: torch.save(value, file)}, [])
    except OSError:
        return None
    return written


# -- finding


def steps_in(folder: Path) -> list[int]:
    """All steps with any file in the folder."""
    found = (STEP_FILE.fullmatch(name) for name in _names(folder))
    return sorted({int(match[1]) for match in found if match})


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are all we want)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadCheckpoint(f"cannot read the checkpoints in {folder}: {error.strerror or error}.") from None


def training_of(folder: Path, step: int) -> str:
    """The training id of a step, from its meta file."""
    with contextlib.suppress(*NOT_OURS):
        return lineage.id_of(json.loads((folder / meta_name(step)).read_bytes()))
    return lineage.UNSAID


def optimizer_ranks(folder: Path, step: int) -> list[int]:
    """The ranks with an optimizer file in the folder."""
    found = (re.fullmatch(rf"optim_{step:06d}_rank(\d+)\.pt", name) for name in _names(folder))
    return sorted(int(match[1]) for match in found if match)


def whole_steps(folder: Path, rank: int, deep: bool = True) -> list[int]:
    """The steps whose part for this rank is complete; deep also compares the digests."""
    return [step for step in steps_in(folder) if is_whole(folder, step, rank, deep)]


def is_whole(folder: Path, step: int, rank: int, deep: bool = True) -> bool:
    """Whether this rank's part of a checkpoint is complete and undamaged."""
    if (folder / list_name(step, rank)).exists():
        return _matches_list(folder, step, rank, deep)
    return has_model(folder, step, deep) and is_sound(folder / optimizer_name(step, rank), deep)


def has_model(folder: Path, step: int, deep: bool = True) -> bool:
    """Whether the folder has an undamaged model and meta file of a step, whoever wrote them."""
    return is_sound(folder / meta_name(step), deep) and is_sound(folder / model_name(step), deep)


def listed_files(folder: Path, step: int, rank: int) -> list[FileEntry]:
    """The files in a rank's list; raises one of NOT_OURS if there is none or it is damaged."""
    entries = json.loads((folder / list_name(step, rank)).read_bytes())["files"]
    return [FileEntry(**entry) for entry in entries]


def _matches_list(folder: Path, step: int, rank: int, deep: bool) -> bool:
    try:
        files = listed_files(folder, step, rank)
        if any((folder / file.name).stat().st_size != file.bytes for file in files):
            return False
        return not deep or all(file_digest(folder / file.name) == file.sha256 for file in files)
    except NOT_OURS:
        return False


def is_sound(path: Path, deep: bool) -> bool:
    """Whether a file without a recorded digest is complete by its own format (zip for tensors, JSON for meta)."""
    try:
        if path.suffix == ".json":
            return isinstance(json.loads(path.read_bytes()), dict)
        with zipfile.ZipFile(path) as archive:
            return not deep or archive.testzip() is None
    except (*NOT_OURS, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


def file_digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entry_of(path: Path) -> FileEntry:
    """The entry that our list would have for a file."""
    return FileEntry(path.name, path.stat().st_size, file_digest(path))


# -- reading


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BadCheckpoint(f"there is no checkpoint file {path}.") from None
    # A damaged file may raise almost anything from within the unpickler.
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadCheckpoint(f"the checkpoint file {path} cannot be read: {first.rstrip('.')}.") from None


def load_model(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights by name."""
    found = _load(folder / model_name(step))
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise BadCheckpoint(f"the checkpoint file {folder / model_name(step)} does not contain a model's weights.")
    # torch.compile puts this before every name, and upstream saves the compiled model.
    return {name.removeprefix("_orig_mod."): value for name, value in found.items()}


def load_meta(folder: Path, step: int) -> Json:
    """The meta file, verified to name its model."""
    path = folder / meta_name(step)
    try:
        meta = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"the checkpoint file {path} cannot be read: {error}.") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("model_config"), dict):
        raise BadCheckpoint(f"the checkpoint file {path} does not name its model.")
    return meta


def load_optimizer(folder: Path, step: int, rank: int) -> tuple[Json, Json | None]:
    """One rank's optimizer file (see optim_file.py), and its data loader's state if we wrote it."""
    found = _load(folder / optimizer_name(step, rank))
    if not isinstance(found, dict):
        raise BadCheckpoint(
            f"the checkpoint file {folder / optimizer_name(step, rank)} does not contain an optimizer's state."
        )
    return found, found.pop(LOADER_KEY, None)


# -- tidying


def prune(folder: Path, keep: int, common: Collection[int]) -> list[int]:
    """Remove steps before the newest "keep" ones that all ranks have complete, whichever rank wrote them:
    a host's rank changes when others come or go.

    Removes only files in our lists: upstream's checkpoints and other people's files stay.
    """
    if keep < 1 or len(common) < keep:
        return []
    oldest = sorted(common)[-keep]
    return [step for step in steps_in(folder) if step < oldest and remove(folder, step)]


def remove(folder: Path, step: int) -> bool:
    """Remove our ranks' files of a step from a folder; other ranks of the folder may be doing the same."""
    removed = False
    for entry in folder.glob(f"ckpt_{step:06d}_rank*.json"):
        with contextlib.suppress(*NOT_OURS):
            # The list stays under another name until the files are gone, so that sweep can finish after a crash.
            entry.rename(gone := folder / f".{entry.name}{GONE}")
            removed = True
            _remove_listed(gone)
    return removed


def _remove_listed(entry: Path) -> None:
    """Remove the files in a list, and then the list."""
    for file in json.loads(entry.read_bytes())["files"]:
        (entry.parent / Path(str(file["name"])).name).unlink(missing_ok=True)
    entry.unlink()


def set_aside(folder: Path, steps: Collection[int]) -> Path | None:
    """Move the existing files of these steps into a new subfolder, which is returned."""
    if not set(steps) & set(steps_in(folder)):
        return None
    place = next(path for number in itertools.count(1) if not (path := folder / f"earlier-{number}").exists())
    try:
        place.mkdir()
        # The lists first: without one, a step that a crash cuts in two does not count.
        for name in sorted(_names(folder), key=lambda name: name.startswith("ckpt_"), reverse=True):
            if (match := STEP_FILE.fullmatch(name)) and int(match[1]) in steps:
                (folder / name).rename(place / name)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"cannot move earlier checkpoints to {place}: {why}.", disk_cause(error)) from None
    return place


def sweep(folder: Path) -> None:
    """Remove leftovers of interrupted saves and removals; only if no rank of the folder can be saving."""
    for entry in folder.glob(f".ckpt_*{GONE}"):
        with contextlib.suppress(*NOT_OURS):
            _remove_listed(entry)
    for name in _names(folder):
        if LEFTOVER.fullmatch(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
