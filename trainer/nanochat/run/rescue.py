# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saving when another rank is lost, and resuming from that (--save-on-loss).

After every step all ranks hold the same weights and AdamW states, so a single rank can save them; an interrupted update is
taken back first. It has only its own share of Muon's momentum and knows only its
own position in the data. The remaining ranks combine what they saved. The momentum of a matrix that only a lost
rank had restarts from zero; the lost rank's position in the data follows from its position at the last save and the
steps since, by reading again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.kit.expected import listed, maybe, text
from nanochat.model import numerics
from nanochat.parallel.comm import Comm
from nanochat.rules.shares import stream_rows
from nanochat.run import checkpoint_manager
from nanochat.run.checkpoint_manager import NotSaved
from nanochat.run.optim_file import MUON, OptimizerLayout
from nanochat.run.resume import gather_states
from nanochat.run.stage import Reader, RunStage
from nanochat.run.state import Run

Json = dict[str, Any]
# Names of the matrices whose momentum is in an optimizer file with only one rank's share.
SHARE = "share"


# -- saving


def save_alone(run: Run) -> str | None:
    """Save the last finished step without the other ranks; returns the message, None if nothing was lost."""
    step, why = run.progress.step, unsavable(run)
    if step == max(run.progress.resumed_from or 0, *run.saved, 0):
        return None
    if why:
        return f"step {step} is not saved: {why}."
    run.comm.enter("save", step)
    if run.sync.changing:
        run.optimizer.take_back()
    if checkpoint_manager.is_whole(run.checkpoints, step, run.comm.rank, deep=False):
        # Lost during a save, after this rank's part of it.
        return None
    try:
        saved = checkpoint_manager.save(run.checkpoints, step, run.comm.rank, **finished(run))
    except NotSaved as error:
        return str(error)
    # A run that often loses ranks has no other time to do this.
    checkpoint_manager.prune(run.checkpoints, run.settings.keep_checkpoints, run.saved)
    run.journal.record("checkpoint", step, **saved._asdict(), alone=True)
    return f"saved step {step} to {run.checkpoints} without the lost rank."


def finished(run: Run) -> dict[str, Any]:
    """The last finished step, for checkpoint_manager.save."""
    run.optimizer.catch_up()
    layout, state = OptimizerLayout.of(run.optimizer, run.comm.world), run.optimizer.state_dict()
    owners, rank = run.sync.owners, run.comm.rank
    # A rank's copies of other matrices are as old as its last start.
    state["muon"] = {name: one for name, one in state["muon"].items() if owners.get(name, rank) == rank}
    return {
        "optimizer": layout.file({**state, SHARE: sorted(state["muon"])}, rank),
        "loader": loader_alone(run),
        "model": run.weights,
        "meta": run.meta(run.feed.finished_position()),
    }


def unsavable(run: Run) -> str | None:
    """Why this rank cannot save the last finished step alone, if it cannot."""
    if run.training.shared_head is not None:
        return "the head is split, and a part of it was lost with the rank"
    if run.sync.changing and run.optimizer.undo is None:
        return "its successor had begun to change the weights when a rank was lost"
    return None


def loader_alone(run: Run) -> Json:
    """This rank's position in the data, and the basis for deriving the others'."""
    made = run.progress.step - run.places.step
    return {
        "rank": run.comm.rank,
        "mine": {**run.feed.state(), "route": numerics.route()},
        "ranks": run.places.ranks,
        "rows": [made * rows for rows in stream_rows(run.shares.rows)],
    }


# -- resuming


def merge_momentum(comm: Comm, state: Json, weights: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """After ranks saved alone, give every rank Muon's state of all saved matrices; returns the
    names of the missing ones."""
    muon, share = state["muon"], state.pop(SHARE, None)
    from_ranks = comm.exchange("whose momentum was saved", share, patient=True, fits=maybe(listed(text)))
    if all(one is None for one in from_ranks):
        return []
    missing = []
    for name in names:
        holders = [rank for rank, held in enumerate(from_ranks) if held is None or name in held]
        if not holders:
            missing.append(name)
            muon.pop(name, None)
        elif len(holders) < comm.world:
            rows, columns = weights[name].shape
            flat = (rows, 1) if rows >= columns else (1, columns)
            parts = muon.setdefault(name, {MUON[0]: torch.empty(rows, columns), MUON[1]: torch.empty(flat)})
            for part in MUON:
                comm.broadcast(parts[part], holders[0], f"the momentum of {name}")
    return missing


def merge_places(comm: Comm, stage: RunStage, reader: Reader, loader: Mapping[str, Any]) -> list[Json]:
    """All positions in the data of the old ranks: reported if present, otherwise reconstructed; none if
    impossible."""
    alone = "mine" in loader
    from_ranks = gather_states(comm, {"of": loader["rank"], **loader["mine"]} if alone else {"of": -1})
    if not alone:
        return list(loader["ranks"])
    known = {int(state.pop("of")): state for state in from_ranks}
    places = []
    for rank in range(len(loader["rows"])):
        place = known.get(rank) or stage.reconstructed_position(reader, loader, rank)
        if place is None:
            return []
        places.append({"route": loader["mine"]["route"], **place})
    return places
