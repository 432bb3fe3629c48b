# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide once for all nodes whether a launch starts the run: it lives or ends as a whole."""

from __future__ import annotations

from typing import Dict, Mapping, Sequence

KEEP = "keep"
START = "start"


def launch_action(
    runs: Sequence[Mapping[str, object]], plan_digest: str, restart: bool = False, fresh: bool = False
) -> Dict[str, str]:
    """Decide from the state of every node (as run_info returns it) whether the run is left alone or started, and say why."""
    states = {str(run["state"]) for run in runs}
    if fresh:
        return {"action": START, "reason": "you asked for a fresh start"}
    if any(run.get("plan_digest") != plan_digest for run in runs):
        return {"action": START, "reason": "the plan is new on at least one host"}
    if "finished" in states and states <= {"finished", "away"}:
        # A host that was away at the end has nothing left to do either.
        return {
            "action": KEEP,
            "reason": "it already finished with this plan; -e ddp_fresh=true trains it from scratch",
        }
    if restart:
        return {"action": START, "reason": "you asked for a restart"}
    if states == {"running"}:
        return {"action": KEEP, "reason": "it is already running with this plan"}
    return {"action": START, "reason": "it is " + " and ".join(sorted(states)) + " on its hosts"}
