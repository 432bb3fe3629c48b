# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one training run consists of, and how it is set up from its settings."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat import checkpoint_manager as checkpoints
from nanochat import common, dataloader, dataset, lineage, numerics, tokenizer
from nanochat.agreement import agree, code_digest, file_digest, start_alike
from nanochat.balance import Balancer, Shares
from nanochat.checkpoint_manager import FEEDBACK_KEY, load_meta, load_model, load_optimizer, optimizer_ranks, sweep
from nanochat.comm import Comm
from nanochat.common import BadCheckpoint, DtypeChoice
from nanochat.dataloader import START, BatchSource, Cursor, position_of
from nanochat.expected import flag, maybe
from nanochat.fused import MATMUL_TYPES, TrainingPass
from nanochat.journal import Journal
from nanochat.local import MEETINGS, MOMENTUM_KEY, LocalSync, fit, make_local, settle
from nanochat.model import GPT, ModelConfig
from nanochat.optim import ALL_ROWS, LearningRates, Optimizer
from nanochat.optim_file import OptimizerLayout, Unusable
from nanochat.phases import apart_at, begin_apart
from nanochat.rescue import Places, merge_momentum, merge_places
from nanochat.resume import (
    Found,
    Training,
    choose_step,
    fetch,
    find_training,
    folder_leader,
    gather_states,
    name_training,
)
from nanochat.schedule import TrainingPlan, steps_apart
from nanochat.settings import Settings, flag_of, rank_shares, refuse, shared_config, user_config
from nanochat.shared_head import fit_head, make_head
from nanochat.shares import passes_of
from nanochat.stage import Stage, counted, model_config
from nanochat.sync import Sync, make_sync
from nanochat.tokenizer import Tokenizer
from nanochat.wire import LEAST_BLOCK, ROWS_OF_MEETINGS, packs

Batch = tuple[Tensor, Tensor]
SMOOTHING = 0.9
# Upstream leaves the first steps, in which things warm up, out of its time.
STEPS_NOT_TIMED = 10


@dataclasses.dataclass
class Progress:
    """What a run carries from step to step besides weights and optimizer."""

    step: int = 0
    smooth_loss: float = 0.0
    training_seconds: float = 0.0
    min_val_bpb: float = math.inf
    val_bpb: float | None = None
    resumed_from: int | None = None

    def add_loss(self, loss: float) -> float:
        """Take one step's loss; returns the debiased running mean."""
        self.smooth_loss = SMOOTHING * self.smooth_loss + (1 - SMOOTHING) * loss
        return self.smooth_loss / (1 - SMOOTHING ** (self.step + 1))


class Feed:
    """This rank's micro-batches, a step at a time; what is read ahead has its token ids sent ahead."""

    def __init__(self) -> None:
        self.sync: Sync
        self.passes: list[int] = []
        self.loader: BatchSource
        self.seconds = 0.0
        self._batches: list[Batch] | None = None
        self._position: dict[str, int] = {}
        self._taken: dataloader.Batch | None = None
        self._finished: dataloader.Batch | None = None  # the last one of the step that was finished last

    def take_shares(self, sync: Sync, passes: Sequence[int]) -> None:
        """From now on take so many rows in each pass."""
        self.sync, self.passes = sync, [rows for rows in passes if rows]

    def offer(self, stop: bool, save: bool, busy: float = 0.0) -> None:
        """Read the coming step's batches, unless that was done, and tell the other ranks what is in them."""
        if self._batches is not None:
            return
        begun = time.perf_counter()
        self._batches = self.loader.step(self.passes)
        self._position = self.loader.position()
        self.seconds += time.perf_counter() - begun
        self.sync.offer_ids([ids for ids, dummy in self._batches], stop, save, busy)

    def take(self) -> tuple[list[Batch], dict[str, int]]:
        """The batches of this step and their place in the data."""
        batches, self._batches = self._batches, None
        self._taken = self.loader.last
        return batches or [], self._position

    def finish(self) -> None:
        """The step whose batches were taken is done; what was read ahead for the next one does not count yet."""
        self._finished, self._taken = self._taken, None

    def state(self) -> dict[str, Any]:
        """The loader's state after the last step that was finished."""
        return self.loader.state(self._finished)

    def finished_position(self) -> dict[str, int]:
        """Where the last step that was finished was in the data."""
        return self._finished.cursor.position() if self._finished else self.loader.position()

    def take_seconds(self) -> float:
        """Seconds spent reading since this was last asked."""
        taken, self.seconds = self.seconds, 0.0
        return taken


