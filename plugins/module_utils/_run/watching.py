# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides when watching a host is over, from the health of the run; the verb run_watch does the polling and remembering."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional

from .health import AWAY_SECONDS, LOST, STALLED, UNSEEN, Health, Run, Seen, StallLimits, has_no_heartbeat
from .sentences import reason
from .state import ABSENT, AWAY, CRASHED, ENDED, FINISHED, PREPARED, RUNNING, STOPPED

ORPHANED = "orphaned"
MISSING = "missing"
STARTED = "started"

ENDING_GRACE = 20.0  # a rank that has reported an error exits by itself
MISSING_GRACE = 60.0
START_GRACE = 30.0  # time for keepers to notice a missing host and start without it
LOST_SECONDS = 600.0  # maximum silence of a host; training there does not need the controller


class WatchVerdict(NamedTuple):
    """Why watching this host is over, as a sentence too."""

    verdict: str
    sentence: str


class WatchedRun(NamedTuple):
    """Judges the hosts of a run for a watcher."""

    health: Health
    first_step: bool

    def verdict(self, host: str) -> Optional[WatchVerdict]:
        """The verdict on a host, or None to continue watching."""
        own, seen = self.health.seen[host], self.health.seen
        if not any(one.run["membership"] for one in seen.values()):
            return self._alone(own)
        # Keepers can continue without hosts: one that nobody misses is not given up while the others train.
        overs = [one.verdict for name, one in seen.items() if name != host]
        trains = own.silent <= AWAY_SECONDS and self.health.trains(host)
        if own.run["state"] == FINISHED or STALLED in overs or trains:
            return self._alone(own)
        near = own.keeper is not None and own.silent <= AWAY_SECONDS
        finished = any(one.run["state"] == FINISHED for name, one in seen.items() if name != host)
        if finished or (self.first_step and STARTED in overs):
            # A keeper that hears of the end follows within seconds.
            follows = near and _stepless(own) <= MISSING_GRACE
            return None if follows else WatchVerdict(AWAY, "was away while the others trained")
        if own.keeper or any(other != host for other in self.health.keepers):
            if self.health.parts or not self._waited_too_long():
                return None
            if own.keeper and own.silent <= LOST_SECONDS:
                return WatchVerdict(ORPHANED, reason(self.health, host))
        return self._alone(own)

    def _alone(self, own: Seen) -> Optional[WatchVerdict]:
        """The verdict if a run lives or dies as a whole."""
        state = own.run["state"]
        # While its processes use CPU it may be restarting.
        if state in ENDED or (own.state == CRASHED and min(own.ended, own.without_cpu) > ENDING_GRACE):
            return ended(own.run)
        if own.silent > LOST_SECONDS:
            return WatchVerdict(LOST, "has not answered for %.0f s; it continues without the controller" % own.silent)
        if state != RUNNING:
            missing = WatchVerdict(MISSING, "has no session (in %s)" % own.run["run_dir"])
            return missing if own.age > MISSING_GRACE else None
        if self.first_step and own.run["step"] is not None:
            return WatchVerdict(STARTED, "training started (%s)" % _where(own.run))
        return self._stalled(own)

    def _waited_too_long(self) -> bool:
        """Whether all waiting hosts have waited so long for the missing ones that these will not come."""
        seen = self.health.seen.values()
        waiting = [one for one in seen if one.keeper and one.silent <= AWAY_SECONDS]
        if not waiting or any(one.rests for one in waiting):
            return not waiting
        grace = max(one.run["membership"]["grace"] for one in waiting)
        gone = [one for one in seen if one not in waiting]
        dead = any(one.run["state"] in (CRASHED, STOPPED, AWAY, ABSENT, PREPARED) for one in gone)
        after = LOST_SECONDS if gone else self.health.limits.timeout + grace
        return min(map(_stepless, waiting)) > (max(MISSING_GRACE, START_GRACE + 2 * grace) if dead else after)

    def _stalled(self, own: Seen) -> Optional[WatchVerdict]:
        """The run stalls as a whole, so all hosts get the verdict of the first."""
        seen = self.health.seen
        if not self.health.stalled and not any(one.verdict == STALLED for one in seen.values()):
            return None
        run = own.run
        if own.is_away:
            text = "has not answered for %.0f s, and the others make no progress" % own.silent
        elif has_no_heartbeat(own, self.health.limits):
            text = "has no heartbeat for %.0f s (%s)" % (run["heartbeat_age"], _where(run))
        else:
            text = "has made no progress for %.0f s in phase %s%s (%s; a step usually takes %s)" % (
                own.idle or 0.0,
                run["phase"] or "start",
                " (collective %s)" % run["collective"] if run["collective"] else "",
                _where(run),
                "%.1f s" % run["step_seconds"] if run["step_seconds"] else "an unknown time",
            )
        return WatchVerdict(STALLED, text)


def judge(host: str, seen: Mapping[str, Seen], limits: StallLimits, first_step: bool = False) -> Optional[WatchVerdict]:
    """The verdict on a host, or None to continue watching."""
    # The state of a host that was silent for too long is unknown.
    known = [one if one.silent <= LOST_SECONDS else one._replace(run=UNSEEN) for one in seen.values()]
    return WatchedRun(Health(known, limits), first_step).verdict(host)


def _stepless(one: Seen) -> float:
    """Seconds since a host's last step, or since its session began."""
    return one.run["session_age" if one.run["step_age"] is None else "step_age"] or 0.0


def ended(run: Run) -> WatchVerdict:
    """How a rank that runs no more ended."""
    if run["state"] == FINISHED:
        return WatchVerdict(FINISHED, "finished after %s steps" % run["done"])
    if run["state"] in (STOPPED, AWAY):
        why = ": %s" % run["cause"] if run["cause"] else ""
        what = "was stopped before its end" if run["state"] == STOPPED else "left the run"
        return WatchVerdict(run["state"], "%s, %s%s" % (what, _where(run), why))
    if run["state"] == RUNNING:
        return WatchVerdict(CRASHED, "ended with an error, %s: %s" % (_where(run), run["end_error"] or "no output"))
    code = "without an exit code" if run["exit_code"] is None else "with code %s" % run["exit_code"]
    return WatchVerdict(CRASHED, "crashed %s, %s: %s" % (code, _where(run), run["error"] or "no output"))


def _where(run: Run) -> str:
    return "%s of %s steps made" % (run["done"], run["steps"]) if run["steps"] else "%s steps made" % run["done"]


def intervals(elapsed: float, first_step: bool = False) -> Dict[str, float]:
    """Poll intervals: every three seconds at first, every twenty in a long run, to keep the cost low.

    A verdict within two minutes leaves no room for longer: timeout, a poll of a frozen host, and the doctor.
    Waiting only for the first step ends at once when it comes.
    """
    at_least = min(20.0, 3.0 + elapsed / 10.0)
    return {"at_least": 0.0 if first_step else at_least, "timeout": at_least + 5.0}
