# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines and events at the start of a run."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence

import torch

from nanochat.kit.expected import matching
from nanochat.kit.settings import Settings, user_config
from nanochat.rules.shares import passes_of
from nanochat.run.state import Run


def say_setup(run: Run, products: str) -> None:
    """The expected lines at start-up."""
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
    say(f"Kernels: {run.kernels.summary()}; torch's vectors: {torch.backends.cpu.get_cpu_capability()}")
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
        say(f"CORE is not supported by this trainer (--core-metric-every {settings.core_metric_every})")
    say(f"Ranks: {run.comm.world}, rows per step: {', '.join(map(str, run.shares.rows))}, sync: {settings.sync}")
    if run.training.shared_head is not None:
        parts = run.training.shared_head.sizes
        say(f"Head: shared, vocabulary rows by rank: {', '.join(map(str, parts))}")


def accumulations(settings: Settings, shares: Sequence[int]) -> str:
    """Micro-batches per step, by rank if they differ."""
    each = [len(one) for one in passes_of(shares, settings.device_batch_size, together=False)]
    return str(each[0]) if len(set(each)) == 1 else ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(each))


def start_event(run: Run, opening: Mapping[str, float] | None = None) -> None:
    """The first event of this attempt, with its environment; opening: when the process began, and when all ranks had met."""
    config, counts = dataclasses.asdict(run.model.config), run.model.parameter_counts()
    steps = run.plan.num_iterations if run.stage.trains else None
    attempt = run.comm.exchange("the name of this attempt", secrets.token_hex(8), fits=matching("[0-9a-f]{16}"))[0]
    run.journal.open_tracker(run.progress.resumed_from is not None)
    run.journal.heartbeat.steps = steps or 0
    run.journal.record(
        "start", run.progress.step, rank=run.comm.rank, world=run.comm.world, run=run.settings.run,
        model={"config": config, "parameters": counts, "flops_per_token": run.model.flops_per_token()},
        settings=user_config(run.settings), dtype=run.dtype.name, dtype_reason=run.dtype.reason, matmul=run.matmul, kernels=run.kernels.on,
        capability=torch.backends.cpu.get_cpu_capability(), steps=steps, total_batch_size=run.plan.total_batch_size,
        resumed_from=run.progress.resumed_from, attempt_id=attempt,
        opening=opening, training=run.training_id, base=run.base or None,
        generation=int(os.environ.get("NANOCHAT_GENERATION") or 0) or None,
        **({"ends": run.ends} if run.plan.timed else {}),
    )  # fmt: skip
