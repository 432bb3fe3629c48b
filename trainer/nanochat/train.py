# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training loop: step, evaluate, sample, save, until the last step or until a rank is asked to stop."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat import checkpoint_manager
from nanochat.agreement import check_identical, digests, whole_digest
from nanochat.causes import Cause
from nanochat.checkpoint_manager import NotSaved
from nanochat.comm import Comm
from nanochat.common import UserError
from nanochat.dataloader import Pair
from nanochat.expected import count, flag, listed, matching, maybe, one_of, row, text
from nanochat.journal import Journal
from nanochat.local import STOP_KEY, first_meetings, kinds_of_meetings
from nanochat.loss_eval import bits_per_byte, nats_and_bytes
from nanochat.phases import apart_at, enter_phase
from nanochat.reshare import change_shares
from nanochat.run import STEPS_NOT_TIMED, Batch, Run, checkpoint
from nanochat.schedule import StepSchedule
from nanochat.settings import user_config

# Between two looks, in an evaluation, whether another rank is asked to stop.
LOOK_SECONDS = 1.0


def train(run: Run) -> str:
    """All steps that are left; returns why it ended: "finished" or "stopped"."""
    settings, progress, steps = run.settings, run.progress, run.plan.num_iterations
    eval_every = settings.eval_every if run.stage.is_judged(settings) else 0
    proofs = first_meetings(progress.step, settings.local_steps, steps, *kinds_of_meetings(settings))
    stop = False
    while True:
        last = progress.step == steps
        # A run that is asked to stop saves first of all; what is due now is done when it goes on from here.
        if not stop and ((last and eval_every > 0) or due(progress.step, eval_every)):
            stop = evaluate(run)
        if not stop and ((last and settings.sample_every > 0) or due(progress.step, settings.sample_every)):
            sample(run)
        if progress.step != progress.resumed_from and (last or stop or saves(run, progress.step)):
            save(run, final=last or stop)
        if last or stop:
            left_out = stop and (eval_every > 0 or settings.sample_every > 0)
            return "finished" if last and not left_out else "stopped"
        enter_phase(run)
        stop = train_step(run)
        if progress.step in proofs:
            prove_identical(run, f"after step {progress.step}")


