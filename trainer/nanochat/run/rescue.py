# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saving when another rank is lost, and resuming from that (--save-on-loss).

After every step all ranks hold the same weights and AdamW states, so a single rank can save them, unless
the interrupted update has begun to change them; then it saves a copy that it keeps in memory of a recent step, which rank 0
chooses for all. It has only its own share of Muon's momentum and knows only its
own position in the data. The remaining ranks combine what they saved. The momentum of a matrix that only a lost
rank had restarts from zero; the lost rank's position in the data follows from its position at the last save and the
steps since, by reading again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.kit.common import memory_available
from nanochat.kit.expected import listed, maybe, text
from nanochat.model import numerics
from nanochat.parallel.comm import Comm
from nanochat.rules.shares import stream_rows
from nanochat.run import checkpoint_manager
from nanochat.run.checkpoint_manager import NotSaved
from nanochat.run.optim_file import MUON, OptimizerLayout
from nanochat.run.resume import gather_states
from nanochat.run.stage import Reader, Stage
from nanochat.run.state import Finished, Run

Json = dict[str, Any]
# Names of the matrices whose momentum is in an optimizer file with only one rank's share.
SHARE = "share"
# Memory that must be available for a copy of a step, in sizes of the weights: weights, optimizer, and some to spare.
COPY_SIZE = 4


# -- saving


def save_alone(run: Run) -> str | None:
    """Save the last finished step without the other ranks; returns the message, None if nothing was lost."""
    if not run.stage.trains:
        return None
    step, newest, why = run.progress.step, max(run.progress.resumed_from or 0, *run.saved, 0), unsavable(run)
    lost = f"step {step} is not saved: {why}."
    if step == newest:
        return None
    if why and (run.kept is None or run.kept.step <= newest):
        return lost
    run.comm.enter("save", step)
    last = run.kept if why and run.kept is not None else finished(run)
    if checkpoint_manager.is_whole(run.checkpoints, last.step, run.comm.rank, deep=False):
        # Lost during a save, after this rank's part of it.
        return None
    try:
        saved = checkpoint_manager.save(run.checkpoints, last.step, run.comm.rank, **last.contents)
    except NotSaved as error:
        return str(error)
    run.journal.record("checkpoint", last.step, **saved._asdict(), alone=True)
    told = f"saved step {last.step} to {run.checkpoints} without the lost rank."
    return told if last.step == step else f"{told} {lost.capitalize()}"


def finished(run: Run) -> Finished:
    """The last finished step; the next one changes its tensors."""
    run.optimizer.catch_up()
    layout, state = OptimizerLayout.of(run.optimizer, run.comm.world), run.optimizer.state_dict()
    owners, rank = run.sync.owners, run.comm.rank
    # A rank's copies of other matrices are as old as its last start.
    state["muon"] = {name: one for name, one in state["muon"].items() if owners.get(name, rank) == rank}
    contents = {
        "optimizer": layout.file({**state, SHARE: sorted(state["muon"])}, rank),
        "loader": loader_alone(run),
        "model": run.weights,
        "meta": run.meta(run.feed.finished_position()),
    }
    return Finished(run.progress.step, contents)


def keep(run: Run) -> None:
    """Copy the last finished step in memory, to be saved if a rank is lost while the next update changes the weights."""
    begun, older = time.monotonic(), run.kept
    # Unusable while it is overwritten.
    run.kept = None
    needed, available = COPY_SIZE * sum(one.nbytes for one in run.weights.values()), memory_available()
    if older is None and available is not None and needed > available:
        run.keep_seconds = None
        run.journal.say(
            f"No step is kept in memory: that takes {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are available"
        )
        return
    last = finished(run)
    run.kept = last._replace(contents=copied(last.contents, older.contents if older else {}))
    run.keep_seconds = time.monotonic() - begun


def copied(value: Any, older: Any) -> Any:
    """A deep copy in the memory of an older one where that fits: new memory takes several times as long."""
    if isinstance(value, Tensor):
        fits = isinstance(older, Tensor) and (older.shape, older.dtype) == (value.shape, value.dtype)
        return older.copy_(value) if fits else value.clone()
    if isinstance(value, dict):
        return {key: copied(one, older.get(key) if isinstance(older, dict) else None) for key, one in value.items()}
    return copy.deepcopy(value)


def unsavable(run: Run) -> str | None:
    """Why this rank cannot save the last finished step alone, if it cannot."""
    if run.apart:
        return "with local steps each rank has its own weights"
    if run.training.shared_head is not None:
        return "the head is split, and a part of it was lost with the rank"
    if run.sync.changing:
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
    told = comm.exchange("whose momentum was saved", share, patient=True, fits=maybe(listed(text)))
    if all(one is None for one in told):
        return []
    missing = []
    for name in names:
        holders = [rank for rank, held in enumerate(told) if held is None or name in held]
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


def merge_places(comm: Comm, stage: Stage, reader: Reader, loader: Mapping[str, Any]) -> list[Json]:
    """All positions in the data of the old ranks: reported if present, otherwise reconstructed; none if
    impossible."""
    alone = "mine" in loader
    told = gather_states(comm, {"of": loader["rank"], **loader["mine"]} if alone else {"of": -1})
    if not alone:
        return list(loader["ranks"])
    known = {int(state.pop("of")): state for state in told}
    places = []
    for rank in range(len(loader["rows"])):
        place = known.get(rank) or stage.lost_place(reader, loader, rank)
        if place is None:
            return []
        places.append({"route": loader["mine"]["route"], **place})
    return places
