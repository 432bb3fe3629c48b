# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the checkpoint to resume from, by all ranks together, without shared storage.

A checkpoint belongs to a training: everything from step 0 on, wherever it was resumed. Each has an id, stored in every checkpoint's meta
file. The one to resume is in training.json in the run folder. Without it, the ranks resume the one that all their checkpoints share, and
refuse to choose between two. Checkpoints of other programs have no id: they belong to the training of the others in their folder, and
without any, to whichever is resumed, unless some rank has a checkpoint with an id.

Each of our checkpoints is complete in every folder: weights, the optimizer of all ranks, the place in the data. So
the ranks use the newest step of their training that any of them has complete, and those without it get the files,
with the list that makes them count, from one that has it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.kit.common import BadCheckpoint, UserError, disk_cause, writable_folder
from nanochat.parallel.comm import Comm
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run.checkpoint_manager import FileEntry, NewFile

CHUNK_BYTES = 16 * 2**20
FILE = "training.json"
RESUMED, BASE = "id", "base"  # its keys for the training to resume, and for that of its base model
META_KEY = "training"
UNSAID = ""
# The steps in one rank's folder, by training id.
Steps = Mapping[str, Sequence[int]]


# -- the training


def is_id(value: object) -> bool:
    """Whether this is the id of a training."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def named_training(folder: Path, key: str = RESUMED) -> str:
    """The id that training.json in the run folder has under this key."""
    kept = run_file(folder).get(key)
    return str(kept) if is_id(kept) else UNSAID


def run_file(folder: Path) -> Mapping[str, object]:
    """The content of training.json in the run folder; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / FILE).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def choose(asked: Sequence[str], held: Sequence[Steps]) -> str:
    """The id of the training to resume, from each rank's training.json and checkpoints; UNSAID if no checkpoint has one."""
    named = sorted(set(asked) - {UNSAID})
    if len(named) > 1:
        shown = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(asked) if name)
        raise UserError(f"{FILE} differs: it names {shown}; name the same on all ranks.", Cause.SETTINGS_DIFFER)
    found = sorted({name for steps in held for name in steps} - {UNSAID})
    if named and (named[0] in found or not found):
        return named[0]
    if not named and len(found) < 2:
        return found[0] if found else UNSAID
    said = f"{FILE} names {named[0]}, but " if named else ""
    shown = " and ".join(_where(name, held) for name in found)
    raise BadCheckpoint(
        f"{said}the checkpoints belong to {shown}; move them away, or name the right one in {FILE} in the run folder of each rank, "
        f'as "{RESUMED}" to resume it, or as "{BASE}" of a base model (the others are then kept in a folder beside them).'
    )


def _where(name: str, held: Sequence[Steps]) -> str:
    ranks = [rank for rank, steps in enumerate(held) if name in steps]
    newest = max(step for rank in ranks for step in held[rank][name])
    return f"{name} (to step {newest}, on rank {', '.join(map(str, ranks))})"


def steps_of(training: str, mine: Steps, held: Sequence[Steps]) -> list[int]:
    """Sorted steps of a training in a rank's folder."""
    if training in mine or not (mine.keys() - {UNSAID} or any(training in steps for steps in held)):
        return sorted({*mine.get(training, ()), *mine.get(UNSAID, ())})
    return []


def training_of(folder: Path, step: int) -> str:
    """The training id of a step, from its meta file."""
    with contextlib.suppress(*checkpoints.NOT_OURS):
        known = json.loads((folder / checkpoints.meta_name(step)).read_bytes()).get(META_KEY)
        if is_id(known):
            return str(known)
    return UNSAID


# -- the checkpoint


def folder_leader(comm: Comm, folder: Path) -> int:
    """The lowest of the ranks that share this rank's checkpoint folder: it writes for all of them."""
    writable_folder(folder, "checkpoints")
    mine = f".rank{comm.rank}-{secrets.token_hex(8)}"
    (folder / mine).touch()
    try:
        names = comm.exchange("the checkpoint folders", mine)
        sharing = [rank for rank, name in enumerate(names) if (folder / name).exists()]
        comm.exchange("the checkpoint folders, seen", None)
    finally:
        (folder / mine).unlink(missing_ok=True)
    return min(sharing)


class Obtained(NamedTuple):
    """The id of the training to resume; its step whose files are now in this rank's folder, if any, and the rank whose files to read."""

    training: str
    step: int | None = None
    files: int = -1


def obtain(comm: Comm, journal: Journal, folder: Path, leader: int, wanted: int = -1, key: str = RESUMED) -> Obtained:
    """Find the checkpoint to continue from, and bring it into every folder. wanted: its step; -1: the newest.

    Steps of other trainings are set aside; in another run's folder only one of the same number, which would be overwritten.
    """
    training, steps = find_training(comm, folder, named_training(journal.folder, key))
    found = choose_step(comm, journal, folder, wanted, steps)
    others = set(checkpoints.steps_in(folder)) - set(steps[comm.rank])
    if key != RESUMED:
        others &= {found[0]} if found else set()
    if leader == comm.rank:
        checkpoints.set_aside(folder, others, journal.say)
    if found is None:
        return Obtained(training)
    return Obtained(training, found[0], fetch(comm, folder, *found, leader))


def find_training(comm: Comm, folder: Path, wanted: str) -> tuple[str, list[list[int]]]:
    """The training that all ranks resume (UNSAID: no checkpoint has an id): the requested one, or the one their checkpoints
    belong to; and its steps in each rank's folder."""
    mine: dict[str, list[int]] = {}
    for step in checkpoints.steps_in(folder):
        mine.setdefault(training_of(folder, step), []).append(step)
    from_ranks = comm.exchange("the trainings of all checkpoints", [wanted, mine])
    held = [steps for dummy, steps in from_ranks]
    chosen = choose([name for name, dummy in from_ranks], held)
    return chosen, [steps_of(chosen, one, held) for one in held]