class Machinery(NamedTuple):
    """What computes, updates and exchanges; made again when the shares of the ranks change."""

    training: TrainingPass
    optimizer: Optimizer
    sync: Sync


@dataclasses.dataclass
class Run:
    """Everything that the loop in train.py works with."""

    settings: Settings
    stage: Stage
    comm: Comm
    journal: Journal
    device: str
    dtype: DtypeChoice
    matmul: str
    tokenizer: Tokenizer
    token_bytes: Tensor
    data_dir: Path
    checkpoints: Path
    writer: int  # the rank that writes checkpoints into this rank's folder
    shares: Shares
    plan: TrainingPlan
    model: GPT
    machinery: Machinery
    progress: Progress
    feed: Feed
    balancer: Balancer
    busy_seconds: float = 0.0  # in the last step; 0 where that says nothing of the next ones
    saved: list[int] = dataclasses.field(default_factory=list)
    unproven: int | None = None  # the step of the last checkpoint, until its weights gave a finite loss
    places: Places = dataclasses.field(default_factory=Places)
    stop_asked: bool = False
    training_id: str = ""  # see lineage.py
    base: dict[str, Any] = dataclasses.field(default_factory=dict)  # training and step of the model it began with
    saved_at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def save_wanted(self) -> bool:
        """Whether the last checkpoint is too long ago; one rank's clock counts for all."""
        minutes = self.settings.save_minutes
        return self.comm.rank == 0 and 0 < minutes <= (time.monotonic() - self.saved_at) / 60

    def make_whole(self) -> None:
        """Bring all weights up to date, wherever they were changed; every rank must ask for it together."""
        self.optimizer.catch_up()
        if self.training.shared_head is not None:
            self.training.shared_head.gather()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @property
    def training(self) -> TrainingPass:
        return self.machinery.training

    @property
    def optimizer(self) -> Optimizer:
        return self.machinery.optimizer

    @property
    def sync(self) -> Sync:
        return self.machinery.sync

    @property
    def apart(self) -> bool:
        """Whether the ranks make their steps apart now."""
        return isinstance(self.sync, LocalSync)

    @property
    def passes(self) -> list[int]:
        """The rows of this rank in each pass of a step."""
        together = self.training.shared_head is not None
        return passes_of(self.shares.rows, self.settings.device_batch_size, together)[self.comm.rank]

    def began_with(self) -> list[list[int]]:
        """The shares as the settings have them."""
        settings = self.settings
        rows = rank_shares(settings, self.plan.total_batch_size, self.comm.world)
        return [rows, list(settings.head_shares)]

    def make_again(self, shares: Shares, apart: bool = False) -> None:
        """Go on with other shares, or with steps that the ranks make apart: everything that depends on it is made again,
        without its state."""
        self.shares = shares
        self.machinery = make_machinery(self.settings, self.comm, self.model, self.plan, shares, self.matmul, apart)
        self.balancer, self.busy_seconds = new_balancer(self.model, shares), 0.0
        self.feed.take_shares(self.sync, self.passes)

    def meta(self, position: Mapping[str, int]) -> dict[str, Any]:
        """What a checkpoint's meta file says, in upstream's names."""
        progress = self.progress
        return {
            "step": progress.step,
            lineage.META_KEY: self.training_id,
            **({"base": self.base} if self.base else {}),
            "val_bpb": progress.val_bpb,
            "model_config": dataclasses.asdict(self.model.config),
            "user_config": user_config(self.settings),
            "device_batch_size": self.settings.device_batch_size,
            "max_seq_len": self.settings.max_seq_len,
            "total_batch_size": self.plan.total_batch_size,
            "dataloader_state_dict": dict(position),
            "loop_state": {
                "min_val_bpb": progress.min_val_bpb,
                "smooth_train_loss": progress.smooth_loss,
                "total_training_time": progress.training_seconds,
                **({"shares": [*self.shares, self.began_with()]} if self.settings.rebalance else {}),
            },
        }


