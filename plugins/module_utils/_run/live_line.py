# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The live line of a run: position, speed, and what all ranks wait for."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from .._contract.keeper_states import IDLE, RESTING, TRAINING
from .._kit.words import clock_text, loss_text, seconds_text, share_text, speed_text
from .ending import ends_text
from .membership_view import apart_text, keepers, parts
from .state import RUNNING
from .table import Row, by_rank, first_known, runs_of, tells_nothing, training_rows

# -- the line during the run -----------------------------------------------------------------------------------------------

STEP = ("forward_backward", "head", "sync", "optimizer")
PHASES = {
    "start": "loading",
    "rendezvous": "waiting for the others",
    "agree": "comparing settings",
    "resume": "reading the checkpoint",
    "data": "opening the data",
    **dict.fromkeys(STEP, "making the first step"),
    "eval": "evaluating",
    "sample": "writing samples",
    "save": "saving",
    "share": "changing the shares of the work",
    "end": "ending",
}
# What all ranks wait for between steps and after a start.
PAUSES = ("eval", "sample", "save", "share", "start", "rendezvous", "agree", "resume", "data")
SLOW_STEP = 2.0  # from this usual step time on, the line counts the seconds since the last step
QUIET = 3.0  # and after this long without news
LONGEST_PAUSE = 25.0  # longest interval between polls, unless nothing new is expected
BAR = (8, 30)
# Order in which parts are dropped in a narrow terminal.
DISPENSABLE = ("waiting", "speed", "loss", "eta")


def live_line(rows: Sequence[Row], width: int = 0, unicode: bool = True) -> str:
    """A run's position: bar, step, time in this step, loss, speed, share of time waiting, time left.

    Fills the width; without a width there is no bar. A row's `age` is the time since its last poll,
    `watched` the time since watching began.
    """
    apart = [", ".join(part.members) for part in parts(runs_of(rows))[1:]]
    rows = by_rank(training_rows(rows))
    if not any(row["run"].get("step") is not None for row in rows):
        watched = max(float(row.get("watched") or 0.0) for row in rows)
        return "starting%s: %s" % (" for %s" % whole_seconds(watched) if watched >= QUIET else "", phases_text(rows))
    words = _live_parts(rows)
    if apart:
        words["apart"] = "%s apart" % ", ".join(apart)

    def too_long() -> bool:
        return width > 0 and len("  ".join(words.values())) > width

    if "waiting" in words and too_long():
        words["waiting"] = _waiting(rows, named=False)
    for name in DISPENSABLE:
        if too_long():
            words.pop(name, None)
    return _with_bar("  ".join(words.values()), _made(rows), width, unicode)


