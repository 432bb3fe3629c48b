# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which training a checkpoint belongs to: everything from step 0 on, wherever it was resumed. Without torch.

Each has an id, stored in every checkpoint's meta file. The one to resume is in training.json in the run folder. Without it, the ranks
resume the one that all their checkpoints share, and refuse to choose between two. Checkpoints of other programs have no id: they
belong to the training of the others in their folder, and without any, to whichever is resumed, unless some rank has a checkpoint with
an id.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanochat.kit.common import BadCheckpoint, UserError
from nanochat.rules.causes import Cause

FILE = "training.json"
RESUMED, BASE = "id", "base"  # its keys for the training to resume, and for that of its base model
META_KEY = "training"
UNSAID = ""
# The steps in one rank's folder, by training id.
Steps = Mapping[str, Sequence[int]]


def is_id(value: object) -> bool:
    """Whether this is the id of a training."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def wanted(folder: Path, key: str = RESUMED) -> str:
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