def set_up(settings: Settings, comm: Comm, journal: Journal, stage: Stage | None = None) -> Run:
    """Build a run, and refuse what cannot work while it is still cheap."""
    stage = stage or Stage()
    device = common.choose_device(settings.device_type)
    dtype = common.choose_dtype(device)
    matmul = settings.matmul if settings.matmul != "auto" else ("bf16" if dtype.name == "bfloat16" else "fp32")
    common.check_matmul(device, matmul)
    data_dir, folder = common.data_dir(), common.checkpoint_dir(settings.tag, stage=stage.folder)
    tokens = tokenizer.load(common.tokenizer_dir())
    sizes = tokenizer.load_token_bytes(common.tokenizer_dir(), tokens.vocab_size)
    config = model_config(settings, tokens.vocab_size)
    if packs(settings.sync) and config.n_embd % LEAST_BLOCK:
        refuse(settings, "sync", f"a model {config.n_embd} wide does not divide into blocks of {LEAST_BLOCK}; use bf16")
    plan = stage.plan(settings, config)
    asked, settings = settings, fit(settings, plan.num_iterations, comm.world, device)
    shares = rank_shares(settings, plan.total_batch_size, comm.world)
    tokens_of_ranks = [n * settings.max_seq_len for n in shares]
    settings = fit_head(settings, config, tokens_of_ranks, device)
    comm.enter("agree", 0)
    agree(comm, facts(settings, stage, device, dtype, matmul, data_dir))
    route = numerics.setup().route if device == "cpu" else device
    check_memory(config, device, settings, shares, comm)
    model = GPT(config).to(device)
    model.init_weights()
    begun = first_shares(settings, shares)
    machinery = make_machinery(settings, comm, model, plan, begun, matmul)
    run = Run(
        settings, stage, comm, journal, device, dtype, matmul, tokens, sizes, data_dir, folder,
        folder_leader(comm, folder), begun, plan, model, machinery, Progress(), Feed(), new_balancer(model, begun),
    )  # fmt: skip
    run.feed.take_shares(run.sync, run.passes)
    say_setup(run, asked, f"{matmul} through {route}")
    restore(run)
    begin_apart(run)
    start_alike(comm, run.weights)
    return run


def first_shares(settings: Settings, rows: list[int]) -> Shares:
    """What the ranks begin with."""
    return Shares(rows, list(settings.head_shares) or [1] * len(rows) if settings.head == "shared" else [])


def make_machinery(
    settings: Settings, comm: Comm, model: GPT, plan: TrainingPlan, shares: Shares, matmul: str, apart: bool = False
) -> Machinery:
    """All that depends on what the ranks have of a step; apart: of one that each makes by itself, with a whole head."""
    tokens_of_ranks = [rows * settings.max_seq_len for rows in shares.rows]
    rates = LearningRates(settings.embedding_lr, settings.unembedding_lr, settings.matrix_lr, settings.scalar_lr)
    head = None if apart else make_head(settings, comm, model, shares, MATMUL_TYPES[matmul])
    training = TrainingPass(model, matmul, head)
    optimizer = Optimizer(model, rates.scaled(plan.lr_scale), matmul, head.rows if head else ALL_ROWS)
    if apart:
        return Machinery(training, optimizer, make_local(settings, comm, training, optimizer, tokens_of_ranks))
    speeds = shares.head if len(set(shares.head)) > 1 else ()
    sync = make_sync(settings.sync, comm, training, optimizer, tokens_of_ranks, speeds)
    return Machinery(training, optimizer, sync)


def new_balancer(model: GPT, shares: Shares) -> Balancer:
    head_work = 6 * model.parameter_counts()["lm_head"] / model.flops_per_token()
    return Balancer(shares, head_work if shares.head else 0.0)


