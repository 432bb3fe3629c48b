# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chooses `ddp_local_steps: auto` over a measured link: lockstep if it hides the transfers, otherwise enough local steps to
keep nearly all of the hosts' speed. Pure functions."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import (
    NEARLY_AS_FAST,
    Job,
    Link,
    Speed,
    choose_sync,
    eligible,
    mean_step,
    predict,
    steps_together,
)

# Sufficient fraction of the hosts' own speeds.
KEPT = 0.95
# Steps apart from which auto takes the fewest that are enough, and the meetings that a run must have at least.
STEPS, LEAST_MEETINGS = (5, 10, 20, 30, 50, 100), 10
# The mean of many ranks that have trained far apart is worth less. Maximum steps by number of hosts; with
# eight not even ten did (lab/performance.md).
MOST_BY_HOSTS = ((2, 100), (4, 30))


class SyncChoice(NamedTuple):
    """How the ranks reach one model: ddp_sync, local steps (0: lockstep), and the reason."""

    sync: str
    local_steps: int
    why: str = ""


def kinds_of(job: Job) -> list[str]:
    """The possible ddp_sync methods."""
    return eligible(job) if job.sync_open else [job.sync]


def choose_way(job: Job, speeds: Sequence[Speed], link: Link, rows: Sequence[int]) -> SyncChoice:
    """The local steps, and the most precise ddp_sync with them."""
    kinds = kinds_of(job)
    together = {kind: predict(job, speeds, link, rows, kind, 0).seconds for kind in kinds}
    # The least precise sends least.
    least = kinds[-1]
    best = least if len(kinds) == 1 else choose_sync(job, speeds, link, rows, 0)
    # As if each host trained its rows alone.
    alone = predict(job, speeds, None, rows, least, 1).seconds
    kept = alone / min(together.values())
    said = f"in lockstep ({best}) the hosts keep {kept:.0%} of their speed"
    if kept >= KEPT:
        return SyncChoice(best, 0, said)
    steps = job.iterations
    held = next((most for hosts, most in MOST_BY_HOSTS if job.world <= hosts), 0)
    if not held:
        return SyncChoice(
            best, 0, f"{said}, but with {job.world} hosts local steps would cost the model more than they gain"
        )
    able = [count for count in STEPS if count <= min(held, (steps - steps_together(steps)) // LEAST_MEETINGS)]
    if not able:
        return SyncChoice(best, 0, f"{said}, but a run of {steps} steps is too short for {LEAST_MEETINGS} meetings")
    keeps = {count: alone / predict(job, speeds, link, rows, least, count).seconds for count in able}
    count = next((count for count in able if keeps[count] >= KEPT), able[-1])
    sync = least if len(kinds) == 1 else choose_sync(job, speeds, link, rows, count)
    apart, whole = (step(job, speeds, link, rows, sync, count).seconds for step in (predict, mean_step))
    if whole > NEARLY_AS_FAST * together[best]:
        return SyncChoice(best, 0, f"{said}, and with {count} local steps hardly more")
    return SyncChoice(
        sync,
        count,
        f"{said}, with {count} local steps ({sync}) {alone / apart:.0%}, and {alone / whole:.0%} over the whole run",
    )


def chosen(job: Job, speeds: Sequence[Speed], link: Optional[Link], rows: Sequence[int]) -> Optional[SyncChoice]:
    """The choice over this link; None if there is nothing to choose."""
    if job.world < 2 or link is None:
        return None
    if job.local_open:
        return choose_way(job, speeds, link, rows)
    if job.sync_open:
        return SyncChoice(choose_sync(job, speeds, link, rows), job.local_steps)
    return None
