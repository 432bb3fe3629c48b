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
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch

from nanochat.kit.common import BadCheckpoint, UserError, disk_cause, first_line

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
CHUNK_BYTES = 2**20

Json = dict[str, Any]


class NotSaved(UserError):
    """A checkpoint could not be written; earlier ones are intact."""


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
    optimizer: Mapping[str, object],
    loader: Mapping[str, object] | None = None,
    model: Mapping[str, torch.Tensor] | None = None,
    meta: Mapping[str, object] | None = None,
) -> Json:
    """Write this rank's part of a checkpoint; model and meta are given on the ranks that write for their folder. Returns where, and
    what it cost."""
    begun = time.perf_counter()
    parts = {model_name(step): model, meta_name(step): meta}
    contents = {name: dict(part) for name, part in parts.items() if part is not None}
    contents[optimizer_name(step, rank)] = dict(optimizer) | ({} if loader is None else {LOADER_KEY: dict(loader)})
    new: list[NewFile] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_space(folder, _tensor_bytes(contents))
        for name, value in contents.items():
            new.append(NewFile(folder, name, rank))
            new[-1].dump(value)
        entries = [file.close() for file in new]
        new.append(NewFile(folder, list_name(step, rank), rank))
        new[-1].dump({"format": 1, "step": step, "rank": rank, "files": [entry._asdict() for entry in entries]})
        new[-1].close()
        for file in new:
            file.appear()
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException as error:
        # Without a list nothing would ever prune these.
        for file in new:
            file.discard()
        if not isinstance(error, OSError):
            raise
        why = error.strerror or error
        raise NotSaved(f"rank {rank} could not save step {step} to {folder}: {why}.", disk_cause(error)) from None
    size, seconds = sum(entry.bytes for entry in entries), time.perf_counter() - begun
    return {"path": str(new[-1].place), "bytes": size, "seconds": seconds}


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
    """A file that is written under a temporary name, with the sha256 of its content.

    All files of a checkpoint are written before any is renamed, so that a full disk is noticed before anything is replaced.
    """

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        self.place, self.path = folder / name, folder / f".{name}.rank{rank}.tmp"
        self.file: BinaryIO = self.path.open("wb")
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.failure: OSError | None = None

    def dump(self, value: Any) -> None:
        """Write tensors, or the values of a JSON file."""
        try:
            if self.place.suffix == ".pt":
                torch.save(value, cast(IO[bytes], self))
            else:
                self.write(json.dumps(value, indent=2).encode())
        except RuntimeError as error:
            # torch reports its archive's state, not the disk's error.
            raise self.failure or error from None

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

    def appear(self) -> None:
        """Give the file its name."""
        self.path = self.path.rename(self.place)

    def finish(self, sha256: str) -> None:
        """Give a file that was received its name, if it arrived intact."""
        if self.close().sha256 != sha256:
            raise BadCheckpoint(f"{self.place} was corrupted in transit; start again.")
        self.appear()

    def discard(self) -> None:
        """Remove the file under its present name."""
        for remove in (self.file.close, self.path.unlink):
            with contextlib.suppress(OSError):
                remove()


# -- finding


def steps_in(folder: Path) -> list[int]:
    """All steps with any file in the folder."""
    return sorted({step for name in _names(folder) if (step := step_of(name)) is not None})


def step_of(name: str) -> int | None:
    """The step to which a file belongs, by its name; None if it is no file of a checkpoint."""
    match = STEP_FILE.fullmatch(name)
    return int(match[1]) if match else None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are all we want)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadCheckpoint(f"cannot read the checkpoints in {folder}: {error.strerror or error}.") from None


def optimizer_ranks(folder: Path, step: int) -> list[int]:
    """The ranks with an optimizer file in the folder."""
    found = (re.fullmatch(rf"optim_{step:06d}_rank(\d+)\.pt", name) for name in _names(folder))
    return sorted(int(match[1]) for match in found if match)


