# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prepares a node's run folder: creates it, writes its plan, and sets an earlier run's outputs aside."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from typing import Dict, Iterator, List, NamedTuple, Optional

from .._contract import document, lineage
from .._contract.document import Document
from .._contract.lineage import Launched, training_of
from .._contract.run_folder import (
    APART,
    CHECKPOINTS,
    KEEPER_FOLDER,
    KEEPER_PROGRAM,
    KEEPER_SETTINGS,
    MEMBERS,
    PLAN,
    PREVIOUS,
    SESSION,
    TRAINING_FILE,
    checkpoint_steps,
    generations,
)
from .._kit.files import read_object, write_json, write_json_when_full, write_whole
from .._kit.ownership import exposure_of_run

# A run's outputs; all of them move when a run starts from scratch.
OUTPUTS = (*CHECKPOINTS, APART, "report", "log", SESSION)
# Error in a measured clock difference, in seconds, from the time that a module takes to reach its host.
CLOCK_NOISE = 5
OUTPUT_PREFIXES = ("metrics-rank", "heartbeat-rank", MEMBERS)


class RunFolderError(Exception):
    """The folder could not be prepared; the text is for the user."""


@contextlib.contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Add the system's reason to a failure that is for the user."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{failure}: {error.strerror}.") from error


def outputs(run_dir: str) -> List[str]:
    """Sorted names of an earlier run's outputs."""
    with _explained(f"The run folder {run_dir} cannot be read"), contextlib.suppress(FileNotFoundError):
        names = os.listdir(run_dir)
        written = [name for name in names if name in OUTPUTS or name.startswith(OUTPUT_PREFIXES)]
        paths = {name: os.path.join(run_dir, name) for name in sorted(written)}
        # An empty folder is none.
        found = [
            name for name, path in paths.items() if os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)
        ]
        # It moves with the outputs that it describes.
        return [*found, TRAINING_FILE] if found and TRAINING_FILE in names else found
    return []


def next_place(run_dir: str) -> str:
    """Next generation's folder; never overwrites an earlier one."""
    return os.path.join(run_dir, PREVIOUS, str(max(generations(run_dir), default=0) + 1))


def set_aside(run_dir: str, names: List[str], deployed: Document) -> str:
    """Move outputs and their plan into a new folder, which is returned.

    If interrupted, the rest goes to the next number; nothing is lost.
    """
    place = next_place(run_dir)
    with _explained(f"The earlier outputs in {run_dir} could not be moved to {place}"):
        os.makedirs(place)
        if deployed:
            write_whole(os.path.join(place, PLAN), plan_text(deployed))
        for name in names:
            os.rename(os.path.join(run_dir, name), os.path.join(place, name))
    return place


def plan_text(plan: Document) -> str:
    return json.dumps(plan, indent=1, sort_keys=True) + "\n"


def write_plan(run_dir: str, plan: Document) -> None:
    """Create the folder and write the plan atomically."""
    with _explained(f"The plan could not be written to {run_dir}"):
        os.makedirs(os.path.join(run_dir, "log"), exist_ok=True)
        write_whole(os.path.join(run_dir, PLAN), plan_text(plan))


def refuse_loss(run_dir: str, deployed: Document, plan: Document) -> bool:
    """Refuse to start from step 0 beside checkpoints of another plan."""
    found = lineage.differences(deployed, plan)
    steps = checkpoint_steps(run_dir)
    if found and steps:
        raise RunFolderError(
            f"{run_dir} has checkpoints up to step {max(steps)} that training cannot resume from: {', '.join(found)}. "
            "Undo the change to resume, give the new training another name (ddp_run), or set aside the old one with "
            "ddp_fresh=true."
        )
    # Without --resume the trainer would overwrite the checkpoints.
    starts_over = bool(document.items(plan, "nodes")) and not lineage.resumes(plan)
    return bool(found) or (bool(steps) and starts_over)


