# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sets up a run from its settings, rejects impossible ones early, and prints and records the start."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanochat.data import tokenizer
from nanochat.kit import common
from nanochat.kit.common import UserError
from nanochat.kit.settings import Settings, rank_shares, refuse, shared_config
from nanochat.model import kernels, numerics
from nanochat.model.fused import check_gradients, kernel_shape
from nanochat.model.gpt import GPT
from nanochat.parallel.agreement import agree, code_digest, file_digest, start_alike
from nanochat.parallel.balance import Shares
from nanochat.parallel.comm import Comm
from nanochat.parallel.shared_head import decide_head
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.rules.model_size import ModelConfig, flops_per_token, parameters
from nanochat.rules.schedule import WHOLE
from nanochat.rules.shares import passes_of
from nanochat.rules.ways import LEAST_BLOCK, fits, packs
from nanochat.run.deadline import Deadline, end_of_run
from nanochat.run.restore import restore
from nanochat.run.resume import folder_leader
from nanochat.run.stage import RunStage, model_config
from nanochat.run.state import Run


def set_up(settings: Settings, comm: Comm, journal: Journal, stage: RunStage | None = None) -> Run:
    """Build a run; reject what cannot work while that is cheap."""
    stage = stage or RunStage()
    matmul = common.matmul_type(settings.matmul)
    data_dir, folder = common.data_dir(), common.checkpoint_dir(settings.tag, stage.folder)
    tokens = tokenizer.load(common.tokenizer_dir())
    sizes = tokenizer.load_token_bytes(common.tokenizer_dir(), tokens.vocab_size)
    config = model_config(settings, tokens.vocab_size)
    if not fits(settings.sync, config.n_embd):
        refuse(
            settings, "sync", f"a model {config.n_embd} wide cannot be divided into blocks of {LEAST_BLOCK}; use bf16"
        )
    plan = stage.plan(settings, config)
    shares = rank_shares(settings, plan.total_batch_size, comm.world)
    tokens_of_ranks = [n * settings.max_seq_len for n in shares]
    settings = decide_head(settings, config, tokens_of_ranks)
    comm.enter("agree", 0)
    agree(comm, facts(settings, stage, matmul, data_dir))
    route = numerics.setup().route
    check_memory(config, settings, comm)
    check_gradients()
    model = GPT(config)
    model.init_weights()
    leader = folder_leader(comm, folder)
    run = Run(settings, stage, comm, journal, matmul, tokens, sizes, data_dir, folder, leader, plan, model)
    run.last_step = plan.num_iterations - 1
    run.rebuild(Shares(shares, list(settings.head_shares) or [1] * comm.world if settings.head == "shared" else []))
    shape = kernel_shape(config, settings.device_batch_size, matmul)
    run.kernels = kernels.setup(settings.kernels, shape)
    say_setup(run, f"{matmul} through {route}")
    if settings.save_on_loss and run.sync.undoable and run.optimizer.undo is None:
        size = run.optimizer.undo_bytes() / 2**20
        run.journal.say(
            f"A rank lost during an update costs steps: too little memory is free to copy what it changes ({size:.0f} MiB)"
        )
    restore(run)
    start_alike(comm, run.weights)
    if plan.timed:
        take_time(run)
    return run


def take_time(run: Run) -> None:
    """Start the clock of a timed run, by rank 0's clock."""
    progress, settings = run.progress, run.settings
    # Before the pace is known, no step is the last one.
    run.last_step = max(progress.step + 2, run.last_step)
    # Any rank may become rank 0 at the next restart, so each must know the end by its own host's clock.
    run.ends = end_of_run(run.journal.folder, os.environ)
    if run.comm.rank == 0:
        save_bytes = 12 * sum(tensor.numel() for tensor in run.weights.values())
        eval_steps = settings.eval_tokens / run.plan.total_batch_size if settings.eval_every > 0 else 0.0
        run.deadline = Deadline(run.ends - time.time(), save_bytes, eval_steps)
        when, left = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.ends)), run.ends - time.time()
        run.journal.say(f"Ends at {when}, in {left / 60:.1f} minutes; {100 * progress.place / WHOLE:.1f}% is done")


def facts(settings: Settings, stage: RunStage, matmul: str, data_dir: Path) -> dict[str, Any]:
    """What all ranks must have in common before the first step."""
    folder = common.tokenizer_dir()
    return {
        "setting": shared_config(settings),
        "matmul": matmul,
        # GPU builds have the same CPU code.
        "torch": torch.__version__.partition("+")[0],
        "code": code_digest(),
        "tokenizer": file_digest(folder / tokenizer.PICKLE_NAME),
        "tokenizer sizes": file_digest(folder / tokenizer.BYTES_NAME),
        **stage.facts(settings, data_dir),
    }


