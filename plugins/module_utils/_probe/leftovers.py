# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds remains of earlier runs: trainer processes, port holders, and files in the base folder."""

from __future__ import annotations

import glob
import os
import re
from typing import Sequence, cast

from .._contract import lineage, politeness
from .._contract.document import items, number, section, text
from .._contract.lineage import training_of
from .._contract.probe import DataSet, PastRun, PastSession, PastShare, PortHolder, TrainingProcess
from .._contract.run_folder import TRAINING_FILE, checkpoint_steps
from .._kit import bare, processes
from .._kit.files import read_object
from .._rules.stages import STAGES

# Processes


SCRIPTS = "|".join(stage.script.partition(".")[2] for stage in STAGES.values())
TRAINER_COMMAND = re.compile(rf"torchrun|torch\.distributed\.(run|launch)|scripts[./]({SCRIPTS})")


def trainer_processes() -> list[TrainingProcess]:
    """Processes that this collection started, and lookalikes of any owner."""
    return [
        {"pid": pid, "parent": one.ppid, "user": one.user, "command": one.command[:300], "session": one.marker, "run": one.run}
        for pid, one in sorted(processes.processes().items())
        if pid != os.getpid() and (one.marker or TRAINER_COMMAND.search(one.command))
    ]  # fmt: skip


def port_holders(ports: Sequence[int], prefix: Sequence[str] = ()) -> list[PortHolder]:
    """Processes listening on the given ports, each once. Only root (by this prefix of a command) can see those of other users, but
    anybody their user."""
    found: dict[tuple[int, int | None], PortHolder] = {}
    for holder in processes.port_holders(ports):
        one = holder.process
        if one is None and prefix:
            out = bare.tool([*prefix, "ss", "-Hltnp", "sport", "=", f":{holder.port}"])[1]
            match = re.search(r"\bpid=(\d+)", out)
            one = processes.process(int(match.group(1))) if match else None
        seen = (one.pid, one.command[:300], one.marker, one.run) if one else (None, None, None, None)
        pid, command, session, run = seen
        user = processes.user_name(holder.uid)
        found[holder.port, pid] = {
            "port": holder.port, "pid": pid, "user": user, "command": command, "session": session, "run": run,
        }  # fmt: skip
    return list(found.values())


# Earlier runs


def run_facts(folder: str) -> PastRun:
    plan = read_object(os.path.join(folder, "plan.json"))
    training, shares = section(plan, "training"), {}
    for node in items(plan, "nodes"):
        cores = node.get("cores")
        share: PastShare = {
            "rows": number(node, "rows"),
            "head_share": number(node, "head_share"),
            "cores": [core for core in cores if isinstance(core, int) and not isinstance(core, bool)]
            if isinstance(cores, list)
            else None,
            "polite": text(section(node, "env"), politeness.VARIABLE) or politeness.OFF,
        }
        shares[str(node.get("host"))] = share
    return {
        "path": folder,
        "plan_digest": text(plan, "digest"),
        "shares": shares,
        "sync": text(training, "sync"),
        "matmul": text(training, "matmul"),
        "total_batch": number(training, "total_batch"),
        "iterations": number(training, "iterations"),
        "lineage": lineage.of_plan(plan),
        "session": cast(PastSession, read_object(os.path.join(folder, "session.json"))) or None,
        "training": training_of(read_object(os.path.join(folder, TRAINING_FILE))),
        "checkpoints": checkpoint_steps(folder),
    }


def data_sets(base: str) -> list[DataSet]:
    """The data sets in the store, from their manifests."""
    found: list[DataSet] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(base), "data", "*", "manifest.json"))):
        manifest = read_object(path)
        if manifest.get("format") != 1 or not items(manifest, "shards"):
            continue  # torn, or not ours
        name = text(manifest, "id") or os.path.basename(os.path.dirname(path))
        found.append({"id": name, "bytes": sum(number(one, "bytes") for one in items(manifest, "shards"))})
    return found
