# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds a rank's command line from the plan's mappings, as the last step. To change the command, change the mappings."""

from __future__ import annotations

import os
from typing import List, Mapping, Optional

from .plan import Node, Plan


def flag_words(flags: Mapping[str, object]) -> List[str]:
    """Flags as words: True is a switch, per-rank numbers are joined by commas, several texts repeat the flag."""
    found: List[str] = []
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            found += [f"--{name}={one}" for one in value]
        elif isinstance(value, list):
            found.append(f"--{name}={','.join(map(str, value))}")
        else:
            found.append(f"--{name}={value}")
    return found


def argv_of(plan: Plan, node: Node, generation: Optional[int] = None) -> List[str]:
    """The command that starts a rank: a torchrun agent, which starts the trainer. Ranks of a later generation
    meet under another name."""
    scripts, trainer = os.path.join(node["tools_dir"], "scripts"), plan["trainer"]
    # Ours is torchrun too, but ends with a sentence instead of a traceback.
    agent = ["-m", "scripts.torchrun" if trainer["source"] == "ours" else "torch.distributed.run"]
    # Without --, torchrun takes the trainer's flags for abbreviations of its own.
    script = ["-m", trainer["script"], "--"]
    if "join_flags" in node:
        agent = [os.path.join(scripts, "torchrun.py")]
        script = [os.path.join(scripts, "join.py"), "--", *flag_words(node["join_flags"]), trainer["script"]]
    return [
        os.path.join(node["venv_dir"], "bin", "python"),
        *agent,
        f"--nnodes={plan['world']}",
        f"--node-rank={node['rank']}",
        "--nproc-per-node=1",
        f"--master-addr={plan['master']['address']}",
        f"--master-port={plan['master']['port']}",
        f"--local-addr={node['address']}",
        f"--rdzv-conf=timeout={plan['timeout_seconds']}",
        # A rank of an earlier generation that wakes up finds none of its names in this store.
        *([] if generation is None else [f"--rdzv-id=generation-{generation}"]),
        "--max-restarts=0",
        *script,
        *flag_words(node["flags"]),
    ]