def name_training(comm: Comm, known: str) -> str:
    """The known training id, or a new one for all ranks."""
    from_ranks = comm.exchange("the id of this training", [known, secrets.token_hex(8)])
    return choose([name for name, dummy in from_ranks], []) or str(from_ranks[0][1])


def choose_step(
    comm: Comm, journal: Journal, folder: Path, wanted: int, held: Sequence[Sequence[int]]
) -> tuple[int, int | None] | None:
    """The step to resume from, and the rank whose files complete it in this rank's folder (None: it is not here): the requested one,
    or (-1) the newest of the training that any rank has complete; None if there is none. held: the training's steps in each rank's
    folder."""
    mine, damaged = held[comm.rank], list[int]()
    for step in [wanted] if wanted >= 0 else sorted({one for steps in held for one in steps}, reverse=True):
        writer = checkpoints.writer_of(folder, step) if step in mine else None
        # A list without its files was complete once; files without a list are left by a killed process.
        once = step in mine and any(folder.glob(f"ckpt_{step:06d}_rank*.json"))
        answers = comm.exchange(f"whether step {step} is whole", [writer is not None, once], patient=True)
        if any(whole for whole, dummy in answers):
            if damaged:
                newer = ", ".join(map(str, damaged))
                journal.note(
                    f"The checkpoint of step {newer} is damaged on every rank, so the older one of step {step} is used"
                )
            return step, writer
        if any(once for dummy, once in answers):
            damaged.append(step)
    if wanted >= 0:
        raise BadCheckpoint(
            f"--resume-from-step {wanted}: no rank has a complete checkpoint of that step in {folder}; "
            f"there are files of steps {', '.join(map(str, mine)) or 'none'}."
        )
    if damaged:
        raise BadCheckpoint(
            f"no rank has a complete checkpoint in {folder} (damaged: {', '.join(map(str, damaged))}); "
            "move them away to start from scratch."
        )
    return None


def fetch(comm: Comm, folder: Path, step: int, writer: int | None, leader: int) -> int:
    """Send a step's files to the folders that lack them; returns whose files to read. writer: whose files complete it here.

    Two parts of a split run may both have made this step with different weights (the first file); then all take those of one.
    """
    mine = [writer, _held(folder, step, writer)] if leader == comm.rank else None
    from_ranks = comm.exchange(f"who has step {step}", mine, patient=True)
    holders = [rank for rank, held in enumerate(from_ranks) if held and held[0] is not None]
    if not holders:
        raise BadCheckpoint(f"no rank has a complete step {step} any more; start again.")
    source, (theirs, listed_files) = holders[0], from_ranks[holders[0]]
    files = [FileEntry(*file) for file in listed_files]
    if wrong := [file.name for file in files if checkpoints.step_of(file.name) != step]:
        raise UserError(
            f"rank {source} would send {wrong[0]!a} as a file of step {step}; check that host.", blames=[source]
        )
    lacking = [rank for rank, held in enumerate(from_ranks) if held and held[1][:1] != listed_files[:1]]
    try:
        if lacking:
            _take_files(comm, folder, source, files, comm.rank in lacking)
    except OSError as error:
        raise UserError(
            f"step {step} ({sum(file.bytes for file in files) / 1e6:.0f} MB) cannot be copied from rank {source} to "
            f"{folder}: {error.strerror or error}; make room or put that disk right, then resume.",
            disk_cause(error),
        ) from None
    if lacking:
        comm.barrier(f"the arrival of step {step}")
    return theirs if writer is None or leader in lacking else writer


def _take_files(comm: Comm, folder: Path, source: int, files: Sequence[FileEntry], lacks: bool) -> None:
    """Copy a step's files from one rank to those that lack them; remains of a failed copy are removed."""
    received: list[NewFile] = []
    try:
        if lacks:
            checkpoints.check_space(folder, sum(file.bytes for file in files))
        for file in files:
            if lacks:
                received.append(NewFile(folder, file.name, comm.rank))
            ours: contextlib.AbstractContextManager[io.BufferedReader | None] = contextlib.nullcontext()
            if comm.rank == source:
                ours = (folder / file.name).open("rb")
            with ours as sent:
                for begin in range(0, file.bytes, CHUNK_BYTES):
                    chunk = torch.empty(min(CHUNK_BYTES, file.bytes - begin), dtype=torch.uint8)
                    if sent is not None:
                        sent.readinto(chunk.numpy().data)
                    comm.broadcast(chunk, source, "the files of a checkpoint")
                    if lacks:
                        received[-1].write(chunk.numpy())
            if lacks:
                received[-1].finish(file.sha256)
    except BaseException:
        for one in received:
            one.discard()
        raise


def _held(folder: Path, step: int, writer: int | None) -> list[FileEntry]:
    """The step's files in this folder; of upstream's, also the other ranks' optimizer files."""
    if writer is None:
        return []
    if entries := checkpoints.listed_files(folder, step, writer):
        # The files were verified against this list when the step was chosen; do not read large ones again.
        return [*entries, checkpoints.entry_of(folder / checkpoints.list_name(step, writer))]
    optimizers = [checkpoints.optimizer_name(step, rank) for rank in checkpoints.optimizer_ranks(folder, step)]
    sound = [name for name in optimizers if checkpoints.is_sound(folder / name, deep=True)]
    return [
        checkpoints.entry_of(folder / name)
        for name in (checkpoints.model_name(step), checkpoints.meta_name(step), *sound)
    ]
