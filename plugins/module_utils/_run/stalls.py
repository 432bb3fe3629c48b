# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides whether a run makes progress, for run_watch, the status and the doctor.

Three rules: A rank's own report outweighs the look of its process. A process that uses CPU, or waits for a core, is working, so a slow
run on a busy machine is not called stalled. And a run stalls as a whole: the others wait for a rank that evaluates or saves, for a
good reason.

Pure functions of run_info's results.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from .._contract.keeper_states import TRAINING
from .membership_view import parts
from .state import CRASHED, RUNNING, keeper_lives

HEARTBEAT_SECONDS = 45.0  # the trainer writes its heartbeat every second
AWAY_SECONDS = 20.0  # a host may be silent this long before the others are asked about it
BUSY = 0.5  # fraction of a core that a working rank uses or waits for; a waiting one's heartbeat needs far less
QUIET_SECONDS, QUIET_STEPS = 10.0, 3.0  # without a step for longer than both, the line says so
STALLED = "stalled"
NO_HEARTBEAT = "no heartbeat"
LONGEST_STEP = 5.0  # in usual steps


class StallLimits(NamedTuple):
    """Time limits in seconds."""

    minimum: float = 45.0  # of a step, however short the usual one
    timeout: float = 300.0  # the plan's, for phases without a usual length

    @property
    def start(self) -> float:
        """Limit until the first steps are done."""
        return min(self.timeout, 5 / 3 * self.minimum)


class ObservedRank(NamedTuple):
    """One rank, as input of the judgement."""

    run: Mapping[str, Any]  # from run_info
    without_cpu: float = math.inf  # seconds since its processes last used CPU; infinite if unknown
    age: float = 0.0  # seconds since its start, if known
    silent: float = 0.0  # seconds that its host has been silent


class Patience(NamedTuple):
    """Timeouts in seconds without progress: for a rank that uses no CPU, and for one that does."""

    idle: str
    working: str


# The one table of timeouts. A step has a usual length; phases that use a disk or have no usual length get the plan's timeout
# or three times that.
PATIENCE: Dict[Optional[str], Patience] = {
    # At the end ranks wait for each other, without using CPU.
    **dict.fromkeys(("start", "rendezvous", "agree", "end"), Patience("start", "timeout")),
    **dict.fromkeys(("resume", "share"), Patience("timeout", "long")),
    "data": Patience("step", "long"),
    **dict.fromkeys(("forward_backward", "head", "sync", "optimizer"), Patience("step", "timeout")),
    **dict.fromkeys(("eval", "sample", "save"), Patience("long", "long")),
    # A trainer that does not report phases still evaluates and saves.
    None: Patience("step", "long"),
}


def patience(run: Mapping[str, Any], limits: StallLimits, one_missing: bool) -> Tuple[float, float]:
    """Timeouts without progress for a rank, without and with CPU use.

    one_missing: another rank is known to be missing, so a rank without CPU use can only be waiting for it.
    """
    idle, working = PATIENCE.get("start" if is_mute(run) else run.get("phase"), PATIENCE[None])
    seconds = {
        "start": limits.start,
        "step": _step_seconds(run, limits),
        "timeout": limits.timeout,
        "long": 3 * limits.timeout,
    }
    without = limits.minimum if one_missing else seconds[idle]
    return without, max(without, seconds[idle], seconds[working])


def _step_seconds(run: Mapping[str, Any], limits: StallLimits) -> float:
    """The usual step time, ignoring the first steps."""
    if run.get("step_seconds") is None or (run.get("steps_counted") or 0) < 2:
        return limits.start
    return max(limits.minimum, LONGEST_STEP * float(run["step_seconds"]))


def state_of(run: Mapping[str, Any]) -> Optional[str]:
    """The state of a rank; one that has reported an error has crashed, even if its processes are still exiting.

    A heartbeat in a phase other than the last comes from a trainer restarted in the same session.
    """
    has_ended = run.get("end_reason") == "error" and run.get("phase") in (None, "end")
    if run.get("state") == RUNNING and has_ended and not keeper_lives(run):
        return CRASHED
    return run.get("state")