def facts(
    settings: Settings, stage: Stage, device: str, dtype: DtypeChoice, matmul: str, data_dir: Path
) -> dict[str, Any]:
    """What every rank must have alike before the first step."""
    folder = common.tokenizer_dir()
    return {
        # A GPU talks by NCCL and a CPU by Gloo: they would wait for each other until the timeout.
        "device": device,
        "setting": shared_config(settings),
        "dtype": dtype.name,
        "matmul": matmul,
        # Builds for a GPU have the same CPU code.
        "torch": torch.__version__.partition("+")[0],
        "code": code_digest(),
        "tokenizer": file_digest(folder / tokenizer.PICKLE_NAME),
        "tokenizer sizes": file_digest(folder / tokenizer.BYTES_NAME),
        **stage.facts(settings, data_dir),
    }


def head_share(settings: Settings, comm: Comm) -> float:
    """How much of the head's gradient and optimizer state this rank has, at most."""
    if settings.head != "shared" or settings.local_steps:
        return 1.0
    shares = settings.head_shares or (1,) * comm.world
    return shares[comm.rank] / sum(shares)


def check_memory(config: ModelConfig, device: str, settings: Settings, shares: list[int], comm: Comm) -> None:
    """Weights, gradients and optimizer state, and what a meeting after local steps or error feedback takes; a pass needs
    more on top. Of a head that is shared out the weights are here whole, and in a save the whole of its optimizer state."""
    if device != "cpu":
        return
    counts, dummy = counted(config)
    matrices, head = counts["transformer_matrices"], counts["lm_head"]
    tables = counts["wte"] + counts["value_embeds"]
    share = head_share(settings, comm)
    needed = int(4 * (3 * matrices + (3 + share) * head + 3 * tables))
    if packs(settings.sync):
        needed += 4 * (matrices + (head if settings.head != "shared" or settings.local_steps else 0))
    if settings.local_steps:
        # The rows that can have been touched until a meeting: as they were, and as every rank sends what became of them.
        tokens = settings.local_steps * shares[comm.rank] * settings.max_seq_len
        rows = tables * min(1.0, tokens / config.vocab_size)
        wire = ROWS_OF_MEETINGS[settings.sync].dtype.itemsize
        under_way = 2 * 4 if settings.local_overlap else 0
        needed += 4 * 4 * (matrices + head) + int(rows * (4 + under_way + wire * comm.world))
    common.check_memory(needed, f"a model of {counts['total']:,} parameters", common.memory_limit())


def say_setup(run: Run, asked: Settings, products: str) -> None:
    """The lines at start-up that people look for."""
    say, settings, plan, counts = run.journal.say, run.settings, run.plan, run.model.parameter_counts()
    flops, tokens = run.model.flops_per_token(), plan.total_batch_size * plan.num_iterations
    scaling = counts["transformer_matrices"] + counts["lm_head"]
    micro = settings.device_batch_size * settings.max_seq_len
    say("Model config:")
    for name, value in dataclasses.asdict(run.model.config).items():
        say(f"  {name}: {value}")
    say("Parameter counts:")
    for name, count in counts.items():
        say(f"  {name:<24}: {count:,}")
    say(f"Estimated FLOPs per token: {flops:e}")
    say(f"Compute dtype: {run.dtype.name} ({run.dtype.reason}); matrix products: {products}")
    say(f"Scaling LRs by {plan.lr_scale:.4f} for batch size {plan.total_batch_size:,}")
    say(f"Scaling weight decay from {settings.weight_decay:.6f} to {plan.weight_decay:.6f} for depth {settings.depth}")
    say(f"Scaling AdamW LRs by {(768 / run.model.config.n_embd) ** 0.5:.6f} for width {run.model.config.n_embd}")
    say(f"Number of iterations: {plan.num_iterations:,}")
    say(f"Total number of training tokens: {tokens:,}")
    say(f"Tokens : scaling parameters ratio: {tokens / scaling:.2f}")
    say(f"Total training FLOPs estimate: {flops * tokens:e}")
    say(f"Tokens / micro-batch / rank: {settings.device_batch_size} x {settings.max_seq_len} = {micro:,}")
    steps = accumulations(settings, run.shares.rows)
    say(f"Total batch size {plan.total_batch_size:,} => gradient accumulation steps: {steps}")
    if settings.core_metric_every > 0:
        say(f"CORE is not evaluated by this trainer (--core-metric-every {settings.core_metric_every})")
    say(f"Ranks: {run.comm.world}, rows per step: {', '.join(map(str, run.shares.rows))}, sync: {settings.sync}")
    if run.training.shared_head is not None:
        parts = run.training.shared_head.sizes
        say(f"Head: shared out, rows of the vocabulary by rank: {', '.join(map(str, parts))}")
    say_local(run, asked)


