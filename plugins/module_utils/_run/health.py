# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The health of a run, for the watcher, the status, the live line and the doctor: who trains, and whether the run makes progress.

Progress has three rules: A rank's own report outweighs the look of its process. A process that uses CPU, or waits for a core, is working,
so a slow run on a busy machine is not called stalled. And a run stalls as a whole: the others wait for a rank that evaluates or saves, for
a good reason.

Pure functions of run_info's results; sentences.py has the words.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, cast

from .._contract.keeper_states import FAILED, OVER, RESTING, TRAINING
from .members import Membership
from .state import CRASHED, EMPTY, FINISHED, RUNNING

Run = Mapping[str, Any]  # of run_info, with every key of RunState
UNSEEN: Run = {**EMPTY, "state": None}

HEARTBEAT_SECONDS = 45.0  # the trainer writes its heartbeat every second
AWAY_SECONDS = 20.0  # a host may be silent this long before the others are asked about it
BUSY = 0.5  # fraction of a core that a working rank uses or waits for; a waiting one's heartbeat needs far less
QUIET_SECONDS, QUIET_STEPS = 10.0, 3.0  # without a step for longer than both, the line says so
STALLED = "stalled"
NO_HEARTBEAT = "no heartbeat"
LOST = "lost"
LONGEST_STEP = 5.0  # in usual steps


class StallLimits(NamedTuple):
    """Time limits in seconds."""

    minimum: float = 45.0  # of a step, however short the usual one
    timeout: float = 300.0  # the plan's, for phases without a usual length

    @property
    def start(self) -> float:
        """Limit until the first steps are done."""
        return min(self.timeout, 5 / 3 * self.minimum)


USUAL = StallLimits()


class Seen(NamedTuple):
    """A host of a run as it was last seen."""

    host: str
    run: Run = UNSEEN
    age: float = 0.0  # seconds since watching it began
    looked: float = 0.0  # seconds since its last answer
    silent: float = 0.0  # seconds that it has not answered; infinite if it never did
    without_cpu: float = math.inf  # seconds since its rank last used CPU; infinite if unknown
    ended: float = 0.0  # seconds since its end was first seen
    verdict: Optional[str] = None  # the final one
    problem: Optional[str] = None  # why there is no answer
    newest_run: Optional[str] = None  # the host's, which may be another one
    mark: Optional[str] = None  # STALLED or NO_HEARTBEAT, from Health.marks

    @property
    def state(self) -> Optional[str]:
        """Its rank's state; one that has reported an error has crashed, even if its processes are still exiting.

        A heartbeat in a phase other than the last comes from a trainer restarted in the same session.
        """
        has_ended = self.run["end_reason"] == "error" and self.run["phase"] in (None, "end")
        return CRASHED if self.run["state"] == RUNNING and has_ended and not self.keeper else self.run["state"]

    @property
    def keeper(self) -> Optional[Membership]:
        """The last record of its live keeper."""
        return self.run["membership"] if self.run["state"] == RUNNING else None

    @property
    def last_word(self) -> Optional[str]:
        """The last state of an ended keeper; None while it lives, if it died silently, or if there was none."""
        record = self.run["membership"]
        return record["state"] if record and not self.keeper and record["state"] in OVER else None

    @property
    def lost_its_keeper(self) -> bool:
        """Whether its keeper is gone without a regular end, so that nothing restarts a rank there."""
        return bool(self.run["membership"]) and self.run["state"] == CRASHED and self.last_word is None

    @property
    def rests(self) -> bool:
        """Whether it is away and will return by itself."""
        return self.keeper is not None and self.keeper["state"] == RESTING

    @property
    def waits(self) -> bool:
        """Whether its keeper runs without a rank, waiting for enough hosts, which is not this host's fault."""
        return self.keeper is not None and self.keeper["state"] != TRAINING

    @property
    def is_mute(self) -> bool:
        """Whether its rank has reported nothing yet: it is loading libraries, or waits at the rendezvous."""
        return all(self.run[key] is None for key in ("phase", "step", "idle_seconds"))

    @property
    def standstill(self) -> Optional[float]:
        """Seconds since a running rank's last step, if longer than its steps take."""
        age = self.run["step_age"] if self.run["state"] == RUNNING else None
        usual = max(QUIET_SECONDS, QUIET_STEPS * (self.run["step_seconds"] or 0.0))
        return age if age is not None and age > usual else None

    @property
    def idle(self) -> Optional[float]:
        """Seconds without progress."""
        own = self.run["session_age" if self.is_mute else "idle_seconds"]
        return self.age if self.is_mute and own is None else cast(Optional[float], own)

    @property
    def is_away(self) -> bool:
        """Whether it has been silent for long; a host that is no longer watched is not polled, so it is not silent."""
        return self.silent > AWAY_SECONDS and self.verdict in (None, LOST)


