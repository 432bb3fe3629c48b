# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what the settings leave open, and records who decided it and why.

The settings themselves stay as the user wrote them; the plan document is made from both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Generic, List, Optional, Sequence, Tuple, TypeVar

from .._contract.settings import Asked
from .._contract.settings_table import AUTO, PREFIX, find
from .._rules.model_size import Shape
from .._rules.ways import WAYS, fits
from . import matmul_precision, stages
from .hosts import Host
from .model_size import describe
from .shares import FOLLOWING, HostShares
from .step_model import NEARLY_AS_FAST, Link, Speed, StepJob, choose_sync, links_of, predict, speeds_of, subject

T = TypeVar("T")

# Authors of decisions.
USER = "user"
DEFAULT = "default"
PROFILE = "profile"
TRAINER = "trainer"  # the trainer supports nothing else
KEPT = "resumed run"
MEASURED = "measured"
HOSTS = "hosts"  # their number, cores or devices


@dataclasses.dataclass(frozen=True)
class Decision(Generic[T]):
    """A value, its author, and the reason if not obvious."""

    value: T
    by: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The precision of matrix products, and those that the rehearsal measures, if it may choose."""

    taken: Decision[str]
    tried: Tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Decided:
    """All decisions of a plan."""

    name: str  # of the run
    stage: str
    ours: bool  # whether this collection's trainer is used
    timed: bool  # whether it ends at a time, and the iterations are an estimate
    matmul: Decision[str]
    matmul_tried: Tuple[str, ...]
    iterations: Decision[int]
    restarts: Decision[int]
    min_hosts: Decision[int]
    survive_reboot: Decision[bool]
    batch_split: Decision[str]
    total_batch: Decision[int]
    device_batch: Decision[int]
    rows: Tuple[int, ...]  # of a step, by rank
    head_parts: Tuple[int, ...]  # weights of the parts of a shared head, by rank
    sync: Decision[str]
    head: Decision[str]
    head_open: bool  # whether another ddp_sync may have another head
    rebalance: bool  # whether the shares follow the speeds while training
    save_minutes: Decision[int]

    @property
    def goes_on(self) -> bool:
        """Whether the trainer finds the newest checkpoint itself, and removes older ones."""
        return self.ours or self.stage == stages.BASE

    @property
    def head_shares(self) -> Tuple[int, ...]:
        """The weights of unequal parts, if any."""
        return self.head_parts if self.head.value == "shared" and len(set(self.head_parts)) > 1 else ()

    def reasons(self) -> Dict[str, Dict[str, object]]:
        """Every decision for people and programs: {name: {value, by, why}}."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dataclasses.asdict(one) for name, one in found.items() if isinstance(one, Decision)}


def as_set(asked: Asked, field: str) -> Decision[Any]:
    """A decision that just repeats a setting. An inventory that repeats a default decides nothing."""
    row, value = find(PREFIX + field), getattr(asked.run, field)
    is_set = row.name in asked.given and value != row.default
    return Decision(value, USER if is_set else PROFILE if row.from_profile else DEFAULT)


def decide_matmul(asked: Asked, hosts: Sequence[Host]) -> Matmul:
    """As set, as the run began, or as measured, where every CPU has the instructions."""
    run = asked.run
    if run.matmul != AUTO:
        return Matmul(as_set(asked, "matmul"), (run.matmul,))
    if run.trainer_source != "ours" or not all(host.fact("cpu", "native_bf16") for host in hosts):
        return Matmul(Decision("fp32", DEFAULT), ("fp32",))
    began_with = [host.kept.get("matmul") for host in hosts]
    kept = next((matmul for matmul in matmul_precision.TRIED if matmul in began_with), None)
    speeds = matmul_precision.speeds_together([host.measured for host in hosts])
    measured = Decision(matmul_precision.fastest(speeds), MEASURED if speeds else DEFAULT)
    return Matmul(Decision(kept, KEPT) if kept else measured, matmul_precision.TRIED)


def decide_restarts(asked: Asked) -> Decision[int]:
    """Whether keepers restart the run; by itself only where the trainer can."""
    restarts = as_set(asked, "restarts")
    if restarts.by == USER or (asked.run.trainer_source == "ours" and asked.run.resume):
        return restarts
    return Decision(0, TRAINER, "restarts need ddp_resume and this collection's trainer")


def decide_batch_split(asked: Asked) -> Decision[str]:
    """Only our own trainer supports unequal shares."""
    split = as_set(asked, "batch_split")
    return Decision("equal", TRAINER) if split.value == AUTO and asked.run.trainer_source != "ours" else split


