# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides ddp_sync, ddp_local_steps and ddp_head if auto: as the run began, or the best by the measurements."""

from __future__ import annotations

import dataclasses
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import Asked
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import AUTO, RunSettings
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import stages
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.batch import Batch
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.decided import (
    DEFAULT,
    HOSTS,
    KEPT,
    MEASURED,
    STAGE,
    TRAINER,
    USER,
    Basis,
    Decision,
    as_set,
    may_lose_hosts,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.local_choice import SyncChoice, chosen
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import describe
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.settings_checks import way_problems
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    NEARLY_AS_FAST,
    Job,
    Link,
    Speed,
    links_of,
    mean_step,
    speeds_of,
    subject,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS, can_share

UPSTREAM = "upstream"  # a trainer that is neither ours nor joined has no choice


class WayDecided(NamedTuple):
    """How the ranks reach one model."""

    sync: Decision[str]
    local_steps: Decision[int]
    head: Decision[str]
    head_open: bool


def decide_way(asked: Asked, basis: Basis, shape: Shape, by_rank: Sequence[Host], batch: Batch) -> WayDecided:
    """Decide ddp_sync, ddp_local_steps and ddp_head for hosts by rank, with the rows of the batch by rank, too."""
    kept = way_of_run(asked, by_rank, basis, shape)
    sync, local_steps = _with(asked, basis, kept or SyncChoice("exact", 0), KEPT if kept else DEFAULT)
    # A part of a shared head is lost with its host, and with it all steps since the last checkpoint.
    stays_whole = asked.run.head == AUTO and may_lose_hosts(basis, len(by_rank))
    wanted = "whole" if stays_whole or not basis.ours else asked.run.head
    job = _job(asked, basis, shape, by_rank, batch).with_way(sync.value, local_steps.value, wanted)
    known = _measured(basis, by_rank, job)
    way = chosen(job, *known, batch.rows) if known and not kept else None
    if way is not None:
        sync, local_steps = _with(asked, basis, way, MEASURED)
        job = job.with_way(sync.value, local_steps.value, wanted)
    if stays_whole and known and _sharing_pays(job, *known):
        stays_whole, job = False, job.with_way(sync.value, local_steps.value, AUTO)
    return WayDecided(sync, local_steps, _head(asked, basis, job, stays_whole), job.head_open)


def local_steps_asked(run: RunSettings) -> str:
    """ddp_local_steps as the user set it, for the plan; an evaluation has none."""
    return "0" if run.stage == stages.EVAL else str(run.local_steps)


def way_of_run(asked: Asked, hosts: Sequence[Host], basis: Basis, shape: Shape) -> Optional[SyncChoice]:
    """The resumed run's method, so that no new measurement changes it. None if there is none, or if the settings
    now rule it out."""
    if not basis.ours:
        return None
    found = [(host.kept.get("sync"), host.kept.get("local_steps") or 0) for host in hosts]
    way = next((SyncChoice(sync, local) for sync, local in found if sync in WAYS), None)
    if way is None:
        return None
    sync, local_steps = _with(asked, basis, way, KEPT)
    return None if any(way_problems(sync.value, local_steps.value, asked, hosts, shape, basis)) else way


def findings(decided: WayDecided, master: str) -> List[Finding]:
    """The finding that explains the number of local steps."""
    steps = decided.local_steps
    return [finding("local-steps-chosen", master, steps.why)] if steps.by == MEASURED else []


def _with(asked: Asked, basis: Basis, way: SyncChoice, by: str) -> Tuple[Decision[str], Decision[int]]:
    """(sync, local steps): each as the user set it, or from the way where it is auto."""
    run = asked.run
    sync = Decision(way.sync, by, way.why) if run.sync == AUTO else as_set(asked, "sync", run.sync)
    if not basis.together:
        sync = Decision(UPSTREAM, TRAINER)
    if basis.stage == stages.EVAL:
        return sync, Decision(0, STAGE)
    if not basis.ours:
        return sync, Decision(0, TRAINER)
    if isinstance(run.local_steps, int):
        return sync, as_set(asked, "local_steps", run.local_steps)
    return sync, Decision(way.local_steps, by, way.why)


def _job(asked: Asked, basis: Basis, shape: Shape, by_rank: Sequence[Host], batch: Batch) -> Job:
    """The job before the method is decided."""
    run = asked.run
    return Job(
        hosts=tuple(host.name for host in by_rank),
        rows=tuple(batch.rows),
        model=describe(shape),
        device=basis.device.value,
        total_batch=batch.total_batch,
        device_batch=batch.device_batch,
        iterations=basis.iterations.value,
        sync_open=run.sync == AUTO,
        local_open=local_steps_asked(run) == AUTO,
        every=(run.eval_every, run.sample_every, run.save_every),
    )


def _head(asked: Asked, basis: Basis, job: Job, stays_whole: bool) -> Decision[str]:
    if stays_whole:
        return Decision(job.head, DEFAULT, "losing a host would lose its part of the head")
    if not basis.ours:
        return Decision(job.head, TRAINER)
    return Decision(job.head, USER) if job.head == asked.run.head else Decision(job.head, HOSTS, "it sends fewer bytes")


def _sharing_pays(job: Job, speeds: List[Speed], link: Optional[Link]) -> bool:
    """Whether sharing the head makes a step clearly faster."""
    if not can_share(job.device, job.sync):
        return False
    shared, whole = (
        mean_step(dataclasses.replace(job, head=one), speeds, link, job.rows).seconds for one in ("shared", "whole")
    )
    return shared < NEARLY_AS_FAST * whole


def _measured(basis: Basis, by_rank: Sequence[Host], job: Job) -> Optional[Tuple[List[Speed], Optional[Link]]]:
    """The measured speeds and slowest link of these hosts with this model; None if one is missing."""
    if len(by_rank) < 2 or not basis.ours or basis.device.value != "cpu":
        return None
    found = {host.name: host.measured for host in by_rank}
    speeds = speeds_of(job.hosts, found)
    if not speeds or any(one.get("subject") != subject(job.model, job.device_batch) for one in found.values()):
        return None
    return speeds, links_of(list(found.values()))
