# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides when watching one host is over, also from the state of the others.

Pure functions of run_info results; the action plugin run_watch does the polling and remembering. stalls.py decides whether
the run makes progress.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence

from . import membership_view
from .stalls import AWAY_SECONDS, STALLED, ObservedRank, StallLimits, has_no_heartbeat, is_mute, is_stalled, state_of
from .state import ABSENT, AWAY, CRASHED, ENDED, FINISHED, PREPARED, RUNNING, STOPPED, keeper_lives

ORPHANED = "orphaned"
LOST = "lost"
MISSING = "missing"
STARTED = "started"

ORPHAN_GRACE = 20.0  # the other ranks notice a broken connection at once and exit by themselves
EARLY_GRACE = 5.0  # before they have met there is no connection to break
MISSING_GRACE = 60.0
START_GRACE = 30.0  # time for keepers to notice a missing host and start without it
LOST_SECONDS = 600.0  # maximum silence of a host


class Observation(NamedTuple):
    """One host as the watch sees it: the last answer, and its age."""

    run: Mapping[str, Any]
    age: float = 0.0  # seconds since the first poll
    silent: float = 0.0  # seconds of silence
    without_cpu: float = math.inf  # seconds since its rank last used CPU
    ended: float = 0.0  # seconds since its end was first seen
    over: Optional[str] = None  # the final verdict on it

    def is_over(self, grace: float = ORPHAN_GRACE) -> bool:
        """Whether its end was seen long enough ago; while its processes use CPU it may be restarting."""
        still_there = self.run.get("state") == RUNNING
        return min(self.ended, self.without_cpu if still_there else math.inf) > grace

    @property
    def rank(self) -> ObservedRank:
        """Input for stalls.py; a host that is no longer watched is not polled, so it is not silent."""
        age = self.run.get("session_age")
        silent = 0.0 if self.over not in (None, LOST) else self.silent
        return ObservedRank(self.run, self.without_cpu, self.age if age is None else float(age), silent)


class WatchVerdict(NamedTuple):
    """Why watching this host is over, as a sentence too."""

    verdict: str
    sentence: str


def judge(
    host: str,
    seen: Mapping[str, Observation],
    limits: StallLimits,
    first_step: bool = False,
    lost_after: float = LOST_SECONDS,
) -> Optional[WatchVerdict]:
    """The verdict on a host, or None to continue watching."""
    if _is_kept(seen):
        return _judge_kept(host, seen, limits, first_step, lost_after)
    return _judge_alone(host, seen, limits, first_step, lost_after)


def _judge_alone(
    host: str, seen: Mapping[str, Observation], limits: StallLimits, first_step: bool, lost_after: float
) -> Optional[WatchVerdict]:
    """The verdict if a run lives or dies as a whole."""
    own = seen[host]
    state = own.run.get("state")
    if state in ENDED or (state_of(own.run) == CRASHED and own.is_over()):
        return _ended(own.run)
    if own.silent > lost_after:
        then = "it was %s with %s then" % (state or "not yet seen", _where(own.run))
        text = "has not answered for %.0f s; %s, and continues without the controller" % (own.silent, then)
        return WatchVerdict(LOST, text)
    if state != RUNNING:
        there = "has no run folder" if state == ABSENT else "has a run folder but no session in it"
        missing = WatchVerdict(MISSING, "%s (%s)" % (there, own.run.get("run_dir")))
        return missing if own.age > MISSING_GRACE else None
    if first_step and own.run.get("step") is not None:
        return WatchVerdict(STARTED, "training started (%s)" % _where(own.run))
    return _orphaned(host, seen) or _stalled(host, seen, limits)


def _is_kept(seen: Mapping[str, Observation]) -> bool:
    """Whether the run has keepers, as far as known yet."""
    return any(one.run.get("membership") for one in seen.values())


def _judge_kept(
    host: str, seen: Mapping[str, Observation], limits: StallLimits, first_step: bool, lost_after: float
) -> Optional[WatchVerdict]:
    """The verdict if keepers can continue without hosts: a host that nobody misses is not given up while the others train."""
    own = seen[host]
    runs = {name: one.run if one.silent <= lost_after else {} for name, one in seen.items()}
    overs = [one.over for name, one in seen.items() if name != host]
    trains = own.silent <= AWAY_SECONDS and membership_view.trains(host, runs)
    if own.run.get("state") == FINISHED or STALLED in overs or trains:
        return _judge_alone(host, seen, limits, first_step, lost_after)
    if membership_view.others_finished(host, runs) or (first_step and STARTED in overs):
        # A keeper that hears of the end follows within seconds.
        waits = keeper_lives(own.run) and own.silent <= AWAY_SECONDS and _stepless(own) <= MISSING_GRACE
        return None if waits else WatchVerdict(AWAY, _away(host, runs))
    if any(other != host for other in membership_view.keepers(runs)) or keeper_lives(own.run):
        if membership_view.parts(runs) or not _waited_too_long(seen, limits, lost_after):
            return None
        if keeper_lives(own.run) and own.silent <= lost_after:
            return WatchVerdict(ORPHANED, membership_view.reason(host, runs))
    return _judge_alone(host, seen, limits, first_step, lost_after)


def _stepless(one: Observation) -> float:
    """Seconds since a host's last step, or since its session began."""
    return float(one.run.get("session_age" if one.run.get("step_age") is None else "step_age") or 0.0)


