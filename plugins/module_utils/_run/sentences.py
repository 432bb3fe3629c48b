# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The health of a run in words, for the watcher, the status, the live line, the report and the doctor."""

from __future__ import annotations

import time
from typing import Callable, Dict, Iterable, List, Optional

from .._contract.keeper_states import AWAY, FAILED, LEFT, RESTING, STUCK
from .._kit.words import clock_text, named, plural, seconds_text
from .._rules.causes import is_echo
from .health import NO_HEARTBEAT, STALLED, Health, Run, Seen
from .members import GaveWay
from .state import ABSENT, CRASHED, FINISHED, PREPARED, RUNNING, STOPPED

HOUR = 3600.0
MOST_ABSENCES = 6  # the newest ones are shown


# -- one host -----------------------------------------------------------------------------------------------------------


def since_text(seconds: float) -> str:
    """Elapsed time; beyond hours, the start time."""
    return "for %s" % seconds_text(seconds) if seconds < HOUR else "since %s" % clock_text(time.time() - seconds)


def state_text(one: Seen) -> str:
    """The state with the most important detail."""
    run, state = one.run, one.state
    phase = " (%s)" % run["phase"] if run["phase"] else ""
    if state in (None, ABSENT, PREPARED):
        return {ABSENT: "never started", PREPARED: "prepared, not started"}.get(str(state), "not reached")
    if one.lost_its_keeper:
        return "no keeper"
    if state == CRASHED:
        return "crashed" if run["exit_code"] is None else "crashed (code %s)" % run["exit_code"]
    if one.mark == NO_HEARTBEAT:
        return "no heartbeat %s" % since_text(run["heartbeat_age"])
    if one.mark == STALLED and one.idle is not None:
        return "stalled %s" % since_text(one.idle)
    if one.keeper and one.waits:
        return "away" if one.rests else "waiting (%s)" % one.keeper["state"]
    if state == RUNNING and run["step"] is None:
        return "starting%s" % phase
    still = one.standstill
    return str(state) if still is None else "no step %s%s" % (since_text(still), phase)


def reason(health: Health, host: str) -> str:
    """Why a host does not train with the others, to follow its name; empty if it trains or has no keeper."""
    one = health.seen[host]
    record = one.run["membership"]
    if not record or health.trains(host) or one.run["state"] == FINISHED:
        return ""
    if one.keeper:
        return _waits(health, host)
    if one.lost_its_keeper:
        lost = "has lost its keeper: %s; `ansible-playbook nanochat.ddp.join -e target=%s` starts one"
        return lost % (one.run["error"] or "it disappeared", host)
    words = {
        LEFT: "was removed by hand; nanochat.ddp.join readmits it",
        AWAY: "shut down; it rejoins by itself with ddp_survive_reboot, otherwise with nanochat.ddp.join",
        FAILED: "gave up: %s" % (record["why"] or "no reason given"),
        STOPPED: "was stopped: %s" % one.run["cause"] if one.run["cause"] else "was stopped by a user",
        FINISHED: "was away when the run finished",
    }
    return words.get(one.last_word or AWAY, "")


def _waits(health: Health, host: str) -> str:
    """The hosts that a keeper waits for, as far as known."""
    keeper, others = health.keepers[host], [other for other in health.keepers[host]["hosts"] if other != host]
    if keeper["state"] == RESTING:
        since = clock_text(keeper["rests_since"] or keeper["since"])
        return "away since %s, %s" % (since, keeper["why"] or "it does not say why")
    if keeper["state"] == STUCK:
        return "does not take part, because its rank cannot be stopped: %s" % (keeper["why"] or "no reason given")
    if health.parts:
        members = health.parts[0].members
        unheard = ", ".join(other for other in members if other not in keeper["hears"])
        obstacle = keeper["waits"] or (unheard and "does not hear %s" % unheard)
        return "is being readmitted by %s%s" % (", ".join(members), obstacle and ", but %s" % obstacle)
    missing = [other for other in others if other not in keeper["hears"]]
    if not missing:
        return "is about to start with %s" % named(others)
    if keeper["waits"]:
        return "waits: %s" % keeper["waits"]
    return "waits for %s" % " and ".join("%s, %s" % (other, _missing(health.seen.get(other))) for other in missing)


def _missing(one: Optional[Seen]) -> str:
    """Why a missing host is not heard."""
    if one is None or one.run["state"] is None:
        return "which does not answer"
    if one.lost_its_keeper:
        return "which has lost its keeper"
    if one.run["state"] in (ABSENT, PREPARED):
        return "where nothing was started"
    if one.keeper:
        return "which cannot be heard although its keeper runs: check the link and the firewalls"
    return "which is %s" % one.run["state"]


