# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the checkpoint to resume from, by all ranks together, without shared storage.

Each of our checkpoints is complete in every folder: weights, the optimizer and loaders of all ranks. So
the ranks use the newest step of their training (lineage.py) that any of them has complete, and those without it get the files,
with the list that makes them count, from one that has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanochat.kit.common import BadCheckpoint, UserError, disk_cause, writable_folder
from nanochat.kit.expected import (
    Fits,
    anything,
    count,
    flag,
    listed,
    matching,
    maybe,
    named,
    nothing,
    one_of,
    row,
    text,
)
from nanochat.parallel.comm import CHUNK_BYTES, Comm
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run import lineage
from nanochat.run.checkpoint_manager import FileEntry, NewFile

Json = dict[str, Any]
# Limits of the tensors in a data position, and of the tokens waiting there.
DTYPES = {str(dtype): dtype for dtype in (torch.int32, torch.int64)}
MOST_WAITING = 2**28
NUMBERS = (count(),) * 4
AHEAD_AND_THEN = listed(row(*NUMBERS)), maybe(named(count(least=-1), ("pq_idx", "rg_idx", "epoch")))
# The plain values of a data position, different in each stage; a cursor has more after ranks have come or gone.
PLACE: dict[str, Fits] = {
    "rank": count(),
    "world": count(),
    "of": count(least=-1),
    "route": text,
    "files": listed(text),
    "digests": listed(text),
    "cursor": lambda value: row(*NUMBERS)(value) or row(*NUMBERS, *AHEAD_AND_THEN)(value),
}


def is_place(state: Any) -> bool:
    """The plain values of a data position."""
    return named(anything)(state) and all(key in PLACE and PLACE[key](value) for key, value in state.items())


def folder_leader(comm: Comm, folder: Path) -> int:
    """The lowest of the ranks that share this rank's checkpoint folder: it writes for all of them."""
    writable_folder(folder, "checkpoints")
    mine = f".rank{comm.rank}-{secrets.token_hex(8)}"
    (folder / mine).touch()
    try:
        names = comm.exchange("the checkpoint folders", mine, fits=matching(r"\.rank\d+-[0-9a-f]{16}"))
        # The number in it keeps a rank from using another's mark.
        own = [rank for rank, name in enumerate(names) if name.startswith(f".rank{rank}-")]
        sharing = [rank for rank in own if (folder / names[rank]).exists()]
        comm.exchange("the checkpoint folders, seen", None, fits=nothing)
    finally:
        (folder / mine).unlink(missing_ok=True)
    return min(sharing)


class ChosenStep(NamedTuple):
    """A checkpoint to resume from, and the rank whose files complete it in this rank's folder (None: it is not here).

    damaged: newer steps that were complete once.
    """

    step: int
    writer: int | None
    damaged: Sequence[int] = ()

    @property
    def notice(self) -> str:
        """The message that an older step than the newest is used; empty otherwise."""
        if not self.damaged:
            return ""
        newer = ", ".join(map(str, self.damaged))
        return f"The checkpoint of step {newer} is damaged on every rank, so the older one of step {self.step} is used"


class ResumedTraining(NamedTuple):
    """The training that the ranks resume (UNSAID: no checkpoint has an id), and its steps in this rank's folder."""

    id: str
    steps: list[int]


class Obtained(NamedTuple):
    """The training to resume; its step whose files are now in this rank's folder, if any, and the rank whose files to read."""

    training: ResumedTraining
    step: int | None = None
    files: int = -1
    notice: str = ""  # that an older step than the newest is used


def obtain(
    comm: Comm,
    folder: Path,
    leader: int,
    wanted: str,
    step: int = -1,
    variable: str = lineage.TRAINING,
    say: Callable[[str], None] = lambda text: None,
) -> Obtained:
    """Find the checkpoint to continue from, and bring it into every folder. wanted: the training's id, if known.

    Steps of other trainings are set aside; in another run's folder only one of the same number, which would be overwritten.
    """
    training = find_training(comm, folder, wanted, variable)
    found = choose_step(comm, folder, step, training)
    others = set(checkpoints.steps_in(folder)) - set(training.steps)
    if variable != lineage.TRAINING:
        others &= {found.step} if found else set()
    if leader == comm.rank:
        set_aside(folder, others, say)
    if found is None:
        return Obtained(training)
    return Obtained(training, found.step, fetch(comm, folder, found, leader), found.notice)