def is_of_another(run_dir: str, training: Optional[Launched]) -> bool:
    """Whether the folder holds a different training from the one being started."""
    if training is None:
        return False
    here = training_of(read_object(os.path.join(run_dir, TRAINING_FILE)))
    found = here["id"] if here else ""
    return found not in (training["id"], training["goes_on"])


def make_ready(
    run_dir: str, plan: Document, fresh: bool, dry: bool, training: Optional[Launched] = None
) -> Dict[str, object]:
    """Create the folder and check what `prepare` would refuse, without changing anything: a run may still use it."""
    if not fresh and not is_of_another(run_dir, training):
        refuse_loss(run_dir, read_object(os.path.join(run_dir, PLAN)), plan)
    there, exposed = os.path.isdir(run_dir), exposure_of_run(run_dir)
    if exposed:
        raise RunFolderError(f"The run folder {run_dir} is refused: {exposed}.")
    with _explained(f"The run folder {run_dir} cannot be created or written"):
        if not dry:
            os.makedirs(run_dir, exist_ok=True)
        if there and not os.access(run_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "this user cannot write there")
    return {"changed": not there}


class KeeperSetup(NamedTuple):
    """A keeper to install: its host, this start's secret, and its program."""

    host: str
    secret: str
    program: str


def write_keeper(run_dir: str, keeper: Optional[KeeperSetup]) -> None:
    """Write a keeper's program and settings for the next start; without one, remove the last."""
    folder = os.path.join(run_dir, KEEPER_FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    if keeper is None:
        return
    launch = hashlib.sha256(keeper.secret.encode()).hexdigest()[:16]
    settings = {"host": keeper.host, "secret": keeper.secret, "launch": launch}
    with _explained(f"The keeper could not be written to {folder}"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_whole(os.path.join(folder, KEEPER_PROGRAM), keeper.program, mode=0o600)
        write_json(os.path.join(folder, KEEPER_SETTINGS), settings, mode=0o600)


def write_training(run_dir: str, training: Optional[Launched], dry: bool) -> bool:
    """Record the folder's training; returns whether that changed."""
    if training is None:
        return False
    path = os.path.join(run_dir, TRAINING_FILE)
    record = {key: value for key, value in training.items() if key not in ("goes_on", "now") and value is not None}
    here = read_object(path)
    ends, now, before = training.get("ends"), training.get("now"), document.number(here, "ends")
    if ends:
        # From the controller's clock to this one; within noise it stays.
        end = ends if now is None else round(ends + time.time() - now)
        record["ends"] = before if abs(before - end) <= CLOCK_NOISE else end
    if record == here:
        return False
    if not dry:
        with _explained(f"{TRAINING_FILE} could not be written to {run_dir}"):
            write_json_when_full(path, record)
    return True


def prepare(
    run_dir: str,
    plan: Document,
    fresh: bool,
    dry: bool,
    keeper: Optional[KeeperSetup] = None,
    training: Optional[Launched] = None,
) -> Dict[str, object]:
    """Bring the folder in line with the plan, or predict that (`dry`)."""
    path = os.path.join(run_dir, PLAN)
    deployed = read_object(path)
    over = fresh or is_of_another(run_dir, training) or refuse_loss(run_dir, deployed, plan)
    aside = outputs(run_dir) if over else []
    steps = checkpoint_steps(run_dir) if aside else []
    rewrite = deployed != plan or not os.path.isdir(os.path.join(run_dir, "log"))
    place = next_place(run_dir) if aside else None
    if not dry:
        if aside:
            place = set_aside(run_dir, aside, deployed)
        if rewrite or aside:
            write_plan(run_dir, plan)
        write_keeper(run_dir, keeper)
    news = write_training(run_dir, training, dry)
    return {
        "changed": bool(rewrite or aside or keeper or news),
        "set_aside": aside,
        "place": place,
        "checkpoint": max(steps, default=None),
        "diff": {
            "before_header": path,
            "after_header": path,
            "before": plan_text(deployed) if deployed else "",
            "after": plan_text(plan),
        },
    }
