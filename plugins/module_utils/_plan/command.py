# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The trainer's flags and environment on a host, and the ports of its keeper."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Dict, Sequence

from .._contract import politeness
from .._contract.plan import Node
from .._contract.settings_table import AUTO, RunSettings, rows
from . import stages
from .decided import FOLLOWING, Decided
from .hosts import Host

# Reuse big buffers instead of returning them to the kernel and faulting them in again.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"

Flags = Dict[str, object]  # by name without dashes: a number, a text, True for a switch, a list by rank


def trainer_flags(decided: Decided, run_dir: str) -> Flags:
    """The trainer's flags on a host."""
    run = decided.run
    flags: Flags = {row.flag: getattr(run, row.field, None) for row in rows().values()}
    flags = {name: value for name, value in flags.items() if name and value is not None and value is not False}
    worked_out: Flags = {
        "run": decided.name,
        "model-tag": decided.name,
        "window-pattern": run.window_pattern.upper(),
        "core-metric-every": -1,
        "run-dir": run_dir,
        "save-minutes": run.save_minutes,
        "tracker-uri": f"http://127.0.0.1:{run.tracker_port}" if run.tracker == "mlflow" else None,
        "rank-rows": list(decided.rows) if len(set(decided.rows)) > 1 else None,
        "head-shares": list(decided.head_shares),
        "rebalance": len(decided.rows) > 1 and run.batch_split in FOLLOWING,
        "save-on-loss": bool(run.restarts),
        "timed": decided.timed,
    }
    flags.update({name: value for name, value in worked_out.items() if value})
    return {**flags, **stages.flags(run, run_dir), **flags_in(run.extra_args)[0]}


def flags_in(words: Sequence[str]) -> tuple[Flags, list[str]]:
    """(the flags in a user's arguments, as --name=value, --name value or --name; the words that belong to none)."""
    found: Flags = {}
    name, strays = "", []
    for word in words:
        if word.startswith("--") and word.lstrip("-"):
            name, is_set, value = word[2:].partition("=")
            found[name] = value if is_set else True
            name = "" if is_set else name
        elif name:
            found[name], name = word, ""
        else:
            strays.append(word)
    return found, strays


def keeper_ports(run: RunSettings, hosts: int) -> list[int]:
    """Possible ports of a host's keepers, avoiding the run's others; more than one if nodes share a machine."""
    others = (run.port, run.tracker_port)
    free = (port for port in itertools.count(run.keeper_port) if port not in others)
    return list(itertools.islice(free, hosts))


def flag_names(decided: Decided) -> list[str]:
    """Names of the flags that the plan sets itself, or would with other hosts."""
    run = dataclasses.replace(decided.run, extra_args=(), save_minutes=1, head="shared", batch_split=AUTO)
    some = dataclasses.replace(decided, run=run, rows=(1, 2), head_parts=(1, 2))
    return [f"--{name}" for name in trainer_flags(some, ".")]


def env(decided: Decided, node: Node, host: Host) -> dict[str, str]:
    """The variables of whatever the host's session runs: the rank, or the keeper that starts it. A value that is the host's own must
    change nothing that is computed."""
    run = decided.run
    names = {
        # A GPU must not affect a run on the CPU.
        "CUDA_VISIBLE_DEVICES": "",
        "NANOCHAT_BASE_DIR": node["run_dir"],
        "NANOCHAT_DATA_DIR": os.path.join(node["run_dir"], "data"),
        "NANOCHAT_DTYPE": "float32",
        "NANOCHAT_FORCE_SDPA": "1",
        politeness.VARIABLE: host.polite,
        "OMP_NUM_THREADS": str(node["threads"]),
        "GLOO_SOCKET_IFNAME": node["nic"] or "",
        "NCCL_SOCKET_IFNAME": node["nic"] or "",
        "PYTHONPATH": node["trainer_dir"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "GLIBC_TUNABLES": MALLOC,
        # On shared cores, spinning threads take time from the thread that they wait for.
        "GOMP_SPINCOUNT": "20000",
    }
    if node["cores"]:
        names["NANOCHAT_CORES"] = ",".join(str(number) for number in node["cores"])
    if run.tracker == "mlflow":
        names["MLFLOW_EXPERIMENT_NAME"] = f"nanochat-d{run.depth}"
    return dict(sorted({**names, **run.extra_env}.items()))
