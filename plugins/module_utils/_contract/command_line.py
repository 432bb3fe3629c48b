# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command of a rank, made last, from the plan's mappings. For another command, change the mappings and make it again."""

from __future__ import annotations

import os
from typing import List, Mapping, Optional

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Node, Plan


def flag_words(flags: Mapping[str, object]) -> List[str]:
    """Flags as words: True is a switch, numbers of the ranks are joined by commas, of several texts each has its own flag."""
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
    """The command that starts a rank: an agent of torchrun, which starts the trainer. The ranks of a later generation of the run
    meet under a name of their own."""
    scripts, trainer = os.path.join(node["tools_dir"], "scripts"), plan["trainer"]
    # Ours is torchrun too, but ends with a sentence and not with a traceback.
    agent = ["-m", "scripts.torchrun" if trainer["source"] == "ours" else "torch.distributed.run"]
    # Without -- torchrun takes the trainer's flags for shortened ones of its own.
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
        # A rank of an earlier generation that wakes up finds none of its names in the store of this one.
        *([] if generation is None else [f"--rdzv-id=generation-{generation}"]),
        "--max-restarts=0",
        *script,
        *flag_words(node["flags"]),
    ]
