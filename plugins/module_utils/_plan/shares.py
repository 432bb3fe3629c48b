# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each host's threads and cores, and its share of a step: by the settings, its threads, or a measured step."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

from .._contract.settings import Asked
from .._contract.settings_table import AUTO
from .._rules.shares import head_weights, share_rows
from .hosts import Host, neighbours, same_machine

# Values of ddp_batch_split for which shares follow the speeds.
FOLLOWING = (AUTO, "speed")
# Hosts with a smaller difference in speed count as equally fast: measurements are no more exact.
SAME_SPEED = 1.1
# A default total batch may differ from the profile's by this factor before passes are made smaller instead.
NEAR = 1.5
# Default maximum of rows per pass for unequal hosts: its memory is far below that of weights and optimizer.
MOST_PASS_TOKENS = 8192


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
    pinned = cores_of(host, hosts)
    if pinned:
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
    speeds = speeds_of(hosts)
    known = [speed for speed in speeds if speed]
    if len(known) < len(hosts):
        missing = " and ".join(host.name for host, speed in zip(hosts, speeds) if not speed)
        how = "run preflight to measure it, or set ddp_speed for every host"
        problem = f"ddp_batch_split is speed, but the speed of {missing} is unknown; {how}"
        return threads if split in ("threads", "speed") else equal, [problem] if split == "speed" and known else []
    if split == AUTO:
        return equal if max(known) <= min(known) * SAME_SPEED else known, []
    return {"equal": equal, "threads": threads}.get(split, known), []


def speeds_of(hosts: Sequence[Host]) -> list[float | None]:
    """Each host's speed, if known. Nodes of one machine were measured beside each other and count the same."""
    measured = {host.name: float(host.measured.get("tokens_per_second") or 0.0) for host in hosts}
    found: list[float | None] = []
    for host in hosts:
        beside = [measured[other.name] for other in hosts if same_machine(host, other)] or [measured[host.name]]
        found.append(host.settings.speed or (sum(beside) / len(beside) if all(beside) else None))
    return found


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