def decide(
    asked: Asked, matmul: Matmul, shape: Shape, by_rank: Sequence[Host], hosts: Sequence[Host], shared: HostShares
) -> Decided:
    """All decisions; hosts in the order of the shares, of which there are none if the batch cannot be split."""
    run, batch, world = asked.run, shared.batch, len(hosts)
    ours = run.trainer_source == "ours"
    share_of = {host.name: share for host, share in zip(hosts, batch.rows)}
    rows = tuple(share_of.get(host.name, batch.device_batch) for host in by_rank)
    restarts, split = decide_restarts(asked), decide_batch_split(asked)
    min_hosts, survive_reboot, may_lose_hosts = decide_keepers(asked, restarts, world)
    iterations = as_set(asked, "sft_iterations" if run.stage == stages.SFT else "iterations")
    names, model = tuple(host.name for host in by_rank), describe(shape)
    job = StepJob(names, rows, model, batch.total_batch, batch.device_batch, run.sync == AUTO)
    sync, head, head_open = decide_sync_and_head(asked, job, by_rank, may_lose_hosts)
    return Decided(
        name=stages.run_name(run),
        stage=run.stage,
        ours=ours,
        timed=bool(run.budget or run.finish_by) and "ddp_iterations" not in asked.given,
        matmul=matmul.taken,
        matmul_tried=matmul.tried,
        iterations=iterations,
        restarts=restarts,
        min_hosts=min_hosts,
        survive_reboot=survive_reboot,
        batch_split=split,
        total_batch=adapted(asked, "total_batch", batch.total_batch),
        device_batch=adapted(asked, "device_batch", batch.device_batch),
        rows=rows,
        head_parts=tuple(shared.head_parts.get(host.name, 1) for host in by_rank),
        sync=sync,
        head=head,
        head_open=head_open,
        rebalance=ours and world > 1 and split.value in FOLLOWING,
        save_minutes=as_set(asked, "save_minutes") if ours else Decision(0, TRAINER),
    )


def decide_keepers(asked: Asked, restarts: Decision[int], world: int) -> Tuple[Decision[int], Decision[bool], bool]:
    """(ddp_min_hosts, ddp_survive_reboot, whether the run may lose hosts because the user said so)."""
    min_hosts, survive_reboot = as_set(asked, "min_hosts"), as_set(asked, "survive_reboot")
    # The profile's number does not make steps slower.
    may_lose_hosts = bool(restarts.value and min_hosts.by == USER and 0 < min_hosts.value < world)
    if min_hosts.by != USER:
        is_half = restarts.value > 0 and asked.run.profile == "real"
        min_hosts = Decision(-(-world // 2), PROFILE, "half of the hosts") if is_half else Decision(0, PROFILE)
    if survive_reboot.by != USER:
        survive_reboot = Decision(restarts.value > 0 and survive_reboot.value, PROFILE)
    return min_hosts, survive_reboot, may_lose_hosts


def adapted(asked: Asked, field: str, value: int) -> Decision[int]:
    """A batch size, adapted to the hosts if nobody set it."""
    is_adapted = value != getattr(asked.run, field)
    return Decision(value, HOSTS, "divides among them") if is_adapted else as_set(asked, field)


def decide_sync_and_head(
    asked: Asked, job: StepJob, by_rank: Sequence[Host], may_lose_hosts: bool
) -> Tuple[Decision[str], Decision[str], bool]:
    """(ddp_sync, ddp_head, whether another ddp_sync may have another head), for hosts by rank with the rows of the job."""
    run, ours = asked.run, asked.run.trainer_source == "ours"
    # A new measurement does not change the method that the run began with, unless the settings now rule it out.
    began_with = next((host.kept["sync"] for host in by_rank if host.kept.get("sync") in WAYS), None)
    kept = began_with if ours and began_with and fits(began_with, job.model["n_embd"]) else None
    sync = Decision(kept or "exact", KEPT if kept else DEFAULT) if run.sync == AUTO else as_set(asked, "sync")
    # A part of a shared head is lost with its host, and with it all steps since the last checkpoint.
    stays_whole = run.head == AUTO and may_lose_hosts
    wanted = "whole" if stays_whole or not ours else run.head
    job = job.with_sync(sync.value, wanted)
    known = _measured(by_rank, job) if ours else None
    best = choose_sync(job, *known, job.rows) if known and not kept else None
    if best is not None:
        sync, job = Decision(best, MEASURED), job.with_sync(best, wanted)
    if stays_whole and known:
        seconds = {
            head: predict(dataclasses.replace(job, head=head), *known, job.rows).seconds for head in ("shared", "whole")
        }
        stays_whole = seconds["shared"] >= NEARLY_AS_FAST * seconds["whole"]
        job = job if stays_whole else job.with_sync(sync.value, AUTO)
    if stays_whole:
        head = Decision(job.head, DEFAULT, "losing a host would lose its part of the head")
    elif not ours:
        head = Decision(job.head, TRAINER)
    else:
        head = Decision(job.head, USER) if job.head == run.head else Decision(job.head, HOSTS, "it sends fewer bytes")
    return sync, head, job.head_open


def _measured(by_rank: Sequence[Host], job: StepJob) -> Optional[Tuple[List[Speed], Optional[Link]]]:
    """The measured speeds and slowest link of these hosts with this model; None if one is missing."""
    found = {host.name: host.measured for host in by_rank}
    speeds = speeds_of(job.hosts, found)
    of_this_job = subject(job.model, job.device_batch)
    if len(by_rank) < 2 or not speeds or any(one.get("subject") != of_this_job for one in found.values()):
        return None
    return speeds, links_of(list(found.values()))