def check_memory(config: ModelConfig, settings: Settings, comm: Comm) -> None:
    """Check the memory for weights, gradients, optimizer state and error feedback; a pass needs more."""
    counts = parameters(config)
    matrices, head = counts["transformer_matrices"], counts["lm_head"]
    tables, copies = counts["wte"] + counts["value_embeds"], 4.0
    if settings.head == "shared":
        # Gradient and optimizer state are those of this rank's part, but in a save it has the whole state besides.
        shares = settings.head_shares or (1,) * comm.world
        copies = 3 + 3 * shares[comm.rank] / sum(shares)
    needed = int(4 * (3 * matrices + copies * head + 3 * tables))
    if packs(settings.sync):
        needed += 4 * (matrices + (head if settings.head != "shared" else 0))
    limit = common.memory_limit()
    # Refused before it swaps for an hour or the kernel kills it.
    if limit is not None and needed > limit:
        raise UserError(
            f"a model of {counts['total']:,} parameters needs about {needed / 2**30:.1f} GiB for weights, gradients and optimizer, "
            f"but this machine has {limit / 2**30:.1f} GiB available; lower --depth, --aspect-ratio or --device-batch-size.",
            Cause.OOM,
        )


# -- what is printed and recorded about it


def say_setup(run: Run, products: str) -> None:
    """The expected lines at start-up."""
    say, settings, plan, counts = run.journal.say, run.settings, run.plan, parameters(run.model.config)
    flops, tokens = flops_per_token(run.model.config), plan.total_batch_size * plan.num_iterations
    scaling = counts["transformer_matrices"] + counts["lm_head"]
    micro = settings.device_batch_size * settings.max_seq_len
    say("Model config:")
    for name, value in dataclasses.asdict(run.model.config).items():
        say(f"  {name}: {value}")
    say("Parameter counts:")
    for name, count in counts.items():
        say(f"  {name:<24}: {count:,}")
    say(f"Estimated FLOPs per token: {flops:e}")
    say(f"Matrix products: {products}")
    say(f"Kernels: {run.kernels.summary()}; torch's vectors: {torch.backends.cpu.get_cpu_capability()}")
    say(f"Scaling LRs by {plan.lr_scale:.4f} for batch size {plan.total_batch_size:,}")
    say(f"Scaling weight decay from {settings.weight_decay:.6f} to {plan.weight_decay:.6f} for depth {settings.depth}")
    say(f"Scaling AdamW LRs by {(768 / run.model.config.n_embd) ** 0.5:.6f} for width {run.model.config.n_embd}")
    say(f"Number of iterations: {plan.num_iterations:,}")
    say(f"Total number of training tokens: {tokens:,}")
    say(f"Tokens : scaling parameters ratio: {tokens / scaling:.2f}")
    say(f"Total training FLOPs estimate: {flops * tokens:e}")
    say(f"Tokens / micro-batch / rank: {settings.device_batch_size} x {settings.max_seq_len} = {micro:,}")
    each = [str(len(one)) for one in passes_of(run.shares.rows, settings.device_batch_size, together=False)]
    steps = each[0] if len(set(each)) == 1 else ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(each))
    say(f"Total batch size {plan.total_batch_size:,} => gradient accumulation steps: {steps}")
    if settings.core_metric_every > 0:
        say(f"CORE is not supported by this trainer (--core-metric-every {settings.core_metric_every})")
    say(f"Ranks: {run.comm.world}, rows per step: {', '.join(map(str, run.shares.rows))}, sync: {settings.sync}")
    if run.sync.head is not None:
        say(f"Head: shared, vocabulary rows by rank: {', '.join(map(str, run.sync.head.sizes))}")


def start_event(run: Run, opening: Mapping[str, float] | None = None) -> None:
    """The first event of this attempt, with its environment; opening: when the process began, and when all ranks had met."""
    config, counts = dataclasses.asdict(run.model.config), parameters(run.model.config)
    attempt = run.comm.exchange("the name of this attempt", secrets.token_hex(8))[0]
    run.journal.open_tracker(run.progress.resumed_from is not None)
    run.journal.heartbeat.steps = run.plan.num_iterations
    run.journal.record(
        "start", run.progress.step, rank=run.comm.rank, world=run.comm.world, run=run.settings.run,
        model={"config": config, "parameters": counts, "flops_per_token": flops_per_token(run.model.config)},
        settings=dataclasses.asdict(run.settings), matmul=run.matmul, kernels=run.kernels.on,
        capability=torch.backends.cpu.get_cpu_capability(), steps=run.plan.num_iterations, total_batch_size=run.plan.total_batch_size,
        resumed_from=run.progress.resumed_from, attempt_id=attempt,
        opening=opening, training=run.training_id, base=run.base or None,
        notices=run.journal.notices, generation=int(os.environ.get("NANOCHAT_GENERATION") or 0) or None,
        **({"ends": run.ends} if run.plan.timed else {}),
    )  # fmt: skip
