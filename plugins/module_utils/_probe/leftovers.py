# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is there already: processes of trainers, who holds a port, and what earlier runs left in the base folder."""

from __future__ import annotations

import glob
import os
import re
from typing import Any, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.probe import DataSet, PortHolder, TrainingProcess
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import checkpoint_steps
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.network import (
    Find,
    Run,
    read,
)


def json_file(path: str) -> dict[str, Any] | None:
    return read_object(path) or None


# Who is there already


TRAINER_COMMAND = re.compile(r"torchrun|torch\.distributed\.(run|launch)|scripts[./]base_train")


def trainer_processes() -> list[TrainingProcess]:
    """Processes that this collection started, and those that look like a trainer's whoever started them."""
    found: list[TrainingProcess] = []
    for pid, one in sorted(processes.processes().items()):
        if pid != os.getpid() and (one.marker or TRAINER_COMMAND.search(one.command)):
            found.append(
                {
                    "pid": pid,
                    "parent": one.ppid,
                    "user": one.user,
                    "command": one.command[:300],
                    "session": one.marker,
                    "age": age(one.start),
                }
            )
    return found


def age(start: int) -> int | None:
    """Seconds since a process started, of the clock tick at which it did."""
    uptime = read("/proc/uptime").split()
    return int(float(uptime[0]) - start / os.sysconf("SC_CLK_TCK")) if uptime else None


def port_holders(ports: Sequence[int]) -> list[PortHolder]:
    """Who listens on the given ports, each process once; the user is known also where the process is somebody else's."""
    found: dict[tuple[int, int | None], PortHolder] = {}
    for holder in processes.port_holders(ports):
        entry = found.setdefault(
            (holder.port, holder.pid),
            {
                "port": holder.port,
                "addresses": [],
                "pid": holder.pid,
                "user": holder.user,
                "command": holder.command[:300] if holder.command else None,
                "session": holder.marker,
                "ours": holder.marker is not None,
            },
        )
        entry["addresses"].append(holder.address)
    return list(found.values())


def name_by_root(holders: list[PortHolder], run: Run, find: Find, prefix: list[str] | None) -> list[PortHolder]:
    """The processes of other users that hold a port: only root sees which they are."""
    tool = find("ss")
    for holder in holders:
        if holder["pid"] or not prefix or not tool:
            continue
        dummy, out, _dummy2 = run([*prefix, tool, "-Hltnp", "sport", "=", f":{holder['port']}"])
        match = re.search(r"\bpid=(\d+)", out)
        owner = processes.process(int(match.group(1))) if match else None
        if owner:
            holder["pid"], holder["command"] = owner.pid, owner.command[:300]
    return holders


# What earlier runs left


def run_facts(folder: str) -> dict[str, Any]:
    plan = json_file(os.path.join(folder, "plan.json")) or {}
    session = json_file(os.path.join(folder, "session.json"))
    return {
        "path": folder,
        "exists": os.path.isdir(folder),
        "plan_digest": plan.get("digest"),
        "rows": rows_of(plan),
        "cores": cores_of(plan),
        **{what: training_of(plan, what) for what in ("sync", "matmul")},
        "lineage": lineage.of_plan(plan),
        "session": session,
        "checkpoints": checkpoint_steps(folder),
    }


def rows_of(plan: Mapping[str, Any]) -> dict[str, int]:
    """The rows of each host under the plan that lies in the run's folder."""
    nodes = plan.get("nodes")
    nodes = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return {str(node.get("host")): whole(node.get("rows")) for node in nodes}


def training_of(plan: Mapping[str, Any], what: str) -> str | None:
    """What that plan made of a setting of the training."""
    training = plan.get("training")
    found = training.get(what) if isinstance(training, dict) else None
    return found if isinstance(found, str) else None


def cores_of(plan: Mapping[str, Any]) -> dict[str, list[int]]:
    """The processors to which that plan pins each host; hosts that it leaves to the kernel are not named."""
    nodes = plan.get("nodes")
    nodes = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return {
        str(node.get("host")): [whole(number) for number in node["cores"]]
        for node in nodes
        if isinstance(node.get("cores"), list)
    }


def whole(value: Any) -> int:
    """A number of a file that may hold anything."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def data_sets(base: str) -> list[DataSet]:
    """The data sets in the store, by their manifests."""
    found: list[DataSet] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(base), "data", "*", "manifest.json"))):
        manifest = json_file(path) or {}
        listed = manifest.get("shards")
        shards = listed if isinstance(listed, list) else []
        found.append(
            {
                "id": manifest.get("id") or os.path.basename(os.path.dirname(path)),
                "shards": len(shards),
                "bytes": sum(whole(shard.get("bytes")) for shard in shards if isinstance(shard, dict)),
            }
        )
    return found