def say_local(run: Run, asked: Settings) -> None:
    """What becomes of --local-steps, and of all that needs the ranks alike."""
    say, settings = run.journal.say, run.settings
    if asked.local_steps and not settings.local_steps:
        say("Local steps: none, since there is one rank only")
    if settings.local_steps:
        apart, behind = steps_apart(run.plan.num_iterations), settings.local_overlap
        late = f", which travels behind the next {behind} steps" if behind else ""
        say(
            f"Local steps: the ranks take the mean of what they changed every {settings.local_steps} steps{late}; they make the "
            f"first {apart.start} steps and the last {run.plan.num_iterations - apart.stop} together"
        )
    for name in MEETINGS:
        now, before = getattr(settings, name), getattr(asked, name)
        if now != before:
            say(f"{flag_of(name)} {before} is moved to every {now} steps, where all ranks are alike")


def accumulations(settings: Settings, shares: list[int]) -> str:
    """Micro-batches in a step, by rank where they differ."""
    each = [len(one) for one in passes_of(shares, settings.device_batch_size, together=False)]
    return str(each[0]) if len(set(each)) == 1 else ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(each))


# -- checkpoints


def checkpoint(run: Run) -> dict[str, Any]:
    """What checkpoint_manager.save is to write in this rank's folder; every rank must ask for it together."""
    optimizer = run.sync.whole_state()
    # Each rank goes on at its place in the data, and with matrix products that round as they did.
    loaders = gather_states(run.comm, {**run.feed.loader.state(), "route": numerics.route()})
    feedback = {FEEDBACK_KEY: {"of": feedback_of(run), "values": run.sync.feedback}} if run.sync.feedback else {}
    run.places = Places(run.progress.step, loaders)
    layout = OptimizerLayout.of(run.optimizer, run.comm.world)
    if run.apart:
        # Each rank goes on with its own.
        optimizer["local_of"] = run.comm.rank
    elif run.writer != run.comm.rank:
        # Whoever shares our folder writes the whole; our part is here for upstream, which wants every rank's file.
        return {"optimizer": {**layout.file(optimizer, run.comm.rank, complete=False), **feedback}, "loader": None}
    parts = {"optimizer": {**layout.file(optimizer, run.comm.rank), **feedback}, "loader": {"ranks": loaders}}
    if run.writer != run.comm.rank:
        return parts
    meta = run.meta(position_of(loaders))
    return {**parts, "model": run.weights, "meta": meta}


def restore(run: Run) -> None:
    """Go on from a checkpoint if the settings ask for it; else, or if there is none, begin."""
    settings, comm, folder = run.settings, run.comm, run.checkpoints
    comm.enter("resume")
    sweep(folder)
    found, training = None, Training(lineage.wanted(run.journal.folder), [])
    if settings.resume or settings.resume_from_step >= 0:
        training = find_training(comm, folder, training.id)
        # Before anything comes from other ranks: a step of another training may have the same number.
        set_aside(run, training.steps)
        found = choose_step(comm, folder, settings.resume_from_step, training)
    if not settings.resume:
        set_aside(run, [] if found is None else [step for step in training.steps if step <= found.step])
    run.training_id = name_training(comm, training.id)
    if found is None:
        run.stage.begin(run)
        run.feed.loader, run.places = run.stage.training_loader(run), Places(0, run.stage.begun_places(run))
        return
    files = fetch(comm, folder, found, run.writer)
    with understood(folder, found.step):
        take_up(run, found, files)
    run.saved = [found.step]
    run.journal.say(f"Resuming from step {found.step} of {folder}")


