# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each host is worth in a step, by the settings, its threads, or a step that was measured there."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.probe import CoreSet
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.batch import Asked, Batch, head_shares, plan_batch
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host, neighbours, same_machine

# Hosts whose speeds differ by less are alike: a measurement is not exacter than that.
ALIKE = 1.1


class Weights(NamedTuple):
    """The weight of each host, and what is to be said about how it came about."""

    values: list[float]
    problems: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()


def threads_of(host: Host, hosts: Sequence[Host]) -> int:
    """As many as there are cores to compute on, which the nodes of one machine share."""
    if host.settings["ddp_threads"]:
        return int(host.settings["ddp_threads"])
    pinned = cores_of(host, hosts)
    if pinned:
        return len(pinned)
    sets = host.fact("cpu", "sets") or []
    cores = (
        len(sets[0]["cpus"]) if sets else host.fact("cpu", "available_physical") or host.fact("cpu", "physical") or 1
    )
    return max(1, int(cores) // neighbours(host, hosts))


def core_sets(host: Host, hosts: Sequence[Host]) -> list[CoreSet]:
    """The sets of processors that the rehearsal times; none where there is nothing to choose."""
    if host.settings["ddp_threads"] or host.settings["ddp_cores"] or neighbours(host, hosts) > 1:
        return []
    sets = host.fact("cpu", "sets") or []
    return list(sets) if len(sets) > 1 else []


def cores_of(host: Host, hosts: Sequence[Host]) -> list[int] | None:
    """The processors to which a rank is pinned: as told, as the run has had them so far, or as measured; None leaves it to the kernel."""
    if host.settings["ddp_cores"]:
        return listed(host.settings["ddp_cores"])
    sets = [one["cpus"] for one in core_sets(host, hosts)]
    deployed = host.fact("run", "rows") or {}
    if host.name in deployed and not host.settings.get("ddp_fresh"):
        found = (host.fact("run", "cores") or {}).get(host.name)
    else:
        found = host.fact("measured", "cores")
    return list(found) if found and found in sets else None


def listed(text: str) -> list[int]:
    """The numbers of a list such as 0-7,16, each once."""
    pairs = [part.partition("-") for part in text.split(",")]
    return sorted({number for low, dummy, high in pairs for number in range(int(low), min(int(high or low), 8191) + 1)})


def weights_of(split: str, hosts: Sequence[Host]) -> Weights:
    """The hosts' weights under `ddp_batch_split`."""
    equal = [1.0] * len(hosts)
    if split == "equal":
        return Weights(equal)
    threads = [float(threads_of(host, hosts)) for host in hosts]
    if split == "threads":
        return Weights(threads)
    speeds = speeds_of(hosts)
    known = [speed for speed in speeds if speed]
    if split == "auto":
        alike = len(known) < len(hosts) or max(known) <= min(known) * ALIKE
        return Weights(equal if alike else known)
    if len(known) == len(hosts):
        return Weights(known)
    if not known:
        return Weights(threads, findings=(finding("speed-unknown", "", "no host's speed has been measured yet"),))
    missing = " and ".join(host.name for host, speed in zip(hosts, speeds) if not speed)
    seen = (
        f"ddp_batch_split is speed, but of {missing} no speed is known; run preflight, which measures it, or "
        "set ddp_speed for every host"
    )
    return Weights(threads, (finding("setting-refused", "", seen),))


def speeds_of(hosts: Sequence[Host]) -> list[float | None]:
    """What is known of each host's speed. Nodes of one machine were measured beside each other and are worth the same."""
    measured = {host.name: measured_speed(host) for host in hosts}
    found: list[float | None] = []
    for host in hosts:
        beside = [measured[other.name] for other in hosts if same_machine(host, other)] or [measured[host.name]]
        together = [speed for speed in beside if speed]
        mean = sum(together) / len(together) if len(together) == len(beside) else None
        found.append(host.settings["ddp_speed"] or mean)
    return found


def measured_speed(host: Host) -> float | None:
    speed = host.fact("measured", "tokens_per_second")
    return float(speed) if isinstance(speed, (int, float)) and speed > 0 else None


def deployed_shares(run: Mapping[str, Any], hosts: Sequence[Host], what: str = "rows") -> dict[str, int]:
    """The shares (rows, or head_shares) that the run has had so far: a run keeps them, or each new measurement would start it
    over."""
    told = any(host.settings["ddp_speed"] for host in hosts)
    found = [host.fact("run", what) or {} for host in hosts]
    rows: dict[str, int] = found[0]
    if run["ddp_fresh"] or told or set(rows) != {host.name for host in hosts} or any(other != rows for other in found):
        return {}
    return rows if all(share > 0 for share in rows.values()) else {}


def share_out(run: Mapping[str, Any], told: set[str], hosts: Sequence[Host], weights: Weights) -> Batch:
    """The batch of a step; raises BatchError where what was asked for cannot be shared out."""
    asked = Asked(
        run["ddp_sequence"],
        run["ddp_total_batch"],
        run["ddp_device_batch"],
        "ddp_total_batch" in told,
        "ddp_device_batch" in told,
    )
    split = run["ddp_batch_split"]
    deployed = deployed_shares(run, hosts) if split in ("speed", "auto") else {}
    kept = [deployed[host.name] for host in hosts] if deployed else []
    return plan_batch(asked, weights.values, split == "equal", kept)


def parts_of_head(run: Mapping[str, Any], hosts: Sequence[Host], weights: Weights) -> dict[str, int]:
    """The weight of each host's part of a head that is shared out: by speed, as rows are, only finer."""
    kept = deployed_shares(run, hosts, "head_shares") if run["ddp_batch_split"] in ("speed", "auto") else {}
    return kept or {host.name: part for host, part in zip(hosts, head_shares(weights.values))}


def adapted(run: Mapping[str, Any], batch: Batch, world: int) -> list[Finding]:
    """What differs from the profile because of the number and speed of the hosts."""
    changes = [
        f"{name} {new} (the profile has {run[name]})"
        for name, new in (("ddp_total_batch", batch.total_batch), ("ddp_device_batch", batch.device_batch))
        if new != run[name]
    ]
    if not changes:
        return []
    seen = f"for {world} hosts {' and '.join(changes)}: rows {', '.join(str(rows) for rows in batch.rows)}"
    return [finding("batch-adapted", "", seen)]
