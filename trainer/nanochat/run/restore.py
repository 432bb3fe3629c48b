# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run begins with: the newest checkpoint of its training (resume.py brings that to every folder), a base model, or nothing.

Weights, optimizer, progress and data position are checked against this run; what does not fit is refused, or said and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.kit.common import BadCheckpoint, first_line
from nanochat.kit.settings import ChatSettings
from nanochat.model import numerics
from nanochat.model.optim import MUON, muon_shapes
from nanochat.parallel.balance import Shares
from nanochat.parallel.comm import Comm
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.schedule import WHOLE
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run.optim_file import OURS_KEY, SHARE, OptimizerLayout, Unusable
from nanochat.run.resume import BASE, Obtained, folder_leader, name_training, named_training, obtain
from nanochat.run.state import Run, TrainingProgress


def restore(run: Run) -> None:
    """Resume from a checkpoint if the settings ask for it and there is one; otherwise start."""
    settings, comm, folder, journal = run.settings, run.comm, run.checkpoints, run.journal
    comm.enter("resume")
    checkpoints.sweep(folder)
    if settings.resume or settings.resume_from_step >= 0:
        got = obtain(comm, journal, folder, run.writer, settings.resume_from_step)
    else:
        got = Obtained(named_training(journal.folder))
    if not settings.resume and run.writer == comm.rank:
        # The run will repeat these steps.
        repeated = {step for step in checkpoints.steps_in(folder) if got.step is None or step > got.step}
        checkpoints.set_aside(folder, repeated, journal.say)
    run.training_id = name_training(comm, got.training)
    if got.step is None:
        if run.stage.base is not None:
            take_base_model(run, run.stage.base)
        run.feed.loader = run.stage.training_loader(run)
        return
    with refusing_bad_content(folder, got.step):
        load_checkpoint(run, got.step, got.files)
    # The steps up to this one that every rank's folder has, so that older ones may go.
    mine = [step for step in checkpoints.whole_steps(folder, deep=False) if step <= got.step]
    from_ranks = comm.exchange("the checkpoints of all ranks", mine)
    run.saved = sorted(set(mine).intersection(*from_ranks))
    journal.say(f"Resuming from step {got.step} of {folder}")


def take_base_model(run: Run, base: ChatSettings) -> None:
    """Start every rank from a base model that at least one of them has."""
    comm, folder = run.comm, Path(base.base_checkpoints)
    leader = folder_leader(comm, folder)
    training, step, files = obtain(comm, run.journal, folder, leader, base.model_step, BASE)
    if step is None:
        raise BadCheckpoint(
            f"no rank has a base checkpoint in {folder}; train one with python -m scripts.base_train, or give "
            "its folder with --base-checkpoints."
        )
    with refusing_bad_content(folder, step):
        check_same_model(run.model.config, checkpoints.load_meta(folder, step), folder, step)
        checkpoints.load_weights(run.model, folder, step)
        if base.load_optimizer:
            restore_optimizer(run, folder, step, files)
    run.base = {"training": training or None, "step": step}
    run.journal.say(f"Starting from the base model of step {step} in {folder}")


@contextlib.contextmanager
def refusing_bad_content(folder: Path, step: int) -> Iterator[None]:
    """Files that are complete but have unexpected content are reported as the checkpoint's fault."""
    try:
        yield
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise BadCheckpoint(f"the checkpoint of step {step} in {folder} has unexpected content ({what}).") from None


def load_checkpoint(run: Run, step: int, files: int) -> None:
    """Load weights, optimizer, progress and data position from a local checkpoint."""
    comm, folder = run.comm, run.checkpoints
    meta = checkpoints.load_meta(folder, step)
    steps = run.plan.num_iterations
    if step > steps and not run.plan.timed:
        raise BadCheckpoint(
            f"the checkpoint in {folder} has step {step}, but this run ends at step {steps}; "
            "use a larger --num-iterations, or --resume-from-step."
        )
    check_same_model(run.model.config, meta, folder, step)
    run.base = dict(meta.get("base") or {})
    checkpoints.load_weights(run.model, folder, step)
    restore_shares(run, meta)
    loaders = restore_optimizer(run, folder, step, files)
    restore_progress(run.progress, meta, step)
    # Earlier versions wrote a rank's own state under "mine" when it saved alone.
    states = [loaders["mine"]] * comm.world if "mine" in loaders else loaders.get("ranks") or [{}]
    route = states[comm.rank].get("route") if comm.rank < len(states) else None
    if route and not numerics.keep(route):
        run.journal.say(f"Step {step} used {route}, not all of which works here")
    state, own = states[0], {"epoch": 1, **meta["dataloader_state_dict"]}
    why = run.stage.why_not_exact(run, state)
    # All ranks must read the same rows; where ranks of earlier versions saved alone, each wrote a place of its own.
    from_ranks = comm.exchange("the place in the data", [bool(why), own], patient=True)
    position = from_ranks[0][1]
    if any(inexact for inexact, dummy in from_ranks):
        why = why or "another rank does not know which documents were read"
        run.journal.note(f"Step {step}: {why}")
    run.feed.loader = run.stage.training_loader(run, position, None if why else state)


