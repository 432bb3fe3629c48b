# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides for all nodes together whether to start the run, because it lives or ends as a whole."""

from __future__ import annotations

from typing import Mapping, Sequence, Tuple

KEEP = "keep"
START = "start"


def launch_action(
    runs: Sequence[Mapping[str, object]], plan_digest: str, restart: bool, fresh: bool
) -> Tuple[str, str]:
    """Decide from all nodes' states (from run_info) whether to start the run, and why."""
    states = {str(run["state"]) for run in runs}
    if fresh:
        return START, "you asked for a fresh start"
    if any(run.get("plan_digest") != plan_digest for run in runs):
        return START, "the plan is new on at least one host"
    if "finished" in states and states <= {"finished", "away"}:
        # A host that was away at the end has nothing left to do either.
        return KEEP, "it already finished with this plan; -e ddp_fresh=true trains it from scratch"
    if restart:
        return START, "you asked for a restart"
    if states == {"running"}:
        return KEEP, "it is already running with this plan"
    return START, "it is " + " and ".join(sorted(states)) + " on its hosts"
