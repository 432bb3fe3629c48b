# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each host's share of a step, by the settings, its threads, or a measured step."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from .._contract.findings import Finding, finding
from .._contract.settings import Asked
from .._rules.shares import head_weights
from .batch import BatchError, BatchRequest, SharedBatch, plan_batch
from .decided import FOLLOWING
from .hosts import Host, neighbours, same_machine
from .matmul_precision import speed_in

# Hosts with a smaller difference in speed count as equally fast: measurements are no more exact.
SAME_SPEED = 1.1
AVX2 = "avx2"  # as a value of VECTORS_VARIABLE


class Weights(NamedTuple):
    """Each host's weight, with findings about its origin."""

    values: list[float]
    problems: tuple[Finding, ...] = ()


class HostShares(NamedTuple):
    """The batch split among the hosts, and each host's part of a shared head, with problems and remarks."""

    batch: SharedBatch
    head_parts: Mapping[str, int]
    problems: tuple[Finding, ...] = ()


def threads_of(host: Host, hosts: Sequence[Host]) -> int:
    """One thread per fast core; nodes of one machine share them."""
    if host.settings.threads:
        return int(host.settings.threads)
    pinned = cores_of(host, hosts)
    if pinned:
        return len(pinned)
    physical = int(host.fact("cpu", "available_physical") or host.fact("cpu", "physical") or 1)
    fast = len(host.fact("cpu", "fast") or []) or physical
    return max(1, min(fast, physical) // neighbours(host, hosts))


def cores_of(host: Host, hosts: Sequence[Host]) -> list[int] | None:
    """The processors to pin a rank to: as in the run so far, or the fast cores where the host has others beside them; None
    leaves it to the kernel."""
    if host.settings.threads or neighbours(host, hosts) > 1:
        return None
    allowed, fast = host.fact("cpu", "allowed") or [], host.fact("cpu", "fast") or []
    if host.has_begun:
        kept = host.kept_fact("cores")
        return list(kept) if kept and set(kept) <= set(allowed) else None
    # A quota gives some time of any processors.
    limited = len(fast) > (host.fact("cpu", "available_physical") or 0)
    return list(fast) if len(fast) < len(allowed) and not limited else None


def capability_of(host: Host) -> str:
    """avx2 if torch's operations were clearly faster with it than with the CPU's AVX-512, else empty; a run keeps its choice."""
    if host.has_begun:
        return AVX2 if host.kept_fact("capability") == AVX2 else ""
    faster = host.measured.get("capability") == AVX2.upper() and "avx512f" in (host.fact("cpu", "flags") or [])
    return AVX2 if faster else ""


def weights_of(split: str, hosts: Sequence[Host]) -> Weights:
    """The hosts' weights according to `ddp_batch_split`."""
    equal = [1.0] * len(hosts)
    if split == "equal":
        return Weights(equal)
    threads = [float(threads_of(host, hosts)) for host in hosts]
    if split == "threads":
        return Weights(threads)
    speeds = speeds_of(hosts)
    known = [speed for speed in speeds if speed]
    if split == "auto":
        even = len(known) < len(hosts) or max(known) <= min(known) * SAME_SPEED
        return Weights(equal if even else known)
    if len(known) == len(hosts):
        return Weights(known)
    if not known:
        return Weights(threads)
    missing = " and ".join(host.name for host, speed in zip(hosts, speeds) if not speed)
    seen = (
        f"ddp_batch_split is speed, but the speed of {missing} is unknown; run preflight to measure it, or "
        "set ddp_speed for every host"
    )
    return Weights(threads, (finding("setting-refused", "", seen),))


def speeds_of(hosts: Sequence[Host]) -> list[float | None]:
    """Each host's speed, if known. Nodes of one machine were measured beside each other and count the same."""
    measured = {host.name: speed_in(host.measured) for host in hosts}
    found: list[float | None] = []
    for host in hosts:
        beside = [measured[other.name] for other in hosts if same_machine(host, other)] or [measured[host.name]]
        mean = sum(beside) / len(beside) if all(beside) else None
        found.append(host.settings.speed or mean)
    return found


def kept_shares(hosts: Sequence[Host], name: str) -> dict[str, int]:
    """The resumed run's shares (rows, or head_shares); otherwise each new measurement would start it over."""
    found = [host.kept.get(name) or {} for host in hosts]
    rows: dict[str, int] = found[0]
    if any(host.settings.speed for host in hosts) or set(rows) != {host.name for host in hosts}:
        return {}
    return rows if all(other == rows for other in found) and all(share > 0 for share in rows.values()) else {}


def shared_out(asked: Asked, split: str, hosts: Sequence[Host]) -> HostShares:
    """Split the rows of a step and a shared head among the hosts, in their order."""
    run, weights = asked.run, weights_of(split, hosts)
    rows, parts = (kept_shares(hosts, name) if split in FOLLOWING else {} for name in ("rows", "head_shares"))
    total_set, device_set = "ddp_total_batch" in asked.given, "ddp_device_batch" in asked.given
    wanted = BatchRequest(run.sequence, run.total_batch, run.device_batch, total_set, device_set)
    kept = [rows[host.name] for host in hosts] if rows else []
    try:
        batch = plan_batch(wanted, weights.values, split == "equal", kept)
    except BatchError as error:
        problem = finding("setting-refused", "", str(error).rstrip("."))
        batch = SharedBatch([], run.device_batch, run.total_batch)
        return HostShares(batch, {}, (*weights.problems, problem))
    # Parts of the head are finer than rows.
    parts = parts or {host.name: part for host, part in zip(hosts, head_weights(weights.values))}
    return HostShares(batch, parts, weights.problems)