def set_aside(folder: Path, steps: set[int], say: Callable[[str], None]) -> None:
    """Move steps out of this folder: they belong to another training, or will be repeated, and a reader that takes
    the highest step would take one of them."""
    if place := checkpoints.set_aside(folder, steps):
        say(f"Checkpoints of an earlier run (steps {', '.join(map(str, sorted(steps)))}) are now in {place}")


def find_training(comm: Comm, folder: Path, wanted: str, variable: str = lineage.TRAINING) -> ResumedTraining:
    """The training that all ranks resume: the requested one, or the one their checkpoints belong to."""
    mine: dict[str, list[int]] = {}
    here = checkpoints.steps_in(folder)
    for step in here:
        mine.setdefault(checkpoints.training_of(folder, step), []).append(step)
    from_ranks = comm.exchange("the trainings of all checkpoints", [wanted, mine], fits=lineage.fits_wanted_and_held)
    held = [steps for dummy, steps in from_ranks]
    chosen = lineage.choose([name for name, dummy in from_ranks], held, variable)
    parts = [step for step in here if not (folder / checkpoints.meta_name(step)).exists()]
    return ResumedTraining(chosen, lineage.steps_of(chosen, mine, held, parts))


def name_training(comm: Comm, known: str) -> str:
    """The known training id, or a new one for all ranks."""
    from_ranks = comm.exchange("the id of this training", [known, secrets.token_hex(8)], fits=lineage.fits_named)
    return lineage.choose([name for name, dummy in from_ranks], []) or str(from_ranks[0][1])


def choose_step(comm: Comm, folder: Path, wanted: int, training: ResumedTraining) -> ChosenStep | None:
    """The step to resume from: the requested one, or (-1) the newest of the training that any rank has complete; None if
    there is none."""
    mine = training.steps
    steps = [wanted] if wanted >= 0 else mine
    from_ranks = comm.exchange("the steps of all checkpoints", steps, fits=listed(count()))
    damaged: list[int] = []
    for step in sorted({step for steps in from_ranks for step in steps}, reverse=True):
        writer = checkpoints.writer_of(folder, step) if step in mine else None
        # A list without its files was complete once; files without a list are left by a killed process.
        once = step in mine and any(folder.glob(f"ckpt_{step:06d}_rank*.json"))
        what, answer = f"whether step {step} is whole", [writer is not None, once]
        answers = comm.exchange(what, answer, patient=True, fits=row(flag, flag))
        if any(whole for whole, dummy in answers):
            return ChosenStep(step, writer, tuple(damaged))
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


class StepFiles(NamedTuple):
    """A folder's files of a step. writer: the rank whose files are complete here, if any; ours: this trainer wrote them."""

    writer: int | None
    ours: bool
    files: list[FileEntry]


def _files_of(step: int) -> Fits:
    """The files of one step and no others: files of these names are written here."""
    parts = row(maybe(count(999_999)), flag, listed(row(text, count(), matching("[0-9a-f]{64}"))))
    optimizer = matching(rf"optim_{step:06d}_rank(0|[1-9]\d{{0,5}})\.pt")
    weights = [checkpoints.model_name(step), checkpoints.meta_name(step)]

    def fits(value: Any) -> bool:
        if not parts(value):
            return False
        writer, ours, files = value
        names = [name for name, *dummy in files]
        if ours:
            return writer is not None and names == checkpoints.files_of(step, writer)
        whole = writer is None or names[:2] == weights
        return whole and len(set(names)) == len(names) and all(name in weights or optimizer(name) for name in names)

    return fits


def fetch(comm: Comm, folder: Path, found: ChosenStep, leader: int) -> int:
    """Send a step's files to the folders that lack them; returns whose files to read."""
    mine = _held(folder, found) if leader == comm.rank else None
    what, fits = f"who has step {found.step}", maybe(_files_of(found.step))
    from_ranks = [
        held and StepFiles(held[0], held[1], [FileEntry(*file) for file in held[2]])
        for held in comm.exchange(what, mine, patient=True, fits=fits)
    ]
    writers = {rank: held.writer for rank, held in enumerate(from_ranks) if held and held.writer is not None}
    if not writers:
        raise BadCheckpoint(f"no rank has a complete step {found.step} any more; start again.")
    source, writer = next(iter(writers.items()))
    wanted = _wanted(from_ranks, source)
    lacking = {rank: _lacking(held, from_ranks[source], wanted) for rank, held in enumerate(from_ranks) if held}
    try:
        _take_files(comm, folder, wanted, lacking)
    except OSError as error:
        size = sum(file.bytes for dummy, file in wanted.values())
        raise UserError(
            f"step {found.step} ({size / 1e6:.0f} MB) cannot be copied from rank {source} to {folder}: "
            f"{error.strerror or error}; make room or put that disk right, then resume.",
            disk_cause(error),
        ) from None
    if any(lacking.values()):
        comm.barrier(f"the arrival of step {found.step}")
    return writer if found.writer is None or lacking[leader] else found.writer


