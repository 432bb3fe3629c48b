# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What auto comes to for ddp_sync, ddp_local_steps and ddp_head: what a run began with, or the best by what was measured."""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.command import Choice
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.head import can_share
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.local_choice import Way, chosen
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import WIRE_BYTES, Shape
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.settings_checks import way_problems
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    ALIKE,
    Link,
    Speed,
    links_of,
    mean_step,
    speeds_of,
    subject,
)


def with_way(wanted: Mapping[str, Any], way: Way) -> Dict[str, Any]:
    """The settings that decide the way, each as it was set, or from the way where it is auto."""
    decided = {"ddp_sync": way.sync, "ddp_local_steps": way.local_steps}
    return {name: value if wanted[name] == "auto" else wanted[name] for name, value in decided.items()}


def kept(run: Mapping[str, Any], hosts: Sequence[Host], choice: Choice, shape: Shape) -> Optional[Way]:
    """The way of the plan that lies in the run's folder: each new measurement must not change a run. None where there is
    none, or where it does not go with the settings any more."""
    if run["ddp_fresh"] or not choice.ours:
        return None
    found = [(host.fact("run", "sync"), host.fact("run", "local_steps") or 0) for host in hosts]
    way = next((Way(sync, local) for sync, local in found if sync in WIRE_BYTES), None)
    if way is None or any(way_problems({**run, **with_way(run, way)}, hosts, shape, choice)):
        return None
    return way


def measured(
    choice: Choice, by_rank: Sequence[Host], model: Mapping[str, Any], training: Mapping[str, Any]
) -> Optional[Way]:
    """The best way by what the rehearsal measured of these hosts with this very model; None where that is not known."""
    known = _measured(choice, by_rank, model, training)
    return chosen(*known, training["rows"]) if known else None


def sharing_pays(
    choice: Choice, by_rank: Sequence[Host], model: Mapping[str, Any], training: Mapping[str, Any]
) -> bool:
    """Whether a step is clearly faster with the head shared out, by what was measured; False where that is not known."""
    known = _measured(choice, by_rank, model, training)
    if not known or not can_share(choice.device, training["sync"], choice.ours):
        return False
    plan, speeds, link = known

    def seconds(head: Literal["whole", "shared"]) -> float:
        changed = cast(Plan, {**plan, "training": {**training, "head": head}})
        return mean_step(changed, speeds, link, training["rows"]).seconds

    return seconds("shared") < ALIKE * seconds("whole")


def _measured(
    choice: Choice, by_rank: Sequence[Host], model: Mapping[str, Any], training: Mapping[str, Any]
) -> Optional[Tuple[Plan, List[Speed], Optional[Link]]]:
    """What the model of a step reads of a plan, with the measured speeds and link; None where these are not known."""
    if len(by_rank) < 2 or not choice.ours or choice.device != "cpu":
        return None
    wanted = subject(model, training["device_batch"])
    found = {host.name: host.fact("measured") or {} for host in by_rank}
    nodes = [{"host": host.name, "rows": rows} for host, rows in zip(by_rank, training["rows"])]
    plan = cast(Plan, {"world": len(by_rank), "model": model, "training": training, "nodes": nodes})
    speeds, link = speeds_of(plan, found), links_of(list(found.values()))
    if not speeds or any(one.get("subject") != wanted for one in found.values()):
        return None
    return plan, speeds, link
