# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When watching is over: the judgement on one host's share of a run, given what is known of the others.

Pure functions of what run_info returned; the action plugin run_watch does the looking and the remembering.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional

from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import (
    ABSENT,
    CRASHED,
    ENDED,
    FINISHED,
    PREPARED,
    RUNNING,
    STOPPED,
)

STALLED = "stalled"
ORPHANED = "orphaned"
LOST = "lost"
MISSING = "missing"
STARTED = "started"
GOOD = (FINISHED, STARTED)

# All ranks wait in these for one that does work which has no usual length.
LONG_PHASES = ("eval", "sample", "save")
HEARTBEAT_LIMIT = 45.0
ORPHAN_GRACE = 20.0  # the other ranks see a broken connection at once and end by themselves
MISSING_GRACE = 60.0
AWAY_GRACE = 20.0  # a host may be out of reach for so long before the others are asked whether they miss it


class Patience(NamedTuple):
    """How long what may take."""

    factor: float = 5.0  # usual steps that one step may take
    minimum: float = 45.0  # but at least this many seconds
    timeout: float = 300.0  # the plan's timeout: what has no usual length
    lost: float = 600.0  # a host may be out of reach for this long
    mute: float = 0.0  # all ranks may say nothing of themselves for this long; 0 for a trainer that never does


class Sight(NamedTuple):
    """What is known of one host: the last answer, how old it is, and for how long the host cannot be reached."""

    run: Mapping[str, Any]
    age: float = 0.0
    unreachable: float = 0.0
    ended: float = 0.0  # seconds since its end was first seen


class Verdict(NamedTuple):
    """Why watching this host is over, and the sentence for it."""

    verdict: str
    sentence: str


def limit_seconds(run: Mapping[str, Any], patience: Patience, bereft: bool = False) -> float:
    """For how long this rank may show no progress; the first steps set no measure.

    Bereft: another rank gives no sign of life, so what this one does may take no longer because it usually does.
    """
    if bereft:
        return patience.minimum
    if run.get("phase") in LONG_PHASES:
        return 3 * patience.timeout
    if run.get("step_seconds") is None or (run.get("steps_counted") or 0) < 2:
        return min(patience.timeout, 2 * patience.minimum)
    return max(patience.minimum, patience.factor * float(run["step_seconds"]))


def lifeless(sight: Sight) -> bool:
    """Whether the trainer of a rank that runs has stopped giving signs of life."""
    return (sight.run.get("heartbeat_age") or 0.0) > HEARTBEAT_LIMIT


def stands_still(sight: Sight, patience: Patience, bereft: bool = False) -> bool:
    """Whether this rank has shown no progress for longer than it may, or its trainer no life."""
    idle = sight.run.get("idle_seconds")
    return lifeless(sight) or (idle is not None and idle > limit_seconds(sight.run, patience, bereft))


def judge(host: str, sights: Mapping[str, Sight], patience: Patience, first_step: bool = False) -> Optional[Verdict]:
    """The verdict on a host, or None while there is reason to go on watching it."""
    own = sights[host]
    state = own.run.get("state")
    if state in ENDED:
        return _ended(own.run)
    if own.unreachable > patience.lost:
        return Verdict(LOST, _lost(own))
    if state != RUNNING:
        return _missing(own) if own.age > MISSING_GRACE else None
    # A trainer without metrics of our kind never says more; ours may take long to begin.
    mute = patience.mute == 0 and own.run.get("phase") is None and own.age > MISSING_GRACE
    if first_step and (own.run.get("step") is not None or mute):
        return Verdict(STARTED, "training has started (%s)" % _where(own.run))
    crashed = [name for name, sight in sights.items() if name != host and sight.run.get("state") == CRASHED]
    if crashed and sights[crashed[0]].ended > ORPHAN_GRACE:
        return Verdict(ORPHANED, "still runs and waits for %s, which crashed" % ", ".join(sorted(crashed)))
    never = [name for name, sight in sights.items() if sight.run.get("state") in (ABSENT, PREPARED)]
    if never and sights[never[0]].age > MISSING_GRACE:
        return Verdict(ORPHANED, "waits for %s, where nothing was started" % ", ".join(sorted(never)))
    return _stall(host, sights, patience)