def _wanted(from_ranks: list[Any], source: int) -> dict[str, tuple[int, FileEntry]]:
    """Each file by name, with a rank that has it. Upstream's optimizer has a file per rank, possibly in separate folders; all
    are wanted."""
    wanted = {file.name: (source, file) for file in from_ranks[source].files}
    for rank, held in enumerate(from_ranks):
        for file in held.files if held and not from_ranks[source].ours else ():
            if file.name.startswith("optim_"):
                wanted.setdefault(file.name, (rank, file))
    return wanted


def _lacking(held: StepFiles, source: StepFiles, wanted: Mapping[str, Any]) -> set[str]:
    """Names of the files to send to a folder. Two parts of a split run may both have made this step with different weights
    (the first file); then all take the source's."""
    if source.ours:
        return set() if held.writer is not None and held.files[0] == source.files[0] else set(wanted)
    return wanted.keys() - {file.name for file in held.files}


def _take_files(
    comm: Comm, folder: Path, wanted: Mapping[str, tuple[int, FileEntry]], lacking: Mapping[int, set[str]]
) -> None:
    """Copy files of a step from ranks that have them to those that lack them; remains of a failed copy are removed."""
    mine, missing = lacking.get(comm.rank, set()), set().union(*lacking.values())
    received: list[NewFile] = []
    try:
        if mine:
            checkpoints.check_space(folder, sum(wanted[name][1].bytes for name in mine))
        for name, (rank, file) in wanted.items():
            if name in mine:
                received.append(NewFile(folder, name, comm.rank))
            if name in missing:
                sink = received[-1].write if name in mine else lambda data: None
                _carry(comm, folder / name if comm.rank == rank else None, file.bytes, rank, sink)
            if name in mine:
                received[-1].finish(file.sha256)
    except BaseException:
        for one in received:
            one.discard()
        raise


def _held(folder: Path, found: ChosenStep) -> StepFiles:
    step, writer = found.step, found.writer
    if writer is not None and (entries := checkpoints.listed_files(folder, step, writer)):
        # The files were verified against this list when the step was chosen; do not read large ones again.
        known = {
            file.name: file for file in [*entries, checkpoints.entry_of(folder / checkpoints.list_name(step, writer))]
        }
        return StepFiles(writer, True, [known[name] for name in checkpoints.files_of(step, writer)])
    names = [checkpoints.model_name(step), checkpoints.meta_name(step)] if writer is not None else []
    for rank in checkpoints.optimizer_ranks(folder, step):
        name = checkpoints.optimizer_name(step, rank)
        if not (folder / checkpoints.list_name(step, rank)).exists() and checkpoints.is_sound(folder / name, deep=True):
            names.append(name)
    return StepFiles(writer, False, [checkpoints.entry_of(folder / name) for name in names])


def _carry(comm: Comm, path: Path | None, size: int, source: int, sink: Callable[[Any], Any]) -> None:
    """Copy one file from the source's disk to the receivers, in chunks."""
    what = "the files of a checkpoint"
    if path is None:
        comm.broadcast_bytes(None, size, source, sink, what)
        return
    with path.open("rb") as file:
        for begin in range(0, size, CHUNK_BYTES):
            piece = file.read(min(CHUNK_BYTES, size - begin))
            comm.broadcast_bytes(piece, len(piece), source, sink, what)


def gather_states(comm: Comm, state: Json) -> list[Json]:
    """Every rank's loader state: plain values through the store, tensors by broadcast."""
    plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    shapes = {key: [str(v.dtype), list(v.shape)] for key, v in state.items() if isinstance(v, torch.Tensor)}
    gathered: list[Json] = []
    what, fits = "the places in the data", row(is_place, named(row(one_of(DTYPES), row(count(MOST_WAITING)))))
    for rank, (values, tensors) in enumerate(comm.exchange(what, [plain, shapes], patient=True, fits=fits)):
        one = dict(values)
        for key, (dtype, shape) in tensors.items():
            mine = state[key] if rank == comm.rank else torch.empty(shape, dtype=DTYPES[dtype])
            comm.broadcast(mine, rank, what)
            one[key] = mine
        gathered.append(one)
    return gathered
