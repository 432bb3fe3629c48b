# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command of a rank, from the mappings of a plan."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import (
    rank_environ,
    torchrun_argv,
)
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import planned


def test_torchrun_starts_the_same_rank_by_hand():
    plan = planned()
    for node in plan["nodes"]:
        words, environ = torchrun_argv(plan, node), rank_environ(plan, node)
        cut = words.index("--max-restarts=0") + 1
        # Without --, torchrun would take the flags for abbreviations of its own.
        assert [words[0], *(word for word in words[cut:] if word != "--")] == node["argv"]
        assert {f"--node-rank={environ['RANK']}", f"--nnodes={environ['WORLD_SIZE']}"} < set(words[:cut])