@contextlib.contextmanager
def understood(folder: Path, step: int) -> Iterator[None]:
    """Files that are whole but hold something else than they should are the checkpoint's fault, and told as such."""
    try:
        yield
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {dataset.first_line(error)}"
        raise BadCheckpoint(
            f"the checkpoint of step {step} in {folder} does not hold what it should ({what})."
        ) from None


def take_up(run: Run, found: Found, files: int) -> None:
    """Weights, optimizer, progress and place in the data out of a checkpoint that is here."""
    comm, folder = run.comm, run.checkpoints
    meta = load_meta(folder, found.step)
    check_not_over(run, found.step)
    check_same_model(run, meta, folder, found.step)
    run.base = dict(meta.get("base") or {})
    load_weights(run, folder, found.step)
    take_kept_shares(run, meta)
    if apart_at(run, found.step - 1):
        run.make_again(run.shares, apart=True)
    states = places_of(run, restore_optimizer(run, folder, found, files))
    restore_progress(run.progress, meta, found.step)
    mine = states[comm.rank] if comm.rank < len(states) else None
    if mine and run.device == "cpu" and not numerics.keep(mine.get("route", numerics.route())):
        run.journal.say(f"Step {found.step} was made with products through {mine['route']}, which is not accurate here")
    run.places = Places(found.step, run.stage.dealt(run, states))
    run.feed.loader = run.stage.training_loader(run, place_in_data(meta, states), run.places.ranks)


def take_kept_shares(run: Run, meta: Mapping[str, Any]) -> None:
    """Go on with the shares that the checkpoint was made with, unless the settings have others than they had then."""
    kept = (meta.get("loop_state") or {}).get("shares") if run.settings.rebalance else None
    if kept is None or kept[2] != run.began_with() or bool(kept[1]) != bool(run.shares.head):
        return
    if kept[:2] != list(run.shares):
        run.make_again(Shares(*kept[:2]))
        run.journal.say(f"Rows per step, as the ranks had come to share them out: {', '.join(map(str, kept[0]))}")


def load_weights(run: Run, folder: Path, step: int) -> None:
    try:
        run.model.load_state_dict(load_model(folder, step))
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        raise BadCheckpoint(f"the weights of step {step} in {folder} do not fit this model: {what}.") from None


def set_aside(run: Run, keep: Collection[int]) -> None:
    """Move all other steps out of this folder: they are of another training, or this one is about to make them again, and whoever
    takes the highest step would take theirs."""
    steps = [step for step in checkpoints.steps_in(run.checkpoints) if step not in keep]
    if run.writer == run.comm.rank and (place := checkpoints.set_aside(run.checkpoints, steps)):
        run.journal.say(f"Checkpoints of an earlier run (steps {', '.join(map(str, steps))}) are now in {place}")


def place_in_data(meta: Mapping[str, Any], states: list[dict[str, Any]]) -> Mapping[str, int]:
    """Where all ranks go on in the data that cannot go on exactly: at that of the first rank that reads."""
    cursor = next((state["cursor"] for state in states if "cursor" in state), ())
    if len(cursor) >= len(START) + 1:
        return Cursor(*cursor).position()
    place = meta.get("dataloader_state_dict")
    if not isinstance(place, Mapping):
        raise BadCheckpoint(f"the checkpoint of step {meta.get('step')} does not say where it was in the data.")
    return {"epoch": 1, **place}


def feedback_of(run: Run) -> list[Any]:
    """Whose error feedback it is, and of what: with other ranks, rows or matrices of its own a rank sends something else in the
    same place."""
    owned = sorted(name for name, owner in run.sync.owners.items() if owner == run.comm.rank)
    return [run.comm.rank, run.shares.rows, owned]