def without_cpu(run: Run) -> float:
    """Seconds since a rank used CPU, from a single poll: none or unknown (infinite)."""
    return 0.0 if (run["busy"] or 0.0) >= BUSY else math.inf


class TrainingPart(NamedTuple):
    """Hosts that now train together."""

    generation: int
    members: Tuple[str, ...]
    since: float
    done: int  # finished steps


class Health:
    """A run's hosts together."""

    def __init__(self, seen: Iterable[Seen], limits: StallLimits = USUAL) -> None:
        self.seen = {one.host: one for one in seen}
        self.limits = limits
        self.keepers = {host: one.keeper for host, one in self.seen.items() if one.keeper}
        self.parts: List[TrainingPart] = []  # newest generation first; several if the network is split
        training = [one for one in self.keepers.values() if one["state"] == TRAINING and one["members"]]
        for one in sorted(training, key=lambda each: -(each["generation"] or 0)):
            members = tuple(one["members"])
            # Of two generations that share a host, the older one is over; one keeper was polled too early.
            if not any(set(members) & set(part.members) for part in self.parts):
                done = max((self.seen[each].run["done"] for each in members if each in self.seen), default=0)
                self.parts.append(TrainingPart(one["generation"] or 0, members, one["since"], done))

    def by_rank(self) -> List[Seen]:
        """Sort by rank; hosts without a rank last."""
        return sorted(self.seen.values(), key=lambda one: (one.run["rank"] is None, one.run["rank"] or 0, one.host))

    def first_known(self, key: str) -> Any:
        """A run-wide value from the first rank that has it."""
        return next((one.run[key] for one in self.by_rank() if one.run[key] is not None), None)

    def trains(self, host: str) -> bool:
        """Whether a host is in a part that trains."""
        return self.seen[host].run["state"] in (None, RUNNING) and any(host in part.members for part in self.parts)

    def training(self) -> List[Seen]:
        """The hosts of the newest part by rank; all without keepers."""
        members = [one for one in self.by_rank() if self.parts and one.host in self.parts[0].members]
        return members or self.by_rank()

    def gave_up(self) -> Optional[str]:
        """The host whose keeper gave up first, followed by the others; None if none did."""
        failed = [host for host, one in self.seen.items() if one.last_word == FAILED]
        return min(failed, key=lambda host: float(self.seen[host].run["membership"]["since"]), default=None)

    def newest_record(self) -> Optional[Membership]:
        """The last record of the keeper that trained last."""
        records = [one.run["membership"] for one in self.seen.values() if one.run["membership"]]
        return max(records, key=lambda one: (one["state"] == TRAINING, one["generation"] or 0), default=None)

    def slowest(self) -> Optional[str]:
        """The host that the others wait for, which waits least itself; None if nobody waits much."""
        shares = {one.host: one.run["wait_share"] for one in self.training() if one.run["wait_share"] is not None}
        if len(shares) < 2 or any(one.run["state"] not in (RUNNING, FINISHED) for one in self.training()):
            return None
        least = min(shares, key=lambda host: shares[host])
        return least if max(shares.values()) - shares[least] > 0.05 else None

    @functools.cached_property
    def stalled(self) -> bool:
        """Whether no running, reachable rank makes progress.

        Hosts that keepers train without are ignored, and so are ranks of unknown state.
        """
        members = {host for part in self.parts for host in part.members}
        ranks = [one for host, one in self.seen.items() if not members or host in members]
        near = [one for one in ranks if one.state == RUNNING and not one.is_away]
        one_missing = any(one.is_away for one in ranks) or any(has_no_heartbeat(one, self.limits) for one in near)
        found = [is_stuck(one, self.limits, one_missing) for one in near]
        return True in found and False not in found

    def marks(self) -> Dict[str, str]:
        """Remarks on the ranks: those without a heartbeat, and all if the run stalls."""
        running = [one for one in self.seen.values() if one.state == RUNNING]
        found = {one.host: STALLED for one in running if self.stalled}
        return {**found, **{one.host: NO_HEARTBEAT for one in running if has_no_heartbeat(one, self.limits)}}


