# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sets up a run from its settings, rejects impossible ones early, and prints and records the start."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
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
from nanochat.parallel.agreement import agree, code_digest, start_alike
from nanochat.parallel.balance import Shares
from nanochat.parallel.comm import Comm
from nanochat.parallel.shared_head import decide_head
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.rules.model_size import ModelConfig, flops_per_token, parameters
from nanochat.rules.schedule import WHOLE
from nanochat.rules.shares import passes_of
from nanochat.rules.ways import LEAST_BLOCK, fits
from nanochat.run.checkpoint_manager import file_digest
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
    check_memory(config)
    check_gradients()
    model = GPT(config)
    model.init_weights()
    leader = folder_leader(comm, folder)
    used = kernels.setup(settings.kernels, kernel_shape(config, settings.device_batch_size, matmul))
    run = Run(settings, stage, comm, journal, matmul, used, tokens, sizes, data_dir, folder, leader, plan, model)
    run.last_step = plan.num_iterations - 1
    run.rebuild(Shares(shares, list(settings.head_shares) or [1] * comm.world if settings.head == "shared" else []))
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
        **{f"setting {name}": value for name, value in shared_config(settings).items()},
        "matmul": matmul,
        # GPU builds have the same CPU code.
        "torch": torch.__version__.partition("+")[0],
        "code": code_digest(),
        "tokenizer": file_digest(folder / tokenizer.PICKLE_NAME),
        "tokenizer sizes": file_digest(folder / tokenizer.BYTES_NAME),
        **stage.facts(settings, data_dir),
    }


def check_memory(config: ModelConfig) -> None:
    """Refuse a model for which this machine has too little memory: three numbers for each parameter, at least."""
    total, limit = parameters(config)["total"], common.memory_limit()
    needed = 12 * total
    # Refused before it swaps for an hour or the kernel kills it.
    if limit is not None and needed > limit:
        raise UserError(
            f"a model of {total:,} parameters needs more than {needed / 2**30:.1f} GiB for weights, gradients and optimizer, but this "
            f"machine has {limit / 2**30:.1f} GiB available; lower --depth or --aspect-ratio.",
            Cause.OOM,
        )


# -- what is printed and recorded about it


def say_setup(run: Run, products: str) -> None:
    """The expected lines at start-up."""
    say, settings, plan, counts = run.journal.say, run.settings, run.plan, parameters(run.model.config)
    tokens, scaling = plan.total_batch_size * plan.num_iterations, counts["transformer_matrices"] + counts["lm_head"]
    say(f"Model: {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(run.model.config).items())}")
    say(f"Parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
    say(f"Estimated FLOPs per token: {flops_per_token(run.model.config):e}")
    say(f"Matrix products: {products}")
    say(f"Kernels: {run.kernels.summary()}; torch's vectors: {torch.backends.cpu.get_cpu_capability()}")
    say(f"Scaling LRs by {plan.lr_scale:.4f} for batch size {plan.total_batch_size:,}")
    say(f"Scaling weight decay from {settings.weight_decay:.6f} to {plan.weight_decay:.6f} for depth {settings.depth}")
    say(
        f"Number of iterations: {plan.num_iterations:,}, of {tokens:,} tokens, {tokens / scaling:.2f} per scaling parameter"
    )
    each = [str(len(one)) for one in passes_of(run.shares.rows, settings.device_batch_size, together=False)]
    steps = each[0] if len(set(each)) == 1 else ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(each))
    micro = f"{settings.device_batch_size} x {settings.max_seq_len}"
    say(f"Tokens / micro-batch / rank: {micro} => gradient accumulation steps: {steps}")
    if settings.core_metric_every > 0:
        say(f"CORE is not supported by this trainer (--core-metric-every {settings.core_metric_every})")
    say(f"Ranks: {run.comm.world}, rows per step: {', '.join(map(str, run.shares.rows))}, sync: {settings.sync}")
    if run.sync.head is not None:
        say(f"Head: shared, vocabulary rows by rank: {', '.join(map(str, run.sync.head.sizes))}")


def start_event(run: Run) -> None:
    """The first event of this attempt, with its environment."""
    config, counts = dataclasses.asdict(run.model.config), parameters(run.model.config)
    attempt = run.comm.exchange("the name of this attempt", secrets.token_hex(8))[0]
    run.journal.open_tracker(run.progress.resumed_from is not None)
    run.journal.heartbeat.steps = run.plan.num_iterations
    run.journal.record(
        "start", run.progress.step, rank=run.comm.rank, world=run.comm.world, run=run.settings.run,
        model={"config": config, "parameters": counts, "flops_per_token": flops_per_token(run.model.config)},
        settings=dataclasses.asdict(run.settings), matmul=run.matmul, kernels=run.kernels.on,
        capability=torch.backends.cpu.get_cpu_capability(), steps=run.plan.num_iterations, total_batch_size=run.plan.total_batch_size,
        resumed_from=run.progress.resumed_from, attempt_id=attempt, training=run.training_id, base=run.base or None,
        notices=run.journal.notices, generation=int(os.environ.get("NANOCHAT_GENERATION") or 0) or None,
        **({"ends": run.ends} if run.plan.timed else {}),
    )  # fmt: skip