def restore_feedback(run: Run, kept: Mapping[str, Any] | None) -> None:
    """What packing had left on this rank, if it was kept and still means the same."""
    if not run.sync.feedback:
        return
    mine = run.sync.feedback
    # That of the head is kept by those only who sent its gradient.
    fits = kept is not None and kept["of"] == feedback_of(run) and mine.keys() <= kept["values"].keys()
    if kept is not None and fits and (fits := all(kept["values"][n].shape == t.shape for n, t in mine.items())):
        for name, values in mine.items():
            values.copy_(kept["values"][name])
    told = run.comm.exchange("the error feedback that was saved", fits, fits=flag)
    zero = [str(rank) for rank, one in enumerate(told) if not one]
    if zero:
        run.journal.say(
            f"Error feedback starts at zero on rank {', '.join(zero)}: none was saved for these ranks and rows"
        )


def restore_optimizer(run: Run, folder: Path, found: Found, files: int) -> dict[str, Any] | None:
    """Momentum, second moments and step count; returns what is known of the loaders of all ranks, if we wrote it."""
    comm, layout = run.comm, OptimizerLayout.of(run.optimizer, run.comm.world)
    file, loaders = load_optimizer(folder, found.step, files)
    own = load_optimizer(folder, found.step, comm.rank)[0] if found.own and files != comm.rank else file
    held = {files: file}
    if run.apart and layout.is_complete(own):
        held = {comm.rank: own}
    elif not layout.is_complete(file):
        others = (rank for rank in optimizer_ranks(folder, found.step) if rank != files)
        held |= {rank: load_optimizer(folder, found.step, rank)[0] for rank in others}
    try:
        state = layout.state(held)
        if not run.apart and any(comm.exchange("whose state was saved", "local_of" in state, fits=flag)):
            settle(comm, state)
        if lost := merge_momentum(comm, state, run.weights, run.optimizer.matrix_names):
            run.journal.say(
                f"Momentum of {len(lost)} of {len(run.optimizer.matrix_names)} matrices was lost with the ranks "
                "that are not here, and starts from zero"
            )
        run.optimizer.load_state_dict(state)
        if isinstance(run.sync, LocalSync) and MOMENTUM_KEY in state:
            run.sync.dense.momentum.copy_(state[MOMENTUM_KEY])
    except Unusable as why:
        run.journal.say(f"Step {found.step}: the optimizer starts without momentum, since {why}")
    restore_feedback(run, own.get(FEEDBACK_KEY))
    return loaders


def places_of(run: Run, loaders: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The places in the data of all ranks that made a checkpoint; none if they did not say."""
    known = None if loaders is None else "mine" in loaders
    kinds = run.comm.exchange("who knows which places", known, fits=maybe(flag))
    if loaders is None or None in kinds:
        return []
    return merge_places(run, loaders) if any(kinds) else list(loaders["ranks"])


def restore_progress(progress: Progress, meta: dict[str, Any], step: int) -> None:
    loop = meta.get("loop_state") or {}
    progress.step = progress.resumed_from = step
    progress.smooth_loss = float(loop.get("smooth_train_loss") or 0.0)
    progress.training_seconds = float(loop.get("total_training_time") or 0.0)
    lowest, last = loop.get("min_val_bpb"), meta.get("val_bpb")
    progress.min_val_bpb = math.inf if lowest is None else float(lowest)
    progress.val_bpb = None if last is None else float(last)


def check_not_over(run: Run, step: int) -> None:
    """Refuse a run that would be over before it goes on."""
    if step > run.plan.num_iterations:
        raise BadCheckpoint(
            f"the checkpoint in {run.checkpoints} is of step {step}, but this run ends at step "
            f"{run.plan.num_iterations}; give a larger --num-iterations, or --resume-from-step."
        )


def check_same_model(run: Run, meta: dict[str, Any], folder: Path, step: int) -> None:
    """Refuse weights of another shape, naming what differs."""
    for name, value in dataclasses.asdict(run.model.config).items():
        kept = meta["model_config"].get(name, value)
        if kept != value:
            raise BadCheckpoint(
                f"the checkpoint of step {step} in {folder} has {name} {kept}, but this run has {value}; "
                "give the settings it was made with, or another --model-tag."
            )
