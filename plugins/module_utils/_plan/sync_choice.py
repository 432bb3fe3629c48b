# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides ddp_sync and ddp_head if auto: as the run began, or the best by the measurements."""

from __future__ import annotations

import dataclasses
from typing import List, NamedTuple, Optional, Sequence, Tuple

from .._contract.settings import Asked
from .._contract.settings_table import AUTO
from .._rules.model_size import Shape
from .._rules.ways import WAYS
from .batch import SharedBatch
from .decided import DEFAULT, HOSTS, KEPT, MEASURED, TRAINER, USER, Basis, Decision, as_set, may_lose_hosts
from .hosts import Host
from .model_size import describe
from .settings_checks import packing_problems
from .step_model import NEARLY_AS_FAST, Link, Speed, StepJob, choose_sync, links_of, predict, speeds_of, subject


class WayDecided(NamedTuple):
    """How the ranks reach one model."""

    sync: Decision[str]
    head: Decision[str]
    head_open: bool


def decide_way(asked: Asked, basis: Basis, shape: Shape, by_rank: Sequence[Host], batch: SharedBatch) -> WayDecided:
    """Decide ddp_sync and ddp_head for hosts by rank, with the rows of the batch by rank."""
    kept = sync_of_run(by_rank, basis, shape)
    sync = _sync(asked, kept or "exact", KEPT if kept else DEFAULT)
    # A part of a shared head is lost with its host, and with it all steps since the last checkpoint.
    stays_whole = asked.run.head == AUTO and may_lose_hosts(basis, len(by_rank))
    wanted = "whole" if stays_whole or not basis.ours else asked.run.head
    job = _job(asked, basis, shape, by_rank, batch).with_way(sync.value, wanted)
    known = _measured(basis, by_rank, job)
    best = choose_sync(job, *known, batch.rows) if known and not kept else None
    if best is not None:
        sync = _sync(asked, best, MEASURED)
        job = job.with_way(sync.value, wanted)
    if stays_whole and known and _sharing_pays(job, *known):
        stays_whole, job = False, job.with_way(sync.value, AUTO)
    return WayDecided(sync, _head(asked, basis, job, stays_whole), job.head_open)


def sync_of_run(hosts: Sequence[Host], basis: Basis, shape: Shape) -> Optional[str]:
    """The resumed run's ddp_sync, so that no new measurement changes it. None if there is none, or if the settings now rule it
    out."""
    if not basis.ours:
        return None
    sync = next((host.kept["sync"] for host in hosts if host.kept.get("sync") in WAYS), None)
    return None if sync is None or any(packing_problems(sync, shape)) else sync


def _sync(asked: Asked, sync: str, by: str) -> Decision[str]:
    """ddp_sync as the user set it, or this one if it is auto."""
    return Decision(sync, by) if asked.run.sync == AUTO else as_set(asked, "sync")


def _job(asked: Asked, basis: Basis, shape: Shape, by_rank: Sequence[Host], batch: SharedBatch) -> StepJob:
    """The job before the method is decided."""
    run = asked.run
    return StepJob(
        hosts=tuple(host.name for host in by_rank),
        rows=tuple(batch.rows),
        model=describe(shape),
        total_batch=batch.total_batch,
        device_batch=batch.device_batch,
        iterations=basis.iterations.value,
        sync_open=run.sync == AUTO,
    )


def _head(asked: Asked, basis: Basis, job: StepJob, stays_whole: bool) -> Decision[str]:
    if stays_whole:
        return Decision(job.head, DEFAULT, "losing a host would lose its part of the head")
    if not basis.ours:
        return Decision(job.head, TRAINER)
    return Decision(job.head, USER) if job.head == asked.run.head else Decision(job.head, HOSTS, "it sends fewer bytes")


def _sharing_pays(job: StepJob, speeds: List[Speed], link: Optional[Link]) -> bool:
    """Whether sharing the head makes a step clearly faster."""
    shared, whole = (
        predict(dataclasses.replace(job, head=one), speeds, link, job.rows).seconds for one in ("shared", "whole")
    )
    return shared < NEARLY_AS_FAST * whole


def _measured(basis: Basis, by_rank: Sequence[Host], job: StepJob) -> Optional[Tuple[List[Speed], Optional[Link]]]:
    """The measured speeds and slowest link of these hosts with this model; None if one is missing."""
    if len(by_rank) < 2 or not basis.ours:
        return None
    found = {host.name: host.measured for host in by_rank}
    speeds = speeds_of(job.hosts, found)
    if not speeds or any(one.get("subject") != subject(job.model, job.device_batch) for one in found.values()):
        return None
    return speeds, links_of(list(found.values()))
