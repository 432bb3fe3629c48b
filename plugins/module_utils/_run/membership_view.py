# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who trains in a run with keepers, and why other hosts do not, for run_watch, the status and the doctor.

Pure functions of run_info results by host; the state of a silent host is empty.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from .._contract.keeper_states import AWAY, FAILED, LEFT, OVER, RESTING, STUCK, TRAINING
from .._kit.words import clock_text, named, plural
from .._rules.causes import is_echo
from .state import ABSENT, CRASHED, FINISHED, PREPARED, RUNNING, STOPPED, keeper_lives
from .state import AWAY as OUTSIDE

Runs = Mapping[str, Mapping[str, Any]]


class TrainingPart(NamedTuple):
    """Hosts that now train together."""

    generation: int
    members: Tuple[str, ...]
    since: float
    done: int  # finished steps


def keepers(runs: Runs) -> Dict[str, Mapping[str, Any]]:
    """The last record of every live keeper, by host."""
    return {host: run["membership"] for host, run in runs.items() if keeper_lives(run)}


def parts(runs: Runs) -> List[TrainingPart]:
    """The groups that train together, newest generation first; several if the network is split."""
    found: List[TrainingPart] = []
    training = [one for one in keepers(runs).values() if one["state"] == TRAINING and one["members"]]
    for one in sorted(training, key=lambda each: -int(each["generation"] or 0)):
        members = tuple(one["members"])
        # Of two generations that share a host, the older one is over; one keeper was polled too early.
        if not any(set(members) & set(part.members) for part in found):
            done = max((int(runs[each].get("done") or 0) for each in members if each in runs), default=0)
            found.append(TrainingPart(int(one["generation"] or 0), members, float(one["since"]), done))
    return found


def trains(host: str, runs: Runs) -> bool:
    """Whether a host is in a part that trains."""
    return runs[host].get("state") in (None, RUNNING) and any(host in part.members for part in parts(runs))


def apart_text(runs: Runs) -> str:
    """Text if several models are being trained."""
    found = parts(runs)
    if len(found) < 2:
        return ""
    each = " and ".join("%s (%d steps)" % (", ".join(part.members), part.done) for part in found)
    return (
        "%s train apart: two models. Once they reach each other again, the one with more steps continues; the other is set aside."
        % each
    )


def gave_up(runs: Runs) -> Optional[str]:
    """The host whose keeper gave up first, followed by the others; None if none did."""
    failed = [host for host, run in runs.items() if _last_word(run) == FAILED]
    return min(failed, key=lambda host: float(runs[host]["membership"]["since"]), default=None)


def _last_word(run: Mapping[str, Any]) -> Optional[str]:
    """The last record of an ended keeper; None while it lives, if it died silently, or if there was none."""
    keeper = run.get("membership")
    return keeper["state"] if keeper and not keeper_lives(run) and keeper["state"] in OVER else None


def without_keeper(run: Mapping[str, Any]) -> bool:
    """Whether a host's keeper is gone without a regular end, so that nothing restarts a rank there."""
    return bool(run.get("membership")) and run.get("state") == CRASHED and _last_word(run) is None


def is_out(run: Mapping[str, Any]) -> bool:
    """Whether nothing on a host takes part any more, although the run did not end there."""
    return run.get("state") in (CRASHED, STOPPED, OUTSIDE)


def others_finished(host: str, runs: Runs) -> bool:
    """Whether the run finished without this host."""
    return any(other != host and run.get("state") == FINISHED for other, run in runs.items())


def away_since(host: str, runs: Runs) -> str:
    """Since when and which step the others train without a host; empty if unknown."""
    absences = [
        away
        for other, run in runs.items()
        if other != host and run.get("membership")
        for away in run["membership"].get("away") or []
        if away["host"] == host and away["back"] is None
    ]
    if not absences:
        return ""
    last = max(absences, key=lambda away: float(away["left"]))
    step = "" if last.get("step") is None else ", step %d" % last["step"]
    return "since %s%s" % (clock_text(float(last["left"])), step)


def reason(host: str, runs: Runs) -> str:
    """Why a host does not train with the others, to follow its name; empty if it trains or has no keeper."""
    run = runs[host]
    keeper = run.get("membership")
    if not keeper or trains(host, runs):
        return ""
    if keeper_lives(run):
        return _waits(host, runs)
    why = keeper["why"]
    if without_keeper(run):
        return "has lost its keeper: %s; `ansible-playbook nanochat.ddp.join -e target=%s` starts one" % (
            run.get("error") or "it disappeared",
            host,
        )
    words = {
        LEFT: "was removed by hand; nanochat.ddp.join readmits it",
        AWAY: "shut down; it rejoins by itself with ddp_survive_reboot, otherwise with nanochat.ddp.join",
        FAILED: "gave up: %s" % (why or "no reason given"),
        STOPPED: "was stopped: %s" % run["cause"] if run.get("cause") else "was stopped by a user",
        FINISHED: "was away when the run finished",
    }
    return "" if run.get("state") == FINISHED else words.get(_last_word(run) or AWAY, "")


