# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sets up a run from its settings, and rejects impossible ones early."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from nanochat.data import tokenizer
from nanochat.kit import common
from nanochat.kit.common import DtypeChoice
from nanochat.kit.settings import Settings, rank_shares, refuse, shared_config
from nanochat.model import kernels, numerics
from nanochat.model.fused import kernel_shape
from nanochat.model.gpt import GPT, ModelConfig, counted
from nanochat.parallel.agreement import agree, code_digest, file_digest, start_alike
from nanochat.parallel.comm import Comm
from nanochat.parallel.shared_head import decide_head
from nanochat.record.journal import Journal
from nanochat.rules.schedule import WHOLE
from nanochat.rules.ways import LEAST_BLOCK, fits, packs
from nanochat.run.deadline import Deadline, told_end
from nanochat.run.feed import Feed
from nanochat.run.machinery import first_shares, make_machinery, new_balancer
from nanochat.run.opening import say_setup
from nanochat.run.restore import restore
from nanochat.run.resume import folder_leader
from nanochat.run.stage import Stage, model_config
from nanochat.run.state import Progress, Run


def set_up(settings: Settings, comm: Comm, journal: Journal, stage: Stage | None = None) -> Run:
    """Build a run; reject what cannot work while that is cheap."""
    stage = stage or Stage()
    device = common.choose_device(settings.device_type)
    dtype = common.choose_dtype(device)
    matmul = settings.matmul if settings.matmul != "auto" else ("bf16" if dtype.name == "bfloat16" else "fp32")
    common.check_matmul(device, matmul)
    data_dir, folder = common.data_dir(), common.checkpoint_dir(settings.tag, stage=stage.folder)
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
    settings = decide_head(settings, config, tokens_of_ranks, device)
    comm.enter("agree", 0)
    agree(comm, facts(settings, stage, device, dtype, matmul, data_dir))
    route = numerics.setup().route if device == "cpu" else device
    check_memory(config, device, settings, comm)
    model = GPT(config).to(device)
    model.init_weights()
    begun = first_shares(settings, shares)
    machinery = make_machinery(settings, comm, model, plan, begun, matmul)
    run = Run(
        settings, stage, comm, journal, device, dtype, matmul, tokens, sizes, data_dir, folder,
        folder_leader(comm, folder), begun, plan, model, machinery, Progress(), Feed(), new_balancer(model, begun),
    )  # fmt: skip
    run.feed.take_shares(run.sync, run.passes)
    shape = kernel_shape(config, settings.device_batch_size, matmul)
    run.kernels = kernels.setup(settings.kernels if device == "cpu" else "torch", shape)
    say_setup(run, f"{matmul} through {route}")
    if settings.save_on_loss and machinery.sync.undoable and machinery.optimizer.undo is None:
        size = machinery.optimizer.undo_bytes() / 2**20
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
    run.began_at = (progress.step, progress.place)
    # Any rank may become rank 0 at the next restart, so each must know the end by its own host's clock.
    run.ends = told_end(run.journal.folder, os.environ)
    if run.comm.rank == 0:
        save_bytes = 12 * sum(tensor.numel() for tensor in run.weights.values())
        eval_steps = settings.eval_tokens / run.plan.total_batch_size if settings.eval_every > 0 else 0.0
        run.deadline = Deadline(run.ends - time.time(), progress.place, save_bytes, eval_steps)
        when, left = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.ends)), run.ends - time.time()
        run.journal.say(f"Ends at {when}, in {left / 60:.1f} minutes; {100 * progress.place / WHOLE:.1f}% is done")


def facts(
    settings: Settings, stage: Stage, device: str, dtype: DtypeChoice, matmul: str, data_dir: Path
) -> dict[str, Any]:
    """What all ranks must have in common before the first step."""
    folder = common.tokenizer_dir()
    return {
        # A GPU uses NCCL and a CPU Gloo: they would wait for each other until the timeout.
        "device": device,
        "setting": shared_config(settings),
        "dtype": dtype.name,
        "matmul": matmul,
        # GPU builds have the same CPU code.
        "torch": torch.__version__.partition("+")[0],
        "code": code_digest(),
        "tokenizer": file_digest(folder / tokenizer.PICKLE_NAME),
        "tokenizer sizes": file_digest(folder / tokenizer.BYTES_NAME),
        **stage.facts(settings, data_dir),
    }


def head_share(settings: Settings, comm: Comm) -> float:
    """This rank's maximum fraction of the head's gradient and optimizer state."""
    if settings.head != "shared":
        return 1.0
    shares = settings.head_shares or (1,) * comm.world
    return shares[comm.rank] / sum(shares)


def check_memory(config: ModelConfig, device: str, settings: Settings, comm: Comm) -> None:
    """Check the memory for weights, gradients, optimizer state and error feedback; a pass needs more. With a shared head each rank
    holds all of its weights, and all of its optimizer state in a save."""
    if device != "cpu":
        return
    counts, dummy = counted(config)
    matrices, head = counts["transformer_matrices"], counts["lm_head"]
    tables = counts["wte"] + counts["value_embeds"]
    share = head_share(settings, comm)
    needed = int(4 * (3 * matrices + (3 + share) * head + 3 * tables))
    if packs(settings.sync):
        needed += 4 * (matrices + (head if settings.head != "shared" else 0))
    common.check_memory(needed, f"a model of {counts['total']:,} parameters", common.memory_limit())