def restore_shares(run: Run, meta: Mapping[str, Any]) -> None:
    """Continue with the checkpoint's shares, unless the settings have changed them."""
    kept = (meta.get("loop_state") or {}).get("shares") if run.settings.rebalance else None
    if kept is None or kept[2] != run.configured_shares() or bool(kept[1]) != bool(run.shares.head):
        return
    if kept[:2] != list(run.shares):
        run.rebuild(Shares(*kept[:2]))
        run.journal.say(f"Rows per step, as rebalanced before: {', '.join(map(str, kept[0]))}")


def feedback_of(run: Run) -> list[Any]:
    """The rank and data to which error feedback belongs: with other ranks, rows or own matrices, a rank sends something else
    in the same place."""
    owned = sorted(name for name, owner in run.sync.owners.items() if owner == run.comm.rank)
    return [run.comm.rank, run.shares.rows, owned]


def restore_feedback(run: Run, kept: Mapping[str, Any] | None) -> None:
    """Restore this rank's rounding errors, if saved and still valid."""
    mine = run.sync.feedback
    if not mine:
        return
    # The head's are kept only by ranks that sent its gradient.
    saved: Mapping[str, Tensor] = kept["values"] if kept is not None and kept["of"] == feedback_of(run) else {}
    fits = all(name in saved and saved[name].shape == values.shape for name, values in mine.items())
    if fits:
        for name, values in mine.items():
            values.copy_(saved[name])
    from_ranks = run.comm.exchange("the error feedback that was saved", fits)
    zero = [str(rank) for rank, one in enumerate(from_ranks) if not one]
    if zero:
        run.journal.say(
            f"Error feedback starts at zero on rank {', '.join(zero)}, because none was saved for these ranks and rows"
        )


def restore_optimizer(run: Run, folder: Path, step: int, files: int) -> dict[str, Any]:
    """Momentum, second moments and step count; returns the loader's part of the file, if we wrote it."""
    comm, optimizer, say = run.comm, run.optimizer, run.journal.say
    layout = OptimizerLayout(optimizer)
    file, loaders = checkpoints.load_optimizer(folder, step, files)
    # In a folder that ranks share, each has its error feedback beside the leader's file.
    beside = files != comm.rank and checkpoints.is_whole(folder, step, comm.rank)
    own = checkpoints.load_optimizer(folder, step, comm.rank)[0] if beside else file
    held = {files: file}
    # A folder may have more of upstream's files than were sent to the others, and all ranks must use the same.
    here = checkpoints.optimizer_ranks(folder, step)
    from_ranks = comm.exchange("the optimizer files of all ranks", here, patient=True)
    if OURS_KEY not in file:
        others = set(here).intersection(*from_ranks) - {files}
        held |= {rank: checkpoints.load_optimizer(folder, step, rank)[0] for rank in sorted(others)}
    try:
        state = layout.state(held)
        if lost := merge_momentum(comm, state, run.weights, optimizer.matrix_names):
            say(
                f"Momentum of {len(lost)} of {len(optimizer.matrix_names)} matrices was lost with absent ranks "
                "and starts from zero"
            )
        optimizer.load_state_dict(state)
    except Unusable as why:
        say(f"Step {step}: the optimizer starts without momentum, because {why}")
    restore_feedback(run, own.get(checkpoints.FEEDBACK_KEY))
    return loaders or {}


def merge_momentum(comm: Comm, state: dict[str, Any], weights: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
    """After ranks saved alone, give every rank Muon's state of all saved matrices; returns the
    names of the missing ones."""
    muon, share = state["muon"], state.pop(SHARE, None)
    from_ranks = comm.exchange("whose momentum was saved", share, patient=True)
    if all(one is None for one in from_ranks):
        return []
    missing = []
    for name in names:
        holders = [rank for rank, held in enumerate(from_ranks) if held is None or name in held]
        if not holders:
            missing.append(name)
            muon.pop(name, None)
        elif len(holders) < comm.world:
            shapes = muon_shapes(weights[name].shape)
            parts = muon.setdefault(name, {part: torch.empty(shape) for part, shape in shapes.items()})
            for part in MUON:
                comm.broadcast(parts[part], holders[0], f"the momentum of {name}")
    return missing


def restore_progress(progress: TrainingProgress, meta: dict[str, Any], step: int) -> None:
    loop = meta.get("loop_state") or {}
    progress.step = progress.resumed_from = step
    progress.smooth_loss = float(loop.get("smooth_train_loss") or 0.0)
    progress.training_seconds = float(loop.get("total_training_time") or 0.0)
    lowest, last = loop.get("min_val_bpb"), meta.get("val_bpb")
    progress.min_val_bpb = math.inf if lowest is None else float(lowest)
    progress.val_bpb = None if last is None else float(last)
    # For a timed run; after one with a number of steps, from the steps made.
    steps = (meta.get("user_config") or {}).get("num_iterations") or 0
    place = loop.get("place", WHOLE * step // steps if steps > 0 else 0)
    progress.place = min(max(int(place), 0), WHOLE)


def check_same_model(config: ModelConfig, meta: dict[str, Any], folder: Path, step: int) -> None:
    """Refuse weights of another shape, naming the difference."""
    for name, value in dataclasses.asdict(config).items():
        kept = meta["model_config"].get(name, value)
        if kept != value:
            raise BadCheckpoint(
                f"the checkpoint of step {step} in {folder} has {name} {kept}, but this run has {value}; "
                "use its settings, or another --model-tag."
            )
