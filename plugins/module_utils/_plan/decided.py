# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what the settings leave open.

The settings themselves stay as the user wrote them; the plan document is made from both.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence, Tuple

from .._contract.plan import Model
from .._contract.settings import Asked
from .._contract.settings_table import AUTO, PREFIX, RunSettings, find
from .._rules.model_size import ModelConfig
from .._rules.ways import WAYS, fits
from . import stages
from .hosts import Host
from .model_memory import describe, shape_of
from .shares import shared_out
from .step_model import (
    NEARLY_AS_FAST,
    PRECISIONS,
    StepJob,
    choose_sync,
    fastest_precision,
    links_of,
    predict,
    speeds_of,
    speeds_together,
)


@dataclasses.dataclass(frozen=True)
class Decided:
    """A run with nothing left open, and what was worked out for its hosts."""

    asked: RunSettings  # as the user wrote them
    run: RunSettings  # the same, decided
    hosts: Sequence[Host]  # by rank
    shape: ModelConfig
    model: Model
    name: str  # of the run
    timed: bool  # whether it ends at a time, and the iterations are an estimate
    matmul_tried: Tuple[str, ...]  # the precisions that a rehearsal measures
    rows: Tuple[int, ...]  # of a step, by rank
    head_parts: Tuple[int, ...]  # weights of the parts of a shared head, by rank
    head_open: bool  # whether another ddp_sync may have another head
    problems: Sequence[str]  # why the batch cannot be shared as asked

    @property
    def head_shares(self) -> Tuple[int, ...]:
        """The weights of unequal parts, if any."""
        return self.head_parts if self.run.head == "shared" and len(set(self.head_parts)) > 1 else ()


def is_set(asked: Asked, field: str) -> bool:
    """Whether somebody set it. An inventory that repeats a default decides nothing."""
    row = find(PREFIX + field)
    return row.name in asked.given and getattr(asked.run, field) != row.default


def decide_matmul(asked: Asked, hosts: Sequence[Host]) -> Tuple[str, Tuple[str, ...]]:
    """The precision of matrix products, and those that the rehearsal measures, if it may choose: as set, as the run began, or as
    measured, where every CPU has the instructions."""
    run = asked.run
    if run.matmul != AUTO:
        return run.matmul, (run.matmul,)
    if not all(host.fact("cpu", "native_bf16") for host in hosts):
        return "fp32", ("fp32",)
    began_with = [host.kept.get("matmul") for host in hosts]
    kept = next((matmul for matmul in PRECISIONS if matmul in began_with), None)
    return kept or fastest_precision(speeds_together([host.measured for host in hosts])), PRECISIONS


def decide_restarts(asked: Asked) -> int:
    """After how many deaths keepers give up; by itself only where the trainer resumes."""
    return asked.run.restarts if asked.run.resume or is_set(asked, "restarts") else 0


def decide(asked: Asked, hosts: Sequence[Host], matmul: str, tried: Tuple[str, ...]) -> Decided:
    """All decisions for hosts in the order of their ranks."""
    run, world = asked.run, len(hosts)
    batch, parts, problems = shared_out(asked, hosts)
    restarts, shape = decide_restarts(asked), shape_of(asked.run)
    names, model = tuple(host.name for host in hosts), describe(shape, run.aspect_ratio)
    job = StepJob(names, tuple(batch.rows), model, batch.total_batch, batch.device_batch, run.sync == AUTO)
    # The profile's number of hosts does not make steps slower.
    chose_hosts = is_set(asked, "min_hosts")
    job = decide_sync_and_head(asked, job, hosts, bool(restarts and chose_hosts and 0 < (run.min_hosts or 0) < world))
    half = -(-world // 2) if restarts and run.profile == "real" else 0
    decided = dataclasses.replace(
        run,
        matmul=matmul,
        iterations=run.sft_iterations if run.stage == stages.SFT else run.iterations,
        restarts=restarts,
        min_hosts=run.min_hosts if chose_hosts else half,
        survive_reboot=run.survive_reboot and (restarts > 0 or is_set(asked, "survive_reboot")),
        total_batch=batch.total_batch,
        device_batch=batch.device_batch,
        sync=job.sync,
        head=job.head,
    )
    return Decided(
        asked=run,
        run=decided,
        hosts=hosts,
        shape=shape,
        model=model,
        name=stages.run_name(run),
        timed=bool(run.budget or run.finish_by) and "ddp_iterations" not in asked.given,
        matmul_tried=tried,
        rows=job.rows,
        head_parts=tuple(parts),
        head_open=job.head_open,
        problems=problems,
    )


def decide_sync_and_head(asked: Asked, job: StepJob, hosts: Sequence[Host], may_lose_hosts: bool) -> StepJob:
    """The job with ddp_sync and ddp_head; may_lose_hosts: because the user said so."""
    run = asked.run
    # A new measurement does not change the method that the run began with, unless the settings now rule it out.
    began_with = next((host.kept["sync"] for host in hosts if host.kept.get("sync") in WAYS), None)
    kept = began_with if began_with and fits(began_with, job.model["n_embd"]) else None
    # A part of a shared head is lost with its host, and with it all steps since the last checkpoint.
    stays_whole = run.head == AUTO and may_lose_hosts
    wanted = "whole" if stays_whole else run.head
    job = job.with_sync((kept or "exact") if run.sync == AUTO else run.sync, wanted)
    # Only what was measured with this model counts.
    measured = [host.measured for host in hosts]
    is_same = all((one.get("model"), one.get("device_batch")) == (job.model, job.device_batch) for one in measured)
    speeds = speeds_of(job.hosts, dict(zip(job.hosts, measured))) if is_same and job.world > 1 else []
    if not speeds:
        return job
    link = links_of(measured)
    best = None if kept else choose_sync(job, speeds, link)
    job = job.with_sync(best, wanted) if best else job
    if stays_whole:
        shared, whole = (
            predict(dataclasses.replace(job, head=head), speeds, link).seconds for head in ("shared", "whole")
        )
        if shared < NEARLY_AS_FAST * whole:
            return job.with_sync(job.sync, AUTO)
    return job
