# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint of all ranks: verified, assembled, written; older ones are removed once it is proven sound.

After every step all ranks hold the same weights and AdamW states, so where a rank is lost, each of the others saves them alone; an
interrupted update is taken back first. A rank has only its own share of Muon's momentum. Those who resume combine what they have
(restore.py); the momentum of a matrix that only a lost rank had restarts from zero.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.model import numerics
from nanochat.parallel.agreement import compare_weights
from nanochat.parallel.comm import Comm
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.run import checkpoint_manager
from nanochat.run.checkpoint_manager import FEEDBACK_KEY, NotSaved
from nanochat.run.optim_file import SHARE, OptimizerLayout
from nanochat.run.restore import feedback_of
from nanochat.run.state import Run


def checkpoint(run: Run) -> dict[str, Any]:
    """The content for checkpoint_manager.save in this rank's folder; every rank must call it together."""
    optimizer = run.sync.whole_state()
    # Each rank resumes with the same matrix library.
    routes = run.comm.exchange("the matrix libraries of all ranks", numerics.route(), patient=True)
    values = run.sync.feedback
    feedback = {FEEDBACK_KEY: {"of": feedback_of(run), "values": values}} if values else {}
    if run.writer != run.comm.rank:
        # The rank that writes for our folder writes everything else.
        return {"optimizer": feedback}
    return whole_contents(run, {**OptimizerLayout(run.optimizer).file(optimizer), **feedback}, routes)


def whole_contents(run: Run, optimizer: Mapping[str, object], routes: Sequence[str]) -> dict[str, Any]:
    """With the place in the data after the last finished step, and each rank's matrix library."""
    state = run.feed.state()
    loader = {"ranks": [{**state, "route": route} for route in routes]}
    return {"optimizer": optimizer, "loader": loader, "model": run.weights, "meta": run.meta()}


def prove_identical(run: Run, when: str) -> None:
    """Compare all ranks' weights; a difference ends the run."""
    run.make_whole()
    digest, difference = compare_weights(run.comm, run.weights, when)
    run.journal.record("digest", run.progress.step, digest=digest, identical=difference is None)
    if difference is not None:
        raise difference


def save(run: Run, final: bool) -> None:
    """A checkpoint, after verifying that all ranks hold the same; only the last one must succeed."""
    begun = time.perf_counter()
    run.comm.enter("save", run.progress.step)
    prove_identical(run, f"at step {run.progress.step}")
    contents = checkpoint(run)
    run.saved_at = time.monotonic()
    error = write(run.comm, run.journal, run.checkpoints, run.progress.step, contents)
    if error:
        removed = checkpoint_manager.prune(run.checkpoints, min(1, run.settings.keep_checkpoints), run.saved)
        if any(run.comm.exchange("what was removed for the checkpoint", removed)):
            run.journal.say(f"warning: {error} Deleting all checkpoints before the last good one to make room.")
            error = write(run.comm, run.journal, run.checkpoints, run.progress.step, contents)
    if error and final:
        raise error
    if error:
        saved = run.saved
        last = f"the checkpoint of step {saved[-1]} is still intact" if saved else "there is no checkpoint yet"
        run.journal.say(f"warning: {error} Training continues; {last}.")
        return
    run.saved = [*run.saved, run.progress.step]
    run.journal.say(f"Saved checkpoint of step {run.progress.step} to {run.checkpoints}")
    # Older ones stay until a step has shown that these weights are sound.
    run.unproven = run.progress.step
    run.journal.heartbeat.save_seconds = time.perf_counter() - begun
    run.took("save", begun)


def write(comm: Comm, journal: Journal, folder: Path, step: int, contents: Mapping[str, Any]) -> NotSaved | None:
    """Every rank writes its part of a checkpoint; returns the first error."""
    failed = None
    try:
        saved = checkpoint_manager.save(folder, step, comm.rank, **contents)
        journal.record("checkpoint", step, **saved)
    except NotSaved as failure:
        failed = [str(failure), failure.cause.value]
    from_ranks = comm.exchange("the checkpoint", failed, patient=True)
    return next((NotSaved(one[0], Cause(one[1]), [rank]) for rank, one in enumerate(from_ranks) if one), None)


# -- without a lost rank (--save-on-loss)


def save_alone(run: Run) -> str | None:
    """Save the last finished step without the other ranks; returns the message, None if nothing was lost."""
    step = run.progress.step
    if step == max(run.progress.resumed_from or 0, *run.saved, 0):
        return None
    if run.sync.head is not None:
        return f"step {step} is not saved: the head is split, and a part of it was lost with the rank."
    if run.sync.changing and run.optimizer.undo is None:
        return f"step {step} is not saved: its successor had begun to change the weights when a rank was lost."
    run.comm.enter("save", step)
    if run.sync.changing:
        run.optimizer.take_back()
    if checkpoint_manager.is_whole(run.checkpoints, step, run.comm.rank, deep=False):
        # Lost during a save, after this rank's part of it.
        return None
    run.optimizer.catch_up()
    state = run.optimizer.state_dict()
    owners, rank = run.sync.owners, run.comm.rank
    # A rank's copies of other matrices are as old as its last start.
    state["muon"] = {name: one for name, one in state["muon"].items() if owners.get(name, rank) == rank}
    file = OptimizerLayout(run.optimizer).file({**state, SHARE: sorted(state["muon"])})
    contents = whole_contents(run, file, [numerics.route()] * run.comm.world)
    try:
        saved = checkpoint_manager.save(run.checkpoints, step, rank, **contents)
    except NotSaved as error:
        return str(error)
    # A run that often loses ranks has no other time to do this.
    checkpoint_manager.prune(run.checkpoints, run.settings.keep_checkpoints, run.saved)
    run.journal.record("checkpoint", step, **saved, alone=True)
    return f"saved step {step} to {run.checkpoints} without the lost rank."
