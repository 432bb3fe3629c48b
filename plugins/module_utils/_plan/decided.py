# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what the settings leave open: each host's threads, cores and share of a step, and what else is auto.

The settings themselves stay as the user wrote them; the plan document is made from both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Sequence, Tuple

from .._contract.plan import Model
from .._contract.settings import Asked
from .._contract.settings_table import AUTO, PREFIX, RunSettings, find
from .._rules.model_size import ModelConfig
from .._rules.shares import head_weights, share_rows
from .._rules.ways import WAYS, fits
from . import stages
from .hosts import Host, neighbours, same_machine
from .model_memory import describe, shape_of
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

# Values of ddp_batch_split for which shares follow the speeds.
FOLLOWING = (AUTO, "speed")
# Hosts with a smaller difference in speed count as equally fast: measurements are no more exact.
SAME_SPEED = 1.1
# A default total batch may differ from the profile's by this factor before passes are made smaller instead.
NEAR = 1.5
# Default maximum of rows per pass for unequal hosts: its memory is far below that of weights and optimizer.
MOST_PASS_TOKENS = 8192


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


# Threads, cores, and the rows of a step: by the settings, by threads, or by a measured step


class BatchError(ValueError):
    """The batch cannot be split; the text says what is possible."""


class SharedBatch(NamedTuple):
    """Each rank's rows per step, in passes of device_batch rows."""

    rows: list[int]
    device_batch: int
    total_batch: int


