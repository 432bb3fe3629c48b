# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The live line of a run: position, speed, and what all ranks wait for."""

from __future__ import annotations

import time
from typing import Dict, List, Sequence, Tuple

from .._contract.keeper_states import IDLE, RESTING, TRAINING
from .._kit.words import clock_text, loss_text, named, seconds_text, share_text, speed_text
from .health import OTHER, PHASES, STEP, Health, Seen
from .sentences import apart_text, ends_text

# What all ranks wait for between steps and after a start.
PAUSES = [name for name, one in PHASES.items() if one.words != STEP.words and name != "end"]
SLOW_STEP = 2.0  # from this usual step time on, the line counts the seconds since the last step
QUIET = 3.0  # and after this long without news
LONGEST_PAUSE = 25.0  # longest interval between polls, unless nothing new is expected
BAR = (8, 30)
# Order in which parts are dropped in a narrow terminal.
DISPENSABLE = ("waited", "speed", "loss", "eta")


def live_line(seen: Sequence[Seen], width: int = 0, unicode: bool = True) -> str:
    """A run's position: bar, step, time in this step, loss, speed, share of time waited, time left.

    Fills the width; without a width there is no bar.
    """
    ranks = Health(seen).training()
    if all(one.run["step"] is None for one in ranks):
        watched = max(one.age for one in ranks)
        return "starting%s: %s" % (" for %s" % whole_seconds(watched) if watched >= QUIET else "", phases_text(ranks))
    words = _live_parts(ranks)
    for name in DISPENSABLE:
        if 0 < width < len("  ".join(words.values())):
            words.pop(name, None)
    line = "  ".join(words.values())
    (done, total), room = _made(ranks), min(BAR[1], width - len(line) - 2)
    if not total or room < BAR[0] or not unicode:
        return line
    full = min(room, room * done // total)
    return "%s  %s" % ("█" * full + "░" * (room - full), line)


def _live_parts(ranks: Sequence[Seen]) -> Dict[str, str]:
    """The line's parts by name, in order."""
    (done, steps), since, first = _made(ranks), _since_step(ranks), Health(ranks).first_known
    step = "step %d/%s" % (done, steps) if steps else "step %d" % done
    diverged = any(one.run["diverged"] for one in ranks)
    parts = {
        "step": "%s, %s" % (step, since) if since else step,
        "loss": "loss %s" % ("not a number" if diverged else loss_text(first("loss"))),
        "speed": "%s tok/s" % speed_text(first("tokens_per_second")),
    }
    shares = {one.host: one.run["wait_share"] for one in ranks if one.run["wait_share"] is not None}
    if shares and len(ranks) > 1:
        parts["waited"] = "waited " + ", ".join("%s %s" % (host, share_text(one)) for host, one in shares.items())
    eta = first("eta_seconds")
    if eta is not None:
        left = max(0.0, eta - min(one.looked for one in ranks))
        timed = first("ends") is not None
        parts["eta"] = ends_text(time.time() + left, first("share")) if timed else "%s left" % seconds_text(left)
    return parts


def _since_step(ranks: Sequence[Seen]) -> str:
    """Time since the last step, or what all wait for; nothing if steps are fast and news is fresh."""
    again = _between_generations(ranks)
    if again:
        return again
    ages = [one.run["step_age"] + one.looked for one in ranks if one.run["step_age"] is not None]
    usual, looked = Health(ranks).first_known("step_seconds") or 0.0, min(one.looked for one in ranks)
    if not ages or (usual < SLOW_STEP and min(ages) < QUIET):
        return ""
    if looked >= QUIET and usual < looked < LONGEST_PAUSE:
        # There will have been more steps since the poll.
        return "seen %s ago" % whole_seconds(looked)
    for one in (one for one in ranks if one.looked < QUIET):
        run = one.run
        if run["batch"]:
            return "evaluating, batch %s" % "/".join(str(run[name]) for name in ("batch", "batches") if run[name])
        if run["phase"] in PAUSES:
            return "%s for %s" % (PHASES[run["phase"]].words, whole_seconds((run["phase_seconds"] or 0.0) + one.looked))
    return "%s ago" % whole_seconds(min(ages))


def _between_generations(ranks: Sequence[Seen]) -> str:
    """Why keepers run without a rank; empty while a rank trains."""
    records = [one.keeper for one in ranks if one.keeper]
    if not records or any(one["state"] == TRAINING for one in records):
        return ""
    why = next((one["why"] for one in records if one["why"]), "")
    what = "waiting for hosts" if all(one["state"] in (IDLE, RESTING) for one in records) else "starting again"
    return "%s (%s)" % (what, why) if why else what


def regrouped(seen: Sequence[Seen], known: int) -> Tuple[int, str]:
    """The newest training generation, with a line about it if it is new."""
    health = Health(seen)
    if not health.parts or health.parts[0].generation <= known:
        return known, ""
    newest = health.parts[0]
    why = next((one["why"] for one in health.keepers.values() if one["state"] == TRAINING and one["why"]), "")
    line = "%s  generation %d: %s" % (clock_text(newest.since), newest.generation, ", ".join(newest.members))
    return newest.generation, "; ".join(filter(None, [line + (" (%s)" % why if why else ""), apart_text(health)]))


def whole_seconds(seconds: float) -> str:
    """A ticking time."""
    return "%d s" % seconds if seconds < 60 else seconds_text(seconds)


def phases_text(ranks: Sequence[Seen]) -> str:
    """Each host's phase; hosts in the same phase share a line."""
    doing: Dict[str, List[str]] = {}
    for one in ranks:
        phase, state = one.run["phase"], str(one.run["state"])
        words = PHASES.get(phase, OTHER).words or str(phase)
        if not phase:
            words = {"running": "started", "None": "not seen yet"}.get(state, state)
        doing.setdefault(words, []).append(one.host)
    return "; ".join("%s %s" % (named(hosts), words) for words, hosts in doing.items())


def _made(ranks: Sequence[Seen]) -> Tuple[int, int]:
    """Steps finished by all, and their total (0: unknown), both from the same host: another one may have been polled
    before the run was extended. Hosts polled before their first step are assumed to be where the others are."""
    stepping = [one for one in ranks if one.run["step"] is not None] or ranks
    slowest = min((one.run for one in stepping), key=lambda run: int(run["done"]))
    return slowest["done"], slowest["steps"] or Health(ranks).first_known("steps") or 0