def _ended(run: Mapping[str, Any]) -> Verdict:
    if run["state"] == FINISHED:
        return Verdict(FINISHED, "finished after %s steps" % run.get("done"))
    if run["state"] == STOPPED:
        return Verdict(STOPPED, "was stopped before its end, %s" % _where(run))
    code = "with code %s" % run["exit_code"] if run.get("exit_code") is not None else "without an exit code"
    return Verdict(CRASHED, "crashed %s, %s: %s" % (code, _where(run), run.get("error") or "it said nothing"))


def _where(run: Mapping[str, Any]) -> str:
    done, steps = run.get("done") or 0, run.get("steps")
    return "%s of %s steps made" % (done, steps) if steps else "%s steps made" % done


def _lost(own: Sight) -> str:
    return "cannot be reached for %.0f s; it was %s with %s then, and training there does not need this machine" % (
        own.unreachable,
        own.run.get("state") or "not yet seen",
        _where(own.run),
    )


def _missing(own: Sight) -> Verdict:
    state = own.run.get("state")
    seen = "has no run folder" if state == "absent" else "has a run folder but no session was started in it"
    return Verdict(MISSING, "%s (%s)" % (seen, own.run.get("run_dir")))


def _stall(host: str, sights: Mapping[str, Sight], patience: Patience) -> Optional[Verdict]:
    """All running ranks must stand still: one that evaluates or saves keeps the others waiting for a good reason.

    A host that is out of reach counts as standing still if there are others to ask and they miss it.
    """
    running = {name: sight for name, sight in sights.items() if sight.run.get("state") == RUNNING}
    away = [name for name, sight in sights.items() if sight.unreachable > AWAY_GRACE]
    near = [sight for name, sight in running.items() if name not in away]
    silent = patience.mute > 0 and all(_mute(sight, patience.mute) for sight in near)
    bereft = bool(away) or any(map(lifeless, near))
    still = [stands_still(sight, patience, bereft) for sight in near]
    missed = bool(away) and all(stands or _mute(sight, patience.minimum) for stands, sight in zip(still, near))
    if not near or not (silent or missed or all(still)):
        return None
    run = sights[host].run
    if host in away:
        return Verdict(STALLED, "cannot be reached for %.0f s, and the others stand still" % sights[host].unreachable)
    if run.get("idle_seconds") is None:
        what = "waits for %s, which cannot be reached" % ", ".join(sorted(away)) if away else "waits at the rendezvous"
        return Verdict(STALLED, "%s (%.0f s since it was first seen)" % (what, sights[host].age))
    if lifeless(sights[host]):
        return Verdict(STALLED, "gives no sign of life for %.0f s (%s)" % (run["heartbeat_age"], _where(run)))
    return Verdict(
        STALLED,
        "stands still for %.0f s in phase %s%s (%s; a step usually takes %s)"
        % (
            run["idle_seconds"],
            run.get("phase") or "unknown",
            " (collective %s)" % run["collective"] if run.get("collective") else "",
            _where(run),
            "%.1f s" % run["step_seconds"] if run.get("step_seconds") else "an unknown time",
        ),
    )


def _mute(sight: Sight, seconds: float) -> bool:
    """Whether a rank has said nothing of itself for so long since its start: it waits at the rendezvous."""
    return sight.run.get("phase") is None and sight.run.get("step") is None and sight.age > seconds


def intervals(elapsed: float) -> Dict[str, float]:
    """How often to look: every three seconds at first, three times a minute in a long run, so that looking costs it nothing.

    A verdict within two minutes has no room for longer: it takes the patience, a look at a host that froze, and the doctor.
    """
    at_least = min(20.0, 3.0 + elapsed / 10.0)
    return {"at_least": at_least, "timeout": at_least + 5.0}