# -- the run ------------------------------------------------------------------------------------------------------------


def apart_text(health: Health) -> str:
    """Text if several models are being trained."""
    if len(health.parts) < 2:
        return ""
    each = " and ".join("%s (%d steps)" % (", ".join(part.members), part.done) for part in health.parts)
    then = "Once they reach each other again, the one with more steps continues; the other is set aside."
    return "%s train apart: two models. %s" % (each, then)


def membership_lines(health: Health) -> List[str]:
    """Who trains: split parts, absent hosts, discarded steps, and why other hosts do not train."""
    texts = [
        "generation %d since %s: %s" % (part.generation, clock_text(part.since), ", ".join(part.members))
        for part in health.parts
    ]
    texts += [*([apart_text(health)] if len(health.parts) > 1 else []), *history(health)]
    first, failed = health.gave_up(), [host for host, one in health.seen.items() if one.last_word == FAILED]
    if first is not None:
        texts.append("%s gave up: %s" % (named(failed), health.seen[first].run["error"]))
    for host, one in health.seen.items():
        if one.run["revived"] and one.keeper:
            told = (host, plural(one.run["revived"], "time"), one.run["died_of"])
            texts.append("the keeper of %s was restarted %s; it last died of %s" % told)
    reasons = {host: reason(health, host) for host in health.seen if host not in failed}
    return [*texts, *("%s%s %s" % (host, ":" * health.seen[host].rests, why) for host, why in reasons.items() if why)]


def own_errors(health: Health) -> Dict[str, str]:
    """The errors to show if no keeper has decided: second-hand ones only if nobody has a better one."""
    crashed = {host: one.run for host, one in health.seen.items() if one.run["error"] and not one.run["membership"]}
    own = {
        host: run
        for host, run in crashed.items()
        if not is_echo(str(run["end_cause"]), run["end_blames"] or [], run["rank"])
    }
    return {host: run["error"] for host, run in (own or crashed).items()}


def history(health: Health) -> List[str]:
    """Absences, repeated steps, and what a split set aside."""
    newest = health.newest_record() if len(health.parts) < 2 else None
    texts = []
    for one in newest["away"][-MOST_ABSENCES:] if newest else []:
        why = " (%s)" % one["why"] if one["why"] else ""
        back = ", back at %s" % clock_text(one["back"]) if one["back"] else ""
        texts.append("%s left at %s%s%s" % (one["host"], clock_text(one["left"]), why, back))
    texts += ["steps repeated after restarts: %d" % newest["repeated"]] if newest and newest["repeated"] else []
    records = [one.run["membership"] for one in health.seen.values() if one.run["membership"]]
    return [*texts, *(gave_way_text(one) for record in records for one in record["gave_way"])]


def gave_way_text(one: GaveWay) -> str:
    """A host's steps do not count, because another part of the run had more."""
    why = "; %s" % one["why"] if one["why"] else ""
    return "%s yielded at %s, because others had made more steps%s" % (one["host"], clock_text(one["time"]), why)


def start_lines(runs: Iterable[Run]) -> List[str]:
    """The notices of the newest start, once for all hosts, and how often the data were read."""
    found = list(runs)
    before = next((run["epoch"] for run in found if run["epoch"] is not None), 1) - 1
    again = "epoch %d: all data were read %s before" % (before + 1, plural(before, "time"))
    return [*dict.fromkeys(notice for run in found for notice in run["notices"]), *([again] if before > 0 else [])]


def ends_text(at: float, share: Optional[float], clock: Callable[[float], str] = clock_text) -> str:
    """The end of a run with a budget, such as `ends at 07:28, 61 % done`."""
    return "ends at %s%s" % (clock(at), "" if share is None else ", %.0f %% done" % (100 * share))


def ended_lines(runs: Iterable[Run], clock: Callable[[float], str] = clock_text) -> List[str]:
    """When a run with a budget finished: `ended at 07:28, 2 min 00 s early, of a budget until 07:30`."""
    over = next((run for run in runs if run["end_reason"] == FINISHED and run["ends"]), None)
    if over is None:
        return []
    ended, ends, given = over["updated"], over["ends"], over["timed"]
    budget = "a budget" if given is None else "a budget %s %s" % ("until" if ":" in given else "of", given)
    told = (clock(ended), seconds_text(abs(ends - ended)), "early" if ended <= ends else "late", budget)
    return ["ended at %s, %s %s, of %s" % told]