def plan_batch(asked: Asked, weights: Sequence[float], equal: bool = False, kept: Sequence[int] = ()) -> SharedBatch:
    """Split a step by the ranks' weights; sizes that nobody set adapt to the number of hosts.

    `equal` forbids different shares. `kept` are the resumed run's shares, which stay if they fit.
    """
    rows, most = total_rows(asked, len(weights), equal), asked.run.device_batch
    shares = list(kept) if kept and sum(kept) == rows else share_rows(rows, weights)
    if len(set(shares)) == 1:
        of_pass = max(size for size in range(1, most + 1) if shares[0] % size == 0)
    else:
        # Unequal hosts wait for each other in each pass, so without a user's limit they make as few as memory allows.
        if "ddp_device_batch" not in asked.given:
            most = max(most, MOST_PASS_TOKENS // asked.run.sequence)
        of_pass = min(max(shares), most)
    return SharedBatch(shares, of_pass, rows * asked.run.sequence)


def total_rows(asked: Asked, world: int, equal: bool) -> int:
    """Rows per step over all ranks; rejects a user's batch that cannot be divided."""
    if "ddp_total_batch" not in asked.given:
        return adapted_rows(asked, world)
    total, factors = asked.run.total_batch, {"ddp_sequence": asked.run.sequence}
    # Unequal shares have a shorter last pass.
    if equal and "ddp_device_batch" in asked.given:
        factors["ddp_device_batch"] = asked.run.device_batch
    if equal and world > 1:
        factors[f"{world} hosts"] = world
    unit, least = math.prod(factors.values()), asked.run.sequence * world
    if total % unit or total < unit:
        product = " x ".join(map(str, factors.values())) + (f" = {unit}" if len(factors) > 1 else "")
        near = [str(count * unit) for count in (total // unit, total // unit + 1) if count]
        raise BatchError(
            f"ddp_total_batch {total} is not a multiple of {' x '.join(factors)} = {product}; use {' or '.join(near)}."
        )
    if total < least:
        raise BatchError(f"ddp_total_batch {total} has too few rows for {world} hosts; use {least} or more.")
    return total // asked.run.sequence


def adapted_rows(asked: Asked, world: int) -> int:
    """The profile's rows, or the nearest number that this many hosts can share equally, in smaller passes where that is far off."""
    profile, most = max(1, asked.run.total_batch // asked.run.sequence), asked.run.device_batch
    halvings = 1 if "ddp_device_batch" in asked.given else most.bit_length()
    units = [(most >> times) * world for times in range(halvings)]
    nearest = [max(1, (profile + unit // 2) // unit) * unit for unit in units]

    def apart(rows: int) -> float:
        return max(rows, profile) / min(rows, profile)

    return next((rows for rows in nearest if apart(rows) <= NEAR), min(nearest, key=apart))


def threads_of(host: Host, hosts: Sequence[Host]) -> int:
    """One thread per fast core; nodes of one machine share them."""
    if host.settings.threads:
        return int(host.settings.threads)
    if pinned := cores_of(host, hosts):
        return len(pinned)
    physical = int(host.fact("cpu", "available_physical") or 1)
    fast = len(host.fact("cpu", "fast") or []) or physical
    return max(1, min(fast, physical) // neighbours(host, hosts))


def cores_of(host: Host, hosts: Sequence[Host]) -> list[int] | None:
    """The processors to pin a rank to: as in the run so far, or the fast cores where the host has others beside them; None
    leaves it to the kernel."""
    if host.settings.threads or neighbours(host, hosts) > 1:
        return None
    allowed, fast = host.fact("cpu", "allowed") or [], host.fact("cpu", "fast") or []
    if host.kept_share:
        kept = host.kept_share.get("cores")
        return list(kept) if kept and set(kept) <= set(allowed) else None
    # A quota gives some time of any processors.
    limited = len(fast) > (host.fact("cpu", "available_physical") or 0)
    return list(fast) if len(fast) < len(allowed) and not limited else None


def weights_of(split: str, hosts: Sequence[Host]) -> tuple[list[float], list[str]]:
    """(the hosts' weights according to `ddp_batch_split`, problems); by threads where no speed or not every one is known."""
    equal, threads = [1.0] * len(hosts), [float(threads_of(host, hosts)) for host in hosts]
    measured = {host.name: float(host.measured.get("tokens_per_second") or 0.0) for host in hosts}
    speeds: list[float | None] = []
    for host in hosts:
        # Nodes of one machine were measured beside each other and count the same.
        beside = [measured[other.name] for other in hosts if same_machine(host, other)] or [measured[host.name]]
        speeds.append(host.settings.speed or (sum(beside) / len(beside) if all(beside) else None))
    known = [speed for speed in speeds if speed]
    if len(known) < len(hosts):
        missing = " and ".join(host.name for host, speed in zip(hosts, speeds) if not speed)
        how = "run preflight to measure it, or set ddp_speed for every host"
        problem = f"ddp_batch_split is speed, but the speed of {missing} is unknown; {how}"
        return threads if split in ("threads", "speed") else equal, [problem] if split == "speed" and known else []
    if split == AUTO:
        return equal if max(known) <= min(known) * SAME_SPEED else known, []
    return {"equal": equal, "threads": threads}.get(split, known), []


def kept_shares(hosts: Sequence[Host]) -> tuple[Sequence[int], Sequence[int]]:
    """The resumed run's (rows, parts of the head), if it has these hosts; otherwise each new measurement would start it over."""
    found = [
        {name: (share["rows"], share["head_share"]) for name, share in (host.kept.get("shares") or {}).items()}
        for host in hosts
    ]
    is_same = set(found[0]) == {host.name for host in hosts} and all(other == found[0] for other in found)
    if not is_same or any(host.settings.speed for host in hosts):
        return (), ()
    rows, parts = zip(*(found[0][host.name] for host in hosts))
    return rows if min(rows) > 0 else (), parts if min(parts) > 0 else ()


def shared_out(asked: Asked, hosts: Sequence[Host]) -> tuple[SharedBatch, Sequence[int], list[str]]:
    """(the rows of a step split among the hosts, in their order, their parts of a shared head, problems); equal if the batch cannot be
    split."""
    run, world = asked.run, len(hosts)
    weights, problems = weights_of(run.batch_split, hosts)
    rows, parts = kept_shares(hosts) if run.batch_split in FOLLOWING else ((), ())
    try:
        batch = plan_batch(asked, weights, run.batch_split == "equal", rows)
    except BatchError as error:
        batch = SharedBatch([run.device_batch] * world, run.device_batch, run.total_batch)
        return batch, [1] * world, [*problems, str(error)]
    # Parts of the head are finer than rows.
    return batch, parts or head_weights(weights), problems