def waits_for_others(run: Mapping[str, Any]) -> bool:
    """Whether a keeper runs here without a rank, waiting for enough hosts, which is not this host's fault."""
    return keeper_lives(run) and run["membership"]["state"] != TRAINING


def standstill(run: Mapping[str, Any]) -> Optional[float]:
    """Seconds since a running rank's last step, if longer than its steps take."""
    age = run.get("step_age") if run.get("state") == RUNNING else None
    usual = max(QUIET_SECONDS, QUIET_STEPS * float(run.get("step_seconds") or 0.0))
    return age if age is not None and age > usual else None


def seconds_without_cpu(run: Mapping[str, Any]) -> float:
    """Seconds since a rank used CPU, from a single poll: none or unknown (infinite)."""
    return 0.0 if (run.get("busy") or 0.0) >= BUSY else math.inf


def is_mute(run: Mapping[str, Any]) -> bool:
    """Whether a rank has reported nothing yet: it is loading libraries, or waits at the rendezvous."""
    return run.get("phase") is None and run.get("step") is None and run.get("idle_seconds") is None


def has_no_heartbeat(rank: ObservedRank, limits: StallLimits) -> bool:
    """Whether a rank's heartbeat has stopped although it is not busy."""
    if waits_for_others(rank.run):
        return False
    age = rank.run.get("heartbeat_age") or 0.0
    return min(age, rank.without_cpu) > HEARTBEAT_SECONDS or age > max(HEARTBEAT_SECONDS, limits.timeout)


def idle_seconds(rank: ObservedRank) -> Optional[float]:
    """Seconds without progress."""
    if is_mute(rank.run):
        return rank.age
    idle: Optional[float] = rank.run.get("idle_seconds")
    return idle


def is_stuck(rank: ObservedRank, limits: StallLimits, one_missing: bool = False) -> Optional[bool]:
    """Whether a rank makes no progress; None if neither its reports nor its CPU use tell."""
    if waits_for_others(rank.run):
        return None
    if has_no_heartbeat(rank, limits):
        return True
    idle = idle_seconds(rank)
    if idle is None:
        return False if rank.without_cpu <= limits.minimum else None
    without, working = patience(rank.run, limits, one_missing)
    return min(idle, rank.without_cpu) > without or idle > working


def is_stalled(ranks: Mapping[str, ObservedRank], limits: StallLimits) -> bool:
    """Whether the run as a whole is stalled: no running, reachable rank makes progress.

    Hosts that keepers train without are ignored, and so are ranks of unknown state: other trainers, whose first rank alone reports
    steps, are judged by that one.
    """
    members = {host for part in parts({name: rank.run for name, rank in ranks.items()}) for host in part.members}
    ranks = {name: rank for name, rank in ranks.items() if not members or name in members}
    away = {name for name, rank in ranks.items() if rank.silent > AWAY_SECONDS}
    near = [rank for name, rank in ranks.items() if state_of(rank.run) == RUNNING and name not in away]
    one_missing = bool(away) or any(has_no_heartbeat(rank, limits) for rank in near)
    found = [is_stuck(rank, limits, one_missing) for rank in near]
    return True in found and False not in found


def stall_marks(ranks: Mapping[str, ObservedRank], limits: StallLimits) -> Dict[str, str]:
    """Remarks on the ranks of a run: those without a heartbeat, and all if the run stalls."""
    running = {name: rank for name, rank in ranks.items() if state_of(rank.run) == RUNNING}
    marks = dict.fromkeys(running, STALLED) if is_stalled(ranks, limits) else {}
    marks.update({name: NO_HEARTBEAT for name, rank in running.items() if has_no_heartbeat(rank, limits)})
    return marks