def start_event(run: Run) -> None:
    """The first event of this attempt: what runs here, with what."""
    config, counts = dataclasses.asdict(run.model.config), run.model.parameter_counts()
    steps = run.plan.num_iterations if run.stage.trains else None
    attempt = run.comm.exchange("the name of this attempt", secrets.token_hex(8), fits=matching("[0-9a-f]{16}"))[0]
    run.journal.open_tracker(run.progress.resumed_from is not None)
    run.journal.heartbeat.steps = steps or 0
    run.journal.record(
        "start", run.progress.step, rank=run.comm.rank, world=run.comm.world, run=run.settings.run,
        model={"config": config, "parameters": counts, "flops_per_token": run.model.flops_per_token()},
        settings=user_config(run.settings), dtype=run.dtype.name, dtype_reason=run.dtype.reason, matmul=run.matmul,
        steps=steps, total_batch_size=run.plan.total_batch_size,
        resumed_from=run.progress.resumed_from, attempt_id=attempt,
        training=run.training_id, base=run.base or None,
        generation=int(os.environ.get("NANOCHAT_GENERATION") or 0) or None,
    )  # fmt: skip


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens before this one."""
    return every > 0 and step > 0 and step % every == 0


class Timing(NamedTuple):
    """Where the seconds of one step went; what is not named belongs to the optimizer."""

    total: float
    data: float
    forward_backward: float
    wait: float
    bytes_sent: int

    @property
    def optimizer(self) -> float:
        return max(0.0, self.total - self.data - self.forward_backward - self.wait)


def train_step(run: Run) -> bool:
    """One optimizer step over all ranks; returns whether any rank was asked to stop after it."""
    step, began = run.progress.step, time.perf_counter()
    run.comm.take_counters()
    run.comm.enter("data", step)
    run.feed.offer(run.stop_asked, run.save_wanted, run.busy_seconds)
    batches, position = run.feed.take()
    token_ids, stop = run.sync.take_ids()
    run.optimizer.prepare(token_ids)
    run.comm.enter("forward_backward")
    passing, waited = time.perf_counter(), run.comm.wait_seconds
    loss = forward_backward(run, batches, token_ids)
    # A head that is shared out waits for the others in the middle of a pass.
    passed = time.perf_counter() - passing - (run.comm.wait_seconds - waited)
    shares = None if stop or not run.settings.rebalance else run.balancer.hear(run.sync.busy)
    if not stop and not shares and not saves(run, step + 1) and apart_at(run, step + 1) == run.apart:
        # The next step's token ids travel with this one's gradients; a checkpoint wants the loader where it is, and so do
        # a change of shares and another way of training.
        run.feed.offer(run.stop_asked, run.save_wanted, run.busy_seconds)
    total = run.sync.step(loss, StepSchedule.at(run.plan, step))
    if not math.isfinite(total):
        raise spoilt(run, total)
    wait, sent = run.comm.take_counters()
    finish_step(run, total, Timing(time.perf_counter() - began, run.feed.take_seconds(), passed, wait, sent), position)
    prove_checkpoint(run)
    if shares:
        change_shares(run, shares)
    return stop


def prove_checkpoint(run: Run) -> None:
    """The weights of the last checkpoint gave a finite loss, on all ranks: only now may older ones go."""
    if run.unproven is not None and run.sync.met:
        run.unproven = None
        checkpoint_manager.prune(run.checkpoints, run.settings.keep_checkpoints, run.saved)


def spoilt(run: Run, loss: float) -> UserError:
    """What to say of a loss that is no number; a checkpoint of the very weights that gave it is removed."""
    step, older = run.progress.step, [step for step in run.saved if step < run.progress.step]
    how = "with lower learning rates or float32"
    if run.unproven == step:
        checkpoint_manager.remove(run.checkpoints, step)
        place = f"from step {older[-1]}" if older else "from scratch"
        todo = f"the checkpoint of these weights was removed; go on {place} {how}"
    elif run.progress.resumed_from == step:
        whole = [one for one in checkpoint_manager.whole_steps(run.checkpoints, run.writer, deep=False) if one < step]
        way = f"--resume-from-step {whole[-1]}" if whole else "no checkpoint: there is no older one"
        todo = f"they are those of the checkpoint; go on from {way}, {how}"
    else:
        todo = f"resume from the last checkpoint {how}"
    text = f"the loss is {loss} at step {step}, so this step's weights are spoilt; {todo}."
    return UserError(text, Cause.NON_FINITE_LOSS, [run.comm.rank] if run.apart else [])


def forward_backward(run: Run, batches: Sequence[Batch], token_ids: Tensor) -> Tensor:
    """Gradients of all micro-batches; the last one tells the sync what is ready."""
    run.training.start_step(token_ids)
    run.sync.start_step(token_ids)
    rows = run.shares.rows[run.comm.rank] if run.apart else sum(run.shares.rows)
    scale = 1.0 / run.stage.targets(run, rows)
    loss = torch.zeros((), device=run.device)
    for number, (ids, targets) in enumerate(batches, start=1):
        on_ready = run.sync.on_ready if number == len(batches) else None
        loss += run.training.forward_backward(ids.to(run.device), targets.to(run.device), scale, on_ready)
    for dummy in range(len(batches), len(run.passes)):
        run.training.join_pass(scale)
    return loss


def finish_step(run: Run, loss: float, timing: Timing, position: Mapping[str, int]) -> None:
    """Count, print and record a step that was made."""
    progress, plan, step = run.progress, run.plan, run.progress.step
    smooth = progress.add_loss(loss)
    speed = plan.total_batch_size / timing.total
    multiplier = StepSchedule.at(plan, step).lr_multiplier
    if step > STEPS_NOT_TIMED:
        progress.training_seconds += timing.total
    progress.step = step + 1
    run.busy_seconds = max(0.0, timing.total - timing.wait - timing.data)
    run.feed.finish()
    typical = run.journal.seconds_per_step(timing.total)
    run.journal.heartbeat.step_seconds = typical
    run.journal.heartbeat.meeting_in = run.sync.meeting_in()
    run.journal.say(
        f"step {step:05d}/{plan.num_iterations:05d} ({100 * step / plan.num_iterations:.2f}%) | loss: {smooth:.6f} | "
        f"lrm: {multiplier:.2f} | dt: {1000 * timing.total:.2f}ms | tok/sec: {int(speed)} | bf16_mfu: {0:.2f} | "
        f"epoch: {position['epoch']} pq: {position['pq_idx']} rg: {position['rg_idx']} | "
        f"total time: {progress.training_seconds / 60:.2f}m | eta: {(plan.num_iterations - step) * typical / 60:.1f}m"
    )
    run.journal.record(
        "step", step, loss=loss, loss_smooth=smooth, seconds=timing.total, tokens_per_second=speed,
        forward_backward_seconds=timing.forward_backward, wait_seconds=timing.wait,
        optimizer_seconds=timing.optimizer, data_seconds=timing.data, bytes_sent=timing.bytes_sent,
        lr_multiplier=multiplier, epoch=position["epoch"], rows=run.shares.rows[run.comm.rank],
    )  # fmt: skip


def saves(run: Run, step: int) -> bool:
    """Whether a checkpoint is made before this step, for its number or for the time since the last one."""
    return step == run.plan.num_iterations or due(step, run.settings.save_every) or run.sync.save_asked


def prove_identical(run: Run, when: str) -> None:
    """Compare the weights of all ranks; a difference ends the run."""
    run.make_whole()
    try:
        digest = check_identical(run.comm, run.weights, when)
    except UserError as error:
        if error.cause is Cause.WEIGHTS_DIFFER:
            mine = whole_digest(digests(run.weights))
            run.journal.record("digest", run.progress.step, digest=mine, identical=False)
        raise
    run.journal.record("digest", run.progress.step, digest=digest, identical=True)


def evaluate(run: Run) -> bool:
    """Bits per byte over the validation shard, which the ranks share out; whether it was broken off, since a rank is to stop."""
    run.comm.enter("eval", run.progress.step)
    begun, progress = time.perf_counter(), run.progress
    run.make_whole()
    with run.stage.evaluation(run) as batches:
        totals = nats_and_bytes(run.model, told_batches(run, batches), run.token_bytes)
    # One rank may take much longer for its part than another.
    if any(run.comm.exchange("the evaluation of every rank", run.stop_asked, patient=True, fits=flag)):
        run.journal.say(f"Step {progress.step:05d} | The evaluation was broken off, since the run is asked to stop")
        return True
    bpb = bits_per_byte(run.comm.all_reduce(totals, "the validation loss"))
    progress.val_bpb = bpb
    progress.min_val_bpb = min(bpb, progress.min_val_bpb)
    run.journal.say(f"Step {progress.step:05d} | Validation bpb: {bpb:.6f}")
    if run.comm.rank == 0:
        run.journal.record("eval", progress.step, val_bpb=bpb, seconds=time.perf_counter() - begun)
    return False


def told_batches(run: Run, batches: Iterator[Pair]) -> Iterator[Pair]:
    """The batches on the run's device, until any rank is asked to stop; the heartbeat tells how far the evaluation is, which
    may take longer than all else."""
    of, looked = run.stage.eval_batches(run), time.monotonic()
    for number, (ids, targets) in enumerate(batches, start=1):
        if run.stop_asked:
            run.comm.post(STOP_KEY)
            return
        if time.monotonic() - looked > LOOK_SECONDS:
            if run.comm.posted(STOP_KEY):
                return
            looked = time.monotonic()
        run.journal.heartbeat.evaluating(number, of)
        yield ids.to(run.device), targets.to(run.device)


def sample(run: Run) -> None:
    """What the model makes of a few prompts; rank 0 writes, the others wait."""
    run.comm.enter("sample", run.progress.step)
    run.make_whole()
    if run.comm.rank == 0:
        for prompt, text in run.stage.samples(run):
            run.journal.say(text)
            run.journal.record("sample", run.progress.step, prompt=prompt, text=text)
    run.comm.barrier("the samples of rank 0")


def save(run: Run, final: bool) -> None:
    """A checkpoint, after the proof that all ranks have the same to save; only the last one must succeed."""
    begun = time.perf_counter()
    run.comm.enter("save", run.progress.step)
    prove_identical(run, f"at step {run.progress.step}")
    contents = checkpoint(run)
    run.saved_at = time.monotonic()
    error = write(run.comm, run.journal, run.checkpoints, run.progress.step, contents)
    if error and make_room(run):
        run.journal.say(f"warning: {error} All checkpoints before the last good one make room for it.")
        error = write(run.comm, run.journal, run.checkpoints, run.progress.step, contents)
    if error and final:
        raise error
    if error:
        run.journal.say(goes_on_without(error, run.saved))
        return
    run.saved = [*run.saved, run.progress.step]
    run.journal.say(f"Saved checkpoint of step {run.progress.step} to {run.checkpoints}")
    # Older ones stay until a step has shown that these weights are sound.
    run.unproven = run.progress.step
    run.journal.heartbeat.save_seconds = time.perf_counter() - begun


def goes_on_without(error: NotSaved, saved: Sequence[int]) -> str:
    """The warning that a checkpoint is missing; saved: those that all ranks have."""
    last = f"the checkpoint of step {saved[-1]} is still whole" if saved else "there is no checkpoint yet"
    return f"warning: {error} Training goes on; {last}."


def write(comm: Comm, journal: Journal, folder: Path, step: int, contents: Mapping[str, Any]) -> NotSaved | None:
    """Every rank writes its part of a checkpoint; returns the error of the first one that could not."""
    failed = None
    try:
        saved = checkpoint_manager.save(folder, step, comm.rank, **contents)
        journal.record("checkpoint", step, **saved._asdict())
    except NotSaved as failure:
        failed = [str(failure), failure.cause.value]
    fits = maybe(row(text, one_of([cause.value for cause in Cause])))
    told = comm.exchange("the checkpoint", failed, patient=True, fits=fits)
    return next((NotSaved(one[0], Cause(one[1]), [rank]) for rank, one in enumerate(told) if one), None)


def make_room(run: Run) -> bool:
    """Keep the last checkpoint that all ranks have and none before it; whether any rank had one to remove."""
    keep = min(1, run.settings.keep_checkpoints)
    removed = checkpoint_manager.prune(run.checkpoints, keep, run.saved)
    return any(run.comm.exchange("what was removed for the checkpoint", removed, fits=listed(count())))