def rests(run: Mapping[str, Any]) -> bool:
    """Whether a host is away and will return by itself."""
    return keeper_lives(run) and run["membership"]["state"] == RESTING


def _waits(host: str, runs: Runs) -> str:
    """The hosts that a keeper waits for, as far as known."""
    keeper, found = runs[host]["membership"], parts(runs)
    if keeper["state"] == RESTING:
        since = clock_text(float(keeper.get("rests_since") or keeper["since"]))
        return "away since %s, %s" % (since, keeper["why"] or "it does not say why")
    if keeper["state"] == STUCK:
        return "does not take part, because its rank cannot be stopped: %s" % (keeper["why"] or "no reason given")
    if found:
        unheard = ", ".join(other for other in found[0].members if other not in keeper["hears"])
        obstacle = keeper.get("waits") or (unheard and "does not hear %s" % unheard)
        return "is being readmitted by %s%s" % (", ".join(found[0].members), obstacle and ", but %s" % obstacle)
    missing = [other for other in keeper["hosts"] if other != host and other not in keeper["hears"]]
    if not missing:
        return "is about to start with %s" % named([other for other in keeper["hosts"] if other != host])
    if keeper.get("waits"):
        return "waits: %s" % keeper["waits"]
    return "waits for %s" % " and ".join("%s, %s" % (other, _missing(other, runs)) for other in missing)


def _missing(host: str, runs: Runs) -> str:
    """Why a missing host is not heard."""
    run = runs.get(host)
    if run is None or run.get("state") is None:
        return "which does not answer"
    if without_keeper(run):
        return "which has lost its keeper"
    if run.get("state") in (ABSENT, PREPARED):
        return "where nothing was started"
    if keeper_lives(run):
        return "which cannot be heard although its keeper runs: check the link and the firewalls"
    return "which is %s" % run.get("state")


def lines(runs: Runs) -> List[str]:
    """Lines about who trains: split parts, absent hosts, discarded steps, and why other hosts do not train."""
    texts: List[str] = []
    found = parts(runs)
    for part in found:
        texts.append("generation %d since %s: %s" % (part.generation, clock_text(part.since), ", ".join(part.members)))
    texts += [apart_text(runs)] if len(found) > 1 else []
    texts += history(runs)
    failed, first = [host for host, run in runs.items() if _last_word(run) == FAILED], gave_up(runs)
    if first is not None:
        texts.append("%s gave up: %s" % (named(failed), runs[first]["error"]))
    for host, run in runs.items():
        if run.get("revived") and keeper_lives(run):
            many = plural(int(run["revived"]), "time")
            texts.append("the keeper of %s was restarted %s; it last died of %s" % (host, many, run.get("died_of")))
    reasons = {host: reason(host, runs) for host in runs if host not in failed}
    return [*texts, *("%s%s %s" % (host, ":" * rests(runs[host]), why) for host, why in reasons.items() if why)]


def own_errors(runs: Runs) -> Dict[str, str]:
    """The errors to show if no keeper has decided: second-hand ones only if nobody has a better one."""
    crashed = {host: run for host, run in runs.items() if run.get("error") and not run.get("membership")}
    own = {
        host: run
        for host, run in crashed.items()
        if not is_echo(str(run.get("end_cause") or ""), run.get("end_blames") or [], run.get("rank"))
    }
    return {host: str(run["error"]) for host, run in (own or crashed).items()}


MOST_ABSENCES = 6  # the newest ones are shown


def history(runs: Runs) -> List[str]:
    """Absences, repeated steps, and what a split set aside."""
    texts: List[str] = []
    records = {host: run["membership"] for host, run in runs.items() if run.get("membership")}
    if records and len(parts(runs)) < 2:
        newest = max(records.values(), key=lambda one: (one["state"] == TRAINING, one["generation"] or 0))
        texts += [absence_text(one) for one in newest.get("away") or []][-MOST_ABSENCES:]
        texts += ["steps repeated after restarts: %d" % newest["repeated"]] if newest.get("repeated") else []
    texts += [gave_way_text(one) for keeper in records.values() for one in keeper.get("gave_way") or []]
    return texts


def absence_text(one: Mapping[str, Any]) -> str:
    """A host that left, and whether it is back."""
    left = "%s left at %s" % (one["host"], clock_text(float(one["left"])))
    left += " (%s)" % one["why"] if one["why"] else ""
    return left + (", back at %s" % clock_text(float(one["back"])) if one["back"] else "")


def gave_way_text(one: Mapping[str, Any]) -> str:
    """A host's steps do not count, because another part of the run had more."""
    why = "; %s" % one["why"] if one["why"] else ""
    return "%s yielded at %s, because others had made more steps%s" % (one["host"], clock_text(float(one["time"])), why)