def _with_bar(line: str, progress: Tuple[int, int], width: int, unicode: bool) -> str:
    """The line, behind a bar of what is done of a total if there is room."""
    (done, total), length = progress, min(BAR[1], width - len(line) - 2)
    if not total or length < BAR[0]:
        return line
    room = length if unicode else length - 2
    full = min(room, room * done // total)
    drawn = "█" * full + "░" * (room - full) if unicode else "[" + "#" * full + "." * (room - full) + "]"
    return "%s  %s" % (drawn, line)


def _live_parts(rows: Sequence[Row]) -> Dict[str, str]:
    """The line's parts by name, in order."""
    done, steps = _made(rows)
    step = "step %d/%s" % (done, steps) if steps else "step %d" % done
    since = _since_step(rows)
    parts = {"step": "%s, %s" % (step, since) if since else step}
    diverged = any(row["run"].get("diverged") for row in rows)
    parts["loss"] = "loss %s" % ("not a number" if diverged else loss_text(first_known(rows, "loss")))
    parts["speed"] = "%s tok/s" % speed_text(first_known(rows, "tokens_per_second"))
    parts["waiting"] = _waiting(rows, named=True)
    eta = first_known(rows, "eta_seconds")
    if eta is not None:
        left = max(0.0, eta - min(_age(row) for row in rows))
        parts["eta"] = "%s left" % seconds_text(left)
        if first_known(rows, "ends") is not None:
            parts["eta"] = ends_text(time.time() + left, first_known(rows, "share"))
    return {name: text for name, text in parts.items() if text}


def _waiting(rows: Sequence[Row], named: bool) -> str:
    """The share of time that each rank waits for others; with many ranks, the longest."""
    known = {row["host"]: row["run"]["wait_share"] for row in rows if row["run"].get("wait_share") is not None}
    if not known or len(rows) < 2:
        return ""
    if len(known) > 4:
        most = max(known, key=lambda host: float(known[host]))
        return "waiting up to %s%s" % (share_text(known[most]), " (%s)" % most if named else "")
    if not named:
        return "waiting " + " / ".join(map(share_text, known.values()))
    return "waiting " + ", ".join("%s %s" % (host, share_text(share)) for host, share in known.items())


def _since_step(rows: Sequence[Row]) -> str:
    """Time since the last step, or what all wait for; nothing if steps are fast and news is fresh."""
    again = _between_generations(rows)
    if again:
        return again
    ages = [row["run"]["step_age"] + _age(row) for row in rows if row["run"].get("step_age") is not None]
    usual, looked = first_known(rows, "step_seconds") or 0.0, min(map(_age, rows))
    if not ages or (usual < SLOW_STEP and min(ages) < QUIET):
        return ""
    if looked >= QUIET and usual < looked < LONGEST_PAUSE:
        # There will have been more steps since the poll.
        return "seen %s ago" % whole_seconds(looked)
    for row in rows:
        run = row["run"]
        if run.get("batch") and _age(row) < QUIET:
            return "evaluating, batch %s" % "/".join(str(run[name]) for name in ("batch", "batches") if run.get(name))
        if run.get("phase") in PAUSES and _age(row) < QUIET:
            return "%s for %s" % (PHASES[run["phase"]], whole_seconds((run.get("phase_seconds") or 0.0) + _age(row)))
    return "%s ago" % whole_seconds(min(ages))


def _between_generations(rows: Sequence[Row]) -> str:
    """Why keepers run without a rank; empty while a rank trains."""
    records = keepers(runs_of(rows)).values()
    if not records or any(one["state"] == TRAINING for one in records):
        return ""
    why = next((one["why"] for one in records if one["why"]), "")
    what = "waiting for hosts" if all(one["state"] in (IDLE, RESTING) for one in records) else "starting again"
    return "%s (%s)" % (what, why) if why else what


def regrouped(rows: Sequence[Row], known: int) -> Tuple[int, str]:
    """The newest training generation, with a line about it if it is new."""
    records = keepers(runs_of(rows)).values()
    training = [one for one in records if one["state"] == TRAINING]
    if not training:
        return known, ""
    newest = max(training, key=lambda one: int(one["generation"] or 0))
    number, why = int(newest["generation"] or 0), next((one["why"] for one in training if one["why"]), "")
    if number <= known:
        return known, ""
    line = "%s  generation %d: %s" % (clock_text(float(newest["since"])), number, ", ".join(newest["members"]))
    line = "%s (%s)" % (line, why) if why else line
    return number, "; ".join(text for text in (line, apart_text(runs_of(rows))) if text)


def whole_seconds(seconds: float) -> str:
    """A ticking time."""
    return "%d s" % seconds if seconds < 60 else seconds_text(seconds)


def phases_text(rows: Sequence[Row]) -> str:
    """Each host's phase; hosts in the same phase share a line."""
    doing: Dict[str, List[str]] = {}
    for row in rows:
        doing.setdefault(_doing(row["run"]), []).append(row["host"])
    return "; ".join(
        "%s %s" % (", ".join(hosts) if len(hosts) <= 4 else "%d hosts" % len(hosts), phase)
        for phase, hosts in doing.items()
    )


def _doing(run: Mapping[str, Any]) -> str:
    """A rank's phase in words."""
    phase = run.get("phase")
    if phase == "resume" and not run.get("checkpoint"):
        return "making the model"
    if phase in STEP and (run.get("done") or run.get("checkpoint")):
        return "making a step"
    if phase:
        return PHASES.get(str(phase), str(phase))
    # Of a trainer without any output nothing else is known.
    return "started" if run.get("state") == RUNNING else str(run.get("state") or "not seen yet")


def _age(row: Row) -> float:
    return float(row.get("age") or 0.0)


def _made(rows: Sequence[Row]) -> Tuple[int, int]:
    """Steps finished by all, and their total (0: unknown), both from the same host: another one may have been polled
    before the run was extended. Hosts polled before their first step are assumed to be where the others are."""
    stepping = [row for row in rows if row["run"].get("step") is not None]
    telling = stepping or [row for row in rows if not tells_nothing(row["run"])] or rows
    slowest = min((row["run"] for row in telling), key=lambda run: int(run.get("done") or 0))
    return int(slowest.get("done") or 0), int(slowest.get("steps") or first_known(rows, "steps") or 0)
