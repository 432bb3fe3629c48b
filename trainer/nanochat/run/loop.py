# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training loop: step, evaluate, sample, save, until the last step or a stop request."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nanochat.data.dataloader import Pair
from nanochat.kit.common import UserError
from nanochat.parallel.balance import Shares
from nanochat.parallel.sync import UNKNOWN, Notice
from nanochat.rules.causes import Cause
from nanochat.rules.schedule import WHOLE
from nanochat.run import checkpoint_manager
from nanochat.run.deadline import advance
from nanochat.run.saving import prove_identical, save
from nanochat.run.stage import bits_per_byte, nats_and_bytes
from nanochat.run.state import Run

# A stop request during an evaluation is posted here, and the others look for it this often.
STOP_KEY = "stop"
LOOK_SECONDS = 1.0
# Upstream excludes the first steps, the warm-up, from its time.
STEPS_NOT_TIMED = 10
LATE = 95 * WHOLE // 100


def train(run: Run) -> str:
    """Make the remaining steps; returns "finished" or "stopped"."""
    settings, progress = run.settings, run.progress
    eval_every, first, stop = settings.eval_every, progress.step + 1, False
    while True:
        last = run.share_done == 1
        # A stopping run saves first; what is due now is done after resuming.
        if not stop and ((last and eval_every > 0) or pauses(run, progress.step, eval_every)):
            stop = evaluate(run)
        sample_every = settings.sample_every
        if not stop and ((last and sample_every > 0) or pauses(run, progress.step, sample_every)):
            sample(run)
        if progress.step != progress.resumed_from and (last or stop or saves(run, progress.step)):
            save(run, final=last or stop)
        if last or stop:
            left_out = stop and (eval_every > 0 or settings.sample_every > 0)
            return "finished" if last and not left_out else "stopped"
        stop = train_step(run)
        if progress.step == first:
            prove_identical(run, f"after step {progress.step}")


def pauses(run: Run, step: int, every: int) -> bool:
    """Whether an evaluation or samples come before this step; a timed run skips them near its end, where time is reserved for
    the last ones."""
    return due(step, every) and not (run.plan.timed and run.progress.place > LATE)


def due(step: int, every: int) -> bool:
    """Whether an event with this interval is due before this step."""
    return every > 0 and step > 0 and step % every == 0


def train_step(run: Run) -> bool:
    """One optimizer step over all ranks; returns whether any rank was asked to stop after it."""
    settings, step, began = run.settings, run.progress.step, time.perf_counter()
    run.comm.take_counters()
    run.comm.enter("data", step)
    if run.deadline is not None:
        run.deadline.begin_step()
    offer(run)
    batches, position = run.feed.take()
    token_ids, stop = run.sync.take_ids()
    if run.sync.last_step != UNKNOWN:
        run.last_step = max(run.sync.last_step, step)
    run.optimizer.prepare(token_ids)
    run.comm.enter("forward_backward")
    passing, waited = time.perf_counter(), run.comm.wait_seconds
    loss = forward_backward(run, batches, token_ids)
    # A shared head waits for the others in the middle of a pass.
    passed = time.perf_counter() - passing - (run.comm.wait_seconds - waited)
    shares = None if stop or not settings.rebalance else run.balancer.hear(run.sync.busy)
    goes_on = not stop and not shares and not saves(run, step + 1)
    if goes_on and not (run.plan.timed and due(step + 1, settings.eval_every)):
        # Send the next step's token ids with this one's gradients, unless a checkpoint or a change of shares needs the loader's
        # current position. In a timed run, an evaluation may leave no time for the next step.
        offer(run, ahead=True)
    total = run.sync.step(loss, run.schedule())
    if not math.isfinite(total):
        raise non_finite_loss(run, total)
    wait, sent = run.comm.take_counters()
    seconds, data = time.perf_counter() - began, run.feed.take_seconds()
    each = {
        "seconds": seconds, "forward_backward_seconds": passed, "wait_seconds": wait, "data_seconds": data, "bytes_sent": sent,
        "optimizer_seconds": max(0.0, seconds - data - passed - wait),
    }  # fmt: skip
    finish_step(run, total, each, position)
    if run.unproven is not None:
        # The last checkpoint's weights gave a finite loss on all ranks: now older ones may go.
        run.unproven = None
        checkpoint_manager.prune(run.checkpoints, settings.keep_checkpoints, run.saved)
    if shares:
        change_shares(run, shares)
    return stop


