# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds a rank's command and variables from the plan's mappings, as the last step. To change the command, change the mappings."""

from __future__ import annotations

import os
from typing import Dict, List, Mapping

from .plan import Node, Plan


def flag_words(flags: Mapping[str, object]) -> List[str]:
    """Flags as words: True is a switch, per-rank numbers are joined by commas."""
    found: List[str] = []
    for name, value in flags.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        found.append(f"--{name}" if value is True else f"--{name}={text}")
    return found


def rank_argv(plan: Plan, node: Node) -> List[str]:
    """The command that starts this host's rank, with the variables of `rank_environ`."""
    return [
        os.path.join(node["venv_dir"], "bin", "python"),
        "-m",
        plan["trainer"]["script"],
        *flag_words(node["flags"]),
    ]


def rank_environ(plan: Plan, node: Node, generation: int = 0) -> Dict[str, str]:
    """The variables that torchrun sets for a rank."""
    return {
        "RANK": str(node["rank"]),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(plan["world"]),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": str(plan["master"]["address"] or ""),
        "MASTER_PORT": str(plan["master"]["port"]),
        # A rank of an earlier generation that wakes up finds none of its names in this store.
        "TORCHELASTIC_RUN_ID": f"generation-{generation}",
    }


def torchrun_argv(plan: Plan, node: Node) -> List[str]:
    """The same rank started by hand with torchrun, which sets the variables itself."""
    python, *script = rank_argv(plan, node)[:3]
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={plan['world']}",
        f"--node-rank={node['rank']}",
        "--nproc-per-node=1",
        f"--master-addr={plan['master']['address']}",
        f"--master-port={plan['master']['port']}",
        "--max-restarts=0",
        *script,
        "--",  # or torchrun would take the flags for abbreviations of its own
        *flag_words(node["flags"]),
    ]
