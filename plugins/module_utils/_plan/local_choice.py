# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What `ddp_local_steps: auto` comes to over a measured link: steps together where it hides what they send, else so many apart
that the hosts keep nearly all of their speed. Pure functions."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    ALIKE,
    Link,
    Speed,
    asked,
    choose_sync,
    eligible,
    mean_step,
    predict,
    steps_together,
)

# What of the hosts' own speeds is enough.
KEPT = 0.95
# Steps apart from which auto takes the fewest that are enough, and the meetings that a run must have at least.
STEPS, LEAST_MEETINGS = (5, 10, 20, 30, 50, 100), 10
# The mean of many ranks that have trained far apart is worth less. So many steps held in training with so many hosts; with
# eight not even ten did (lab/performance.md).
MOST_BY_HOSTS = ((2, 100), (4, 30))


class Way(NamedTuple):
    """How ranks come to one model: what travels, after how many steps apart (0: in every step), and why."""

    sync: str
    local_steps: int
    why: str = ""


def kinds_of(plan: Plan) -> list[str]:
    """The ways of ddp_sync that may be taken."""
    return eligible(plan) if asked(plan, "sync") == "auto" else [plan["training"]["sync"]]


def choose_way(plan: Plan, speeds: Sequence[Speed], link: Link, rows: Sequence[int]) -> Way:
    """The steps apart, and the way of ddp_sync that rounds least beside them."""
    kinds = kinds_of(plan)
    together = {kind: predict(plan, speeds, link, rows, kind, 0).seconds for kind in kinds}
    # What rounds most sends least.
    least = kinds[-1]
    best = least if len(kinds) == 1 else choose_sync(plan, speeds, link, rows, 0)
    # As if each host trained its rows by itself.
    alone = predict(plan, speeds, None, rows, least, 1).seconds
    kept = alone / min(together.values())
    said = f"together in every step ({best}) the hosts keep {kept:.0%} of their speed"
    if kept >= KEPT:
        return Way(best, 0, said)
    steps = plan["training"]["iterations"]
    held = next((most for hosts, most in MOST_BY_HOSTS if plan["world"] <= hosts), 0)
    if not held:
        return Way(
            best, 0, f"{said}, but with {plan['world']} hosts steps apart would cost the model more than they bring"
        )
    able = [count for count in STEPS if count <= min(held, (steps - steps_together(steps)) // LEAST_MEETINGS)]
    if not able:
        return Way(best, 0, f"{said}, but a run of {steps} steps is too short for {LEAST_MEETINGS} meetings")
    keeps = {count: alone / predict(plan, speeds, link, rows, least, count).seconds for count in able}
    count = next((count for count in able if keeps[count] >= KEPT), able[-1])
    sync = least if len(kinds) == 1 else choose_sync(plan, speeds, link, rows, count)
    apart, whole = (step(plan, speeds, link, rows, sync, count).seconds for step in (predict, mean_step))
    if whole > ALIKE * together[best]:
        return Way(best, 0, f"{said}, and with {count} local steps hardly more")
    return Way(
        sync,
        count,
        f"{said}, with {count} steps apart ({sync}) {alone / apart:.0%}, and {alone / whole:.0%} in the whole run with its common steps",
    )


def chosen(plan: Plan, speeds: Sequence[Speed], link: Optional[Link], rows: Sequence[int]) -> Optional[Way]:
    """What the settings leave to be chosen over this link; None where there is nothing to choose."""
    if plan["world"] < 2 or link is None:
        return None
    if asked(plan, "local_steps") == "auto":
        return choose_way(plan, speeds, link, rows)
    if asked(plan, "sync") == "auto":
        return Way(choose_sync(plan, speeds, link, rows), plan["training"].get("local_steps") or 0)
    return None