def change_shares(run: Run, shares: Shares) -> None:
    """Give every rank its new share between two steps; all ranks do so at the same step.

    It is like saving and resuming, but in memory: weights and optimizer state are put together on every rank, as for a checkpoint;
    then everything that depends on the shares is rebuilt from them. So a run that continues and one that is resumed here are the same.
    """
    begun, before, sync = time.perf_counter(), run.shares, run.sync
    speeds = run.balancer.speeds
    run.comm.enter("share", run.progress.step)
    run.make_whole()
    if sync.head is not None:
        sync.head.wait_until_sent()
    optimizer, schedule = sync.whole_state(), run.optimizer.schedule
    run.rebuild(shares)
    run.optimizer.load_state_dict(optimizer)
    run.optimizer.schedule = schedule
    # As announced in the last step, after which nothing has been saved yet.
    run.sync.save_asked = sync.save_asked
    rank = run.comm.rank
    for name, values in run.sync.feedback.items():
        # Rounding errors of what this rank still sends: a gradient, or the update of a matrix that it owns. Those of a matrix that
        # changed owners are dropped.
        kept = sync.feedback.get(name)
        if kept is not None and (sync.owners.get(name) == rank) == (run.sync.owners.get(name) == rank):
            values.copy_(kept)
    seconds = time.perf_counter() - begun
    run.journal.say(
        f"Rows per step are now {listing(shares.rows)} (before: {listing(before.rows)}), because the ranks have these speeds: "
        f"{listing(round(100 * speed / sum(speeds)) for speed in speeds)} % of the total; switching took {seconds:.1f} s"
    )
    run.journal.record(
        "shares", run.progress.step, rows=shares.rows, head=shares.head, before=before.rows, before_head=before.head,
        speeds=[speed / sum(speeds) for speed in speeds], seconds=seconds,
    )  # fmt: skip