def _waited_too_long(seen: Mapping[str, Observation], limits: StallLimits, lost_after: float) -> bool:
    """Whether all waiting hosts have waited so long for the missing ones that these will not come."""
    if any(membership_view.rests(one.run) for one in seen.values() if one.silent <= AWAY_SECONDS):
        return False
    waiting = [one for one in seen.values() if keeper_lives(one.run) and one.silent <= AWAY_SECONDS]
    if not waiting:
        return True
    grace = max(float(one.run["membership"]["grace"]) for one in waiting)
    gone = [one for one in seen.values() if not keeper_lives(one.run) or one.silent > AWAY_SECONDS]
    dead = any(membership_view.is_out(one.run) or one.run.get("state") in (ABSENT, PREPARED) for one in gone)
    patience = max(MISSING_GRACE, START_GRACE + 2 * grace) if dead else lost_after if gone else limits.timeout + grace
    return min(map(_stepless, waiting)) > patience


def _away(host: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """When the run continued or finished without this host, as text."""
    since, why = membership_view.away_since(host, runs), membership_view.reason(host, runs)
    others = "finished" if membership_view.others_finished(host, runs) else "trained"
    text = "was away%s while the others %s" % (" " + since if since else "", others)
    return "%s (%s)" % (text, why) if why else text


def _ended(run: Mapping[str, Any]) -> WatchVerdict:
    if run["state"] == FINISHED:
        return WatchVerdict(FINISHED, "finished after %s steps" % run.get("done"))
    if run["state"] in (STOPPED, AWAY):
        why = ": %s" % run["cause"] if run.get("cause") else ""
        what = "was stopped before its end" if run["state"] == STOPPED else "left the run"
        return WatchVerdict(run["state"], "%s, %s%s" % (what, _where(run), why))
    if run["state"] == RUNNING:
        return WatchVerdict(CRASHED, "ended with an error, %s: %s" % (_where(run), run.get("end_error") or "no output"))
    code = "with code %s" % run["exit_code"] if run.get("exit_code") is not None else "without an exit code"
    return WatchVerdict(CRASHED, "crashed %s, %s: %s" % (code, _where(run), run.get("error") or "no output"))


def _where(run: Mapping[str, Any]) -> str:
    done, steps = run.get("done") or 0, run.get("steps")
    return "%s of %s steps made" % (done, steps) if steps else "%s steps made" % done


def _orphaned(host: str, seen: Mapping[str, Observation]) -> Optional[WatchVerdict]:
    """Whether this rank waits for one that crashed or was never started."""
    own = seen[host].run
    if keeper_lives(own):
        # Its keeper continues without them.
        return None
    grace = EARLY_GRACE if own.get("phase") in (None, "rendezvous") else ORPHAN_GRACE
    others = {name: one for name, one in sorted(seen.items()) if name != host}
    crashed = [name for name, one in others.items() if state_of(one.run) == CRASHED and one.is_over(grace)]
    if crashed:
        return WatchVerdict(ORPHANED, "still runs and waits for %s, which crashed" % ", ".join(crashed))
    late = {name: one.run for name, one in others.items() if one.age > MISSING_GRACE}
    never = [name for name, run in late.items() if run.get("state") in (ABSENT, PREPARED)]
    if never:
        return WatchVerdict(ORPHANED, "waits for %s, where nothing was started" % ", ".join(never))
    return None


def _stalled(host: str, seen: Mapping[str, Observation], limits: StallLimits) -> Optional[WatchVerdict]:
    """The run stalls as a whole, so all hosts get the verdict of the first."""
    ranks = {name: one.rank for name, one in seen.items()}
    if not is_stalled(ranks, limits) and not any(one.over == STALLED for one in seen.values()):
        return None
    away = sorted(name for name, rank in ranks.items() if rank.silent > AWAY_SECONDS)
    return WatchVerdict(STALLED, _stalled_text(host, seen[host], away, limits))


def _stalled_text(host: str, own: Observation, away: Sequence[str], limits: StallLimits) -> str:
    run = own.run
    if host in away:
        return "has not answered for %.0f s, and the others make no progress" % own.silent
    if has_no_heartbeat(own.rank, limits):
        return "has no heartbeat for %.0f s (%s)" % (run["heartbeat_age"], _where(run))
    if is_mute(run):
        what = "waits for %s, which does not answer" % ", ".join(away) if away else "waits at the rendezvous"
        return "%s (%.0f s after its start)" % (what, own.rank.age)
    return "has made no progress for %.0f s in phase %s%s (%s; a step usually takes %s)" % (
        run.get("idle_seconds") or 0.0,
        run.get("phase") or "unknown",
        " (collective %s)" % run["collective"] if run.get("collective") else "",
        _where(run),
        "%.1f s" % run["step_seconds"] if run.get("step_seconds") else "an unknown time",
    )


def intervals(elapsed: float, first_step: bool = False) -> Dict[str, float]:
    """Poll intervals: every three seconds at first, every twenty in a long run, to keep the cost low.

    A verdict within two minutes leaves no room for longer: timeout, a poll of a frozen host, and the doctor.
    Waiting only for the first step ends at once when it comes.
    """
    at_least = min(20.0, 3.0 + elapsed / 10.0)
    return {"at_least": 0.0 if first_step else at_least, "timeout": at_least + 5.0}