# -- one rank's progress ------------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """A phase of a trainer: its words, and its timeouts without progress for a rank that uses no CPU, and for one that does."""

    words: str
    idle: str
    working: str
    waits: bool = False  # for other ranks


STEP = Phase("making a step", "step", "timeout")
OTHER = Phase("", "step", "long")  # of another version
# The one table of phases. A step has a usual length; phases that use a disk or have no usual length get the plan's timeout or three times
# that.
PHASES: Dict[Optional[str], Phase] = {
    "start": Phase("loading", "start", "timeout"),
    "rendezvous": Phase("waiting for the others", "start", "timeout", waits=True),
    "agree": Phase("comparing settings", "start", "timeout", waits=True),
    "resume": Phase("loading the model", "timeout", "long"),
    "data": Phase("opening the data", "step", "long"),
    **dict.fromkeys(("forward_backward", "optimizer"), STEP),
    **dict.fromkeys(("head", "sync"), STEP._replace(waits=True)),
    "eval": Phase("evaluating", "long", "long"),
    "sample": Phase("writing samples", "long", "long"),
    "save": Phase("saving", "long", "long"),
    "share": Phase("changing the shares of the work", "timeout", "long"),
    "end": Phase("ending", "start", "timeout", waits=True),  # without using CPU
}


def patience(one: Seen, limits: StallLimits, one_missing: bool) -> Tuple[float, float]:
    """Timeouts without progress for a rank, without and with CPU use.

    one_missing: another rank is known to be missing, so a rank without CPU use can only be waiting for it.
    """
    phase = PHASES.get("start" if one.is_mute else one.run["phase"], OTHER)
    usual = one.run["step_seconds"] if one.run["steps_counted"] >= 2 else None  # ignoring the first steps
    seconds = {
        "start": limits.start,
        "step": limits.start if usual is None else max(limits.minimum, LONGEST_STEP * usual),
        "timeout": limits.timeout,
        "long": 3 * limits.timeout,
    }
    without = limits.minimum if one_missing else seconds[phase.idle]
    return without, max(without, seconds[phase.idle], seconds[phase.working])


def has_no_heartbeat(one: Seen, limits: StallLimits) -> bool:
    """Whether a rank's heartbeat has stopped although it is not busy."""
    age = 0.0 if one.waits else one.run["heartbeat_age"] or 0.0
    return min(age, one.without_cpu) > HEARTBEAT_SECONDS or age > max(HEARTBEAT_SECONDS, limits.timeout)


def is_stuck(one: Seen, limits: StallLimits, one_missing: bool) -> Optional[bool]:
    """Whether a rank makes no progress; None if that is unknown."""
    if not one.waits and has_no_heartbeat(one, limits):
        return True
    if one.waits or one.idle is None:
        return None
    without, working = patience(one, limits, one_missing)
    return min(one.idle, one.without_cpu) > without or one.idle > working