def listing(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def offer(run: Run, ahead: bool = False) -> None:
    """Send the coming step's ids to the other ranks, unless done; ahead: during the current step."""
    if run.feed.offered:
        return
    last = run.deadline.last_step(run.progress.step + ahead, ahead) if run.deadline is not None else UNKNOWN
    run.feed.offer(Notice(run.stop_asked, run.save_wanted, last, run.busy_seconds))


def non_finite_loss(run: Run, loss: float) -> UserError:
    """The error for a non-finite loss; removes a checkpoint of the weights that caused it."""
    step, removed = run.progress.step, ""
    if run.unproven == step:
        checkpoint_manager.remove(run.checkpoints, step)
        removed = "the checkpoint with these weights was removed; "
    older = [one for one in checkpoint_manager.whole_steps(run.checkpoints, deep=False) if one < step]
    place = f"with --resume-from-step {older[-1]}" if older else "from scratch"
    text = f"the loss is {loss} at step {step}, so this step's weights are unusable; {removed}start again {place} and lower learning rates."
    return UserError(text, Cause.NON_FINITE_LOSS, [])


def forward_backward(run: Run, batches: Sequence[Pair], token_ids: Tensor) -> Tensor:
    """Gradients of all micro-batches; the last one tells the sync which are ready."""
    run.training.start_step(token_ids)
    run.sync.start_step(token_ids)
    scale = 1.0 / run.stage.targets(run.plan.total_batch_size, run.feed.loader.last)
    loss = torch.zeros(())
    for number, (ids, targets) in enumerate(batches, start=1):
        on_ready = run.sync.on_ready if number == len(batches) else None
        loss += run.training.forward_backward(ids, targets, scale, on_ready)
    for dummy in range(len(batches), len(run.passes)):
        run.sync.join_pass(scale)
    return loss


def finish_step(run: Run, loss: float, measured: Mapping[str, float], position: Mapping[str, int]) -> None:
    """Count, print and record a finished step; measured: its seconds and bytes, as its event has them."""
    progress, plan, step, seconds = run.progress, run.plan, run.progress.step, measured["seconds"]
    smooth = progress.add_loss(loss)
    speed = plan.total_batch_size / seconds
    multiplier, share = run.schedule().lr_multiplier, run.progress.place / WHOLE if plan.timed else None
    if step > STEPS_NOT_TIMED:
        progress.training_seconds += seconds
    progress.step = step + 1
    if run.deadline is not None:
        run.deadline.end_step(seconds)
    if run.sync.last_step != UNKNOWN:
        progress.place = advance(progress.place, run.last_step - step + 1)
    steps = run.journal.heartbeat.steps = run.last_step + 1
    run.busy_seconds = max(0.0, seconds - measured["wait_seconds"] - measured["data_seconds"])
    run.feed.finish()
    typical = run.journal.seconds_per_step(seconds)
    run.journal.heartbeat.step_seconds = typical
    run.journal.say(
        f"step {step:05d}/{steps:05d} ({100 * (step / steps if share is None else share):.2f}%) | loss: {smooth:.6f} | "
        f"lrm: {multiplier:.2f} | dt: {1000 * seconds:.2f}ms | tok/sec: {int(speed)} | bf16_mfu: {0:.2f} | "
        f"epoch: {position['epoch']} pq: {position['pq_idx']} rg: {position['rg_idx']} | "
        f"total time: {progress.training_seconds / 60:.2f}m | eta: {(steps - step) * typical / 60:.1f}m"
    )
    run.journal.record(
        "step", step, loss=loss, loss_smooth=smooth, tokens_per_second=speed, **measured,
        lr_multiplier=multiplier, epoch=position["epoch"], rows=run.shares.rows[run.comm.rank],
        **({} if share is None else {"share": share, "steps": steps}),
    )  # fmt: skip


def saves(run: Run, step: int) -> bool:
    """Whether a checkpoint is due before this step, by number or time."""
    return step > run.last_step or due(step, run.settings.save_every) or run.sync.save_asked


def evaluate(run: Run) -> bool:
    """Bits per byte over the validation shard, split among the ranks; whether a stop request interrupted it."""
    run.comm.enter("eval", run.progress.step)
    begun, progress = time.perf_counter(), run.progress
    run.make_whole()
    with run.stage.evaluation(run) as (batches, number):
        totals = nats_and_bytes(run.model.losses, watched_batches(run, batches, number), run.token_bytes)
    # One rank may take much longer for its part than another.
    if any(run.comm.exchange("the evaluation on all ranks", run.stop_asked, patient=True)):
        run.journal.say(f"Step {progress.step:05d} | Evaluation interrupted, because the run is stopping")
        return True
    bpb = bits_per_byte(run.comm.all_reduce(totals, "the validation loss"))
    progress.val_bpb = bpb
    progress.min_val_bpb = min(bpb, progress.min_val_bpb)
    run.took("eval", begun)
    run.journal.say(f"Step {progress.step:05d} | Validation bpb: {bpb:.6f}")
    if run.comm.rank == 0:
        seconds = time.perf_counter() - begun
        run.journal.record("eval", progress.step, val_bpb=bpb, seconds=seconds, share=run.share_done)
    return False


def watched_batches(run: Run, batches: Iterator[Pair], of: int | None) -> Iterator[Pair]:
    """The batches, until any rank is asked to stop; the heartbeat shows the progress, because an evaluation
    may take very long."""
    looked = time.monotonic()
    for number, (ids, targets) in enumerate(batches, start=1):
        if run.stop_asked:
            run.comm.post(STOP_KEY)
            return
        if time.monotonic() - looked > LOOK_SECONDS:
            if run.comm.posted(STOP_KEY):
                return
            looked = time.monotonic()
        run.journal.heartbeat.evaluating(number, of)
        yield ids, targets


def sample(run: Run) -> None:
    """The model's continuations of a few prompts; rank 0 writes, the others wait."""
    run.comm.enter("sample", run.progress.step)
    begun = time.perf_counter()
    run.make_whole()
    if run.comm.rank == 0:
        for prompt, text in run.stage.samples(run):
            run.journal.say(text)
            run.journal.record("sample", run.progress.step, prompt=prompt, text=text)
    run.comm.barrier("the samples of rank 0")
    run.took("sample", begun)