def writer_of(folder: Path, step: int, deep: bool = True) -> int | None:
    """The rank whose files here form a complete checkpoint of this step; None if there is none. deep: compare the digests, too."""
    for rank in optimizer_ranks(folder, step):
        files = listed_files(folder, step, rank)
        # Upstream has no list, and rank 0 writes the weights.
        holds_model = rank == 0 if files is None else model_name(step) in [file.name for file in files]
        if holds_model and is_whole(folder, step, rank, deep):
            return rank
    return None


def whole_steps(folder: Path, deep: bool = True) -> list[int]:
    """The steps that are complete here."""
    return [step for step in steps_in(folder) if writer_of(folder, step, deep) is not None]


def is_whole(folder: Path, step: int, rank: int, deep: bool = True) -> bool:
    """Whether this rank's part of a checkpoint is here and undamaged."""
    files = listed_files(folder, step, rank)
    if files is None:
        return has_model(folder, step, deep) and is_sound(folder / optimizer_name(step, rank), deep)
    try:
        if not files or any((folder / file.name).stat().st_size != file.bytes for file in files):
            return False
        return not deep or all(file_digest(folder / file.name) == file.sha256 for file in files)
    except NOT_OURS:
        return False


def has_model(folder: Path, step: int, deep: bool = True) -> bool:
    """Whether the folder has an undamaged model and meta file of a step, whoever wrote them."""
    return is_sound(folder / meta_name(step), deep) and is_sound(folder / model_name(step), deep)


def listed_files(folder: Path, step: int, rank: int) -> list[FileEntry] | None:
    """The files in a rank's list: none in one that is damaged, None without a list."""
    try:
        return [FileEntry(**entry) for entry in json.loads((folder / list_name(step, rank)).read_bytes())["files"]]
    except FileNotFoundError:
        return None
    except NOT_OURS:
        return []


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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


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
        raise BadCheckpoint(f"the checkpoint file {path} cannot be read: {first_line(error)}.") from None


def load_model(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights by name."""
    found = _load(folder / model_name(step))
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise BadCheckpoint(f"the checkpoint file {folder / model_name(step)} does not contain a model's weights.")
    # torch.compile puts this before every name, and upstream saves the compiled model.
    return {name.removeprefix("_orig_mod."): value for name, value in found.items()}


def load_weights(model: torch.nn.Module, folder: Path, step: int) -> None:
    """Give a model the weights of a checkpoint."""
    try:
        model.load_state_dict(load_model(folder, step))
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300].rstrip(".")
        raise BadCheckpoint(f"the weights of step {step} in {folder} do not match this model: {what}.") from None


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


def set_aside(folder: Path, steps: Collection[int], say: Callable[[str], None]) -> None:
    """Move steps into a new subfolder: they belong to another training, or will be repeated, and a reader that takes the highest
    step would take one of them."""
    if not set(steps) & set(steps_in(folder)):
        return
    place = next(path for number in itertools.count(1) if not (path := folder / f"earlier-{number}").exists())
    try:
        place.mkdir()
        # The lists first: without one, a step that a crash cuts in two does not count.
        for name in sorted(_names(folder), key=lambda name: name.startswith("ckpt_"), reverse=True):
            if step_of(name) in steps:
                (folder / name).rename(place / name)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"cannot move earlier checkpoints to {place}: {why}.", disk_cause(error)) from None
    say(f"Checkpoints of an earlier run (steps {', '.join(map(str, sorted(steps)))}) are now in {place}")


def sweep(folder: Path) -> None:
    """Remove leftovers of interrupted saves and removals; only if no rank of the folder can be saving."""
    for entry in folder.glob(f".ckpt_*{GONE}"):
        with contextlib.suppress(*NOT_OURS):
            _remove_listed(entry)
    for name in _names(folder):
        if LEFTOVER.fullmatch(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
