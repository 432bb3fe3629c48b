# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which training a checkpoint is of. A training is what begins at step 0, and all that goes on from there, on any host. No torch here.

Each has an id, which stands in every checkpoint's meta file. NANOCHAT_TRAINING names the one to go on with. Without it the
ranks take the one that all their checkpoints are of, and refuse to choose between two. Checkpoints of other programs have
no id: they are of the training of the others in their folder, and where those have none either, of whichever goes on,
as long as no rank has a checkpoint that says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanochat.causes import Cause
from nanochat.common import BadCheckpoint, UserError
from nanochat.expected import count, listed, matching, named, row

TRAINING, BASE_TRAINING = "NANOCHAT_TRAINING", "NANOCHAT_BASE_TRAINING"
META_KEY = "training"
UNSAID = ""
# The steps in one rank's folder, by the id of their training.
Steps = Mapping[str, Sequence[int]]

is_id, is_id_or_unsaid = matching("[0-9a-f]{16}"), matching("([0-9a-f]{16})?")
fits_named = row(is_id_or_unsaid, is_id)
fits_told = row(is_id_or_unsaid, lambda told: named(listed(count()))(told) and all(map(is_id_or_unsaid, told)))


def wanted(variable: str, environ: Mapping[str, str]) -> str:
    """The id that the environment names."""
    found = environ.get(variable, UNSAID)
    if not is_id_or_unsaid(found):
        raise UserError(f"{variable} is {found!r}, which is no id of a training: 16 of the characters 0-9 and a-f.")
    return found


def id_of(meta: Mapping[str, object]) -> str:
    """The id that a meta file tells."""
    told = meta.get(META_KEY)
    return told if isinstance(told, str) and is_id(told) else UNSAID


def choose(asked: Sequence[str], held: Sequence[Steps], variable: str = TRAINING) -> str:
    """The id of the training to go on with, from what each rank was told and what it has; UNSAID where no checkpoint says."""
    if len(set(asked)) > 1:
        told = ", ".join(f"{name or 'not set'} on rank {rank}" for rank, name in enumerate(asked))
        raise UserError(f"{variable} differs: {told}; start all ranks with the same.", Cause.SETTINGS_DIFFER)
    if asked[0]:
        return asked[0]
    found = sorted({name for steps in held for name in steps} - {UNSAID})
    if len(found) > 1:
        told = " and ".join(_where(name, held) for name in found)
        raise BadCheckpoint(
            f"the checkpoints are of {len(found)} trainings: {told}; set {variable} to the one to go on with, on all ranks "
            "(the other's checkpoints are kept in a folder beside it)."
        )
    return found[0] if found else UNSAID


def _where(name: str, held: Sequence[Steps]) -> str:
    ranks = [rank for rank, steps in enumerate(held) if name in steps]
    newest = max(step for rank in ranks for step in held[rank][name])
    return f"{name} (to step {newest}, on rank {', '.join(map(str, ranks))})"


def steps_of(training: str, mine: Steps, held: Sequence[Steps]) -> list[int]:
    """The steps in a rank's folder that are of a training, in order."""
    says = mine.keys() - {UNSAID}
    if training in says or (not says and not any(training in steps for steps in held if training)):
        return sorted({*mine.get(training, ()), *mine.get(UNSAID, ())})
    return []
