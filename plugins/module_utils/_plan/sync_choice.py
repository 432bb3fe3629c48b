# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What `ddp_sync: auto` comes to: the way that a run began with, or the best one by what was measured."""

from __future__ import annotations

from typing import Any, Mapping, Sequence, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.command import Choice
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import LEAST_BLOCK, WIRE_BYTES, packs
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    choose_sync,
    links_of,
    speeds_of,
    subject,
)


def kept(run: Mapping[str, Any], hosts: Sequence[Host], choice: Choice, width: int) -> str:
    """The way of the plan that lies in the run's folder: each new measurement must not change a run. Empty where there is
    none, or where it does not go with the settings any more."""
    if run["ddp_fresh"] or not choice.ours:
        return ""
    found = [host.fact("run", "sync") for host in hosts]
    told = str(next((way for way in found if way in WIRE_BYTES), ""))
    unpacked = run["ddp_local_steps"] or choice.device != "cpu" or width % LEAST_BLOCK
    return "" if packs(told) and unpacked else told


def measured(choice: Choice, by_rank: Sequence[Host], model: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    """The best way by what the rehearsal measured of these hosts with this very model; exact where that is not known."""
    if len(by_rank) < 2 or not choice.ours or choice.device != "cpu" or training["local_steps"]:
        return "exact"
    wanted = subject(model, training["device_batch"], training["matmul"])
    found = {host.name: host.fact("measured") or {} for host in by_rank}
    nodes = [{"host": host.name, "rows": rows} for host, rows in zip(by_rank, training["rows"])]
    # So much of a plan is all that the model of a step reads.
    plan = cast(Plan, {"world": len(by_rank), "model": model, "training": training, "nodes": nodes})
    speeds, link = speeds_of(plan, found), links_of(list(found.values()))
    if not speeds or link is None or any(one.get("subject") != wanted for one in found.values()):
        return "exact"
    return choose_sync(plan, speeds, link, training["rows"])
