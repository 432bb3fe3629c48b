# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges the evidence of all ranks (gather.py): one verdict and its evidence. Pure functions.

The questions are in order of certainty: a silent host explains everything else, a dead rank
explains why the others wait, a stopped rank explains a stall, and only if all are alive are links and speeds
compared.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, TypedDict

from .._contract.document import whole
from .._contract.findings import Finding, finding
from .._contract.findings_table import WARNING
from .._kit.words import bytes_text
from .._rules.causes import LOSSES
from .._run.health import OTHER, PHASES
from .._run.sentences import apart_text, history, reason
from .._run.state import AWAY, CRASHED, FINISHED, RUNNING, STOPPED
from .evidence import (
    Case,
    error_of,
    innermost_frame,
    lines_of,
    low_disk,
    slow_reasons,
    was_killed,
    works,
)

PASSES = ("open", "refused")  # answers of a peer that prove a two-way path


class Diagnosis(TypedDict):
    """The verdict, and the supporting lines."""

    verdict: Finding
    evidence: List[str]


def diagnose(case: Case) -> Diagnosis:
    """One verdict over all ranks: a finding, and the supporting lines."""
    evidence = history(case.health)
    for host, answer in case.answers.items():
        first, *more = lines_of(answer.evidence) if answer.evidence else [answer.words]
        evidence += ["%s: %s" % (case.name(host), first), *more]
    return {"verdict": of_keepers(case) or judged(case), "evidence": evidence}


def judged(case: Case) -> Finding:
    """The first question's answer that is not None."""
    answers = (question(case) for question in (*QUESTIONS, healthy))
    return next(verdict for verdict in answers if verdict)


def of_keepers(case: Case) -> Optional[Finding]:
    """With keepers: first judge the training hosts, then who does not train and why; None if there is nothing more to report."""
    found = case.health.parts
    if not found:
        return waiting(case) if case.health.keepers else given_up(case)
    members = [host for part in found for host in part.members if host in case.answers]
    for part in found:
        verdict = judged(case.part(part.members))
        if not str(verdict["code"]).startswith("healthy"):
            return verdict
    if len(found) > 1:
        return finding(
            "rank-away", found[-1].members[0], apart_text(case.health), remedy="Repair the link between them."
        )
    away = [host for host in case.answers if host not in members]
    if not away:
        return None
    why = "; ".join("%s %s" % (host, absence(case, host)) for host in away)
    seen = "The run goes on without %s: %s." % (" and ".join(map(case.name, away)), why)
    return finding("rank-away", away[0], seen)


def absence(case: Case, host: str) -> str:
    """The state of a host that is not in the run."""
    found = case.answers[host].evidence
    if found is None:
        return case.answers[host].words
    return reason(case.health, host) or "is %s there" % found["run"]["state"]


def waiting(case: Case) -> Finding:
    """No rank trains: who is at fault, and who waits for whom."""
    seen = "No rank trains: %s." % "; ".join("%s %s" % (host, absence(case, host)) for host in case.answers)
    if case.own_deaths():
        verdict = died(case)
        if verdict:
            return finding(str(verdict["code"]), str(verdict["host"]), "%s %s" % (verdict["seen"], seen))
    if case.silent:
        return finding("rank-host-no-answer", case.silent[0], seen)
    return finding("rank-waits", next(iter(case.health.keepers)), seen)


def given_up(case: Case) -> Optional[Finding]:
    """Keepers gave up for a reason that no rank could record itself."""
    first = case.health.gave_up()
    if first is None or any(case.death(host).cause for host in case.own_deaths()):
        return None
    last = died(case)
    seen = "The run gave up: %s." % error_of(case.known[first])
    return finding("run-given-up", first, seen + (" Last seen: %s" % last["seen"] if last else ""))


# -- the questions, each returning a verdict or None; listed in QUESTIONS below -----------------------------------------


def silent(case: Case) -> Optional[Finding]:
    """A silent host explains everything, unless a responding rank died of its own error."""
    gone = case.silent
    over = bool(case.known) and set(case.states.values()) <= {FINISHED, STOPPED, AWAY}
    if not gone or over or (case.own_deaths() and not case.stalled):
        return None
    seen = case.without_answer(gone)
    running, alone = case.in_state(RUNNING), case.in_state(CRASHED)
    if alone:
        error = error_of(case.known[alone[0]]) or "no output"
        seen += "; %s ended without it: %s" % (case.name(alone[0]), error)
    elif running and not case.stalled:
        seen += "; %s makes progress, so the run continues." % case.name(running[0])
        remedy = (
            "Nothing is lost. Try again later; if it persists, check the connection from the controller to that host."
        )
        return finding("rank-host-no-answer", gone[0], seen, severity=WARNING, remedy=remedy)
    elif running:
        seen += ", and %s waits for it" % case.name(running[0])
    return finding("rank-host-no-answer", gone[0], seen.rstrip(".") + ".")


def not_examined(case: Case) -> Optional[Finding]:
    """Missing evidence does not prove health; conclusions that do not need it come first."""
    failed = sorted(host for host in case.answers if host not in case.known and host not in case.silent)
    if not failed:
        return None
    seen = case.without_answer(failed).rstrip(".") + "."
    return frozen(case) or cut(case) or finding("rank-not-examined", failed[0], seen)


def died(case: Case) -> Optional[Finding]:
    """The first cause among the crashed ranks; a rank that only lost a peer is not to blame."""
    crashed = case.in_state(CRASHED)
    if not crashed:
        return None
    causes = case.own_deaths()
    if not causes:
        blamed = frozen(case) or cut(case) or hearsay(case, crashed) or behind(case)
        return blamed or cause_of(case, crashed[0])
    ended = {host: case.known[host]["run"]["ended"] or float("inf") for host in causes}
    return cause_of(case, min(causes, key=lambda one: (case.death(one).code == "rank-failed", ended[one])))


def hearsay(case: Case, crashed: Sequence[str]) -> Optional[Finding]:
    """The rank that the ended ranks blame for leaving them alone."""
    for host in crashed:
        death, text = case.death(host), error_of(case.known[host])
        accused = [case.hosts[rank] for rank in death.blames if case.hosts.get(rank, host) != host]
        if not accused:
            continue
        other, state = accused[0], case.states.get(accused[0])
        if death.cause and death.cause not in LOSSES:
            return finding(
                death.code, other, "%s ended; %s heard of it: %s" % (case.name(other), case.name(host), text)
            )
        if state and state not in (RUNNING, CRASHED):
            seen = "%s is %s, and %s waited for it: %s" % (case.name(other), state, case.name(host), text)
            return finding("rank-not-started", other, seen)
        if state == RUNNING:
            return finding("rank-stuck", other, "%s did not arrive: %s" % (case.name(other), text))
        if state == CRASHED:
            # Both ended, and each missed the other: the connection between them was gone for a while.
            seen = "%s and %s lost each other: %s" % (case.name(host), case.name(other), text)
            return finding("link-cut", host, seen, peer=other)
    return None


def cause_of(case: Case, host: str) -> Finding:
    found = case.known[host]
    run, code = found["run"], case.death(host).code
    if case.health.seen[host].lost_its_keeper:
        return finding(code, host, "%s: %s." % (case.name(host), str(run["error"]).rstrip(".")))
    at = " at step %s" % run["step"] if run["step"] is not None else " before its first step"
    coded = "ended without an exit status" if run["exit_code"] is None else "ended with code %s" % run["exit_code"]
    signal = 9 if was_killed(found) else run["signal"]
    ended = "was ended by signal %s" % signal if signal else coded
    if code == "rank-oom" and signal:
        ended = "was killed by the kernel: out of memory (OOM)"
    words = (found["kernel"] or [""])[-1] if was_killed(found) else error_of(found)
    return finding(code, host, "%s %s%s%s" % (case.name(host), ended, at, ": " + words if words else "."))


def not_running(case: Case) -> Optional[Finding]:
    states = case.states
    if RUNNING not in states.values():
        told = {**states, **{host: case.answers[host].words for host in case.silent}}
        summary = ", ".join("%s %s" % (case.name(host), state) for host, state in sorted(told.items()))
        return finding("not-running", case.plan["master"]["host"], "No rank runs: %s." % summary)
    absent = sorted(host for host, state in states.items() if state != RUNNING)
    if absent:
        seen = "%s is %s while the others wait for it." % (case.name(absent[0]), states[absent[0]])
        return finding("rank-not-started", absent[0], seen)
    return None


def frozen(case: Case) -> Optional[Finding]:
    for host, found in case.known.items():
        process, age = found["process"], found["run"]["heartbeat_age"]
        if process and process["state"] in ("T", "t"):
            seen = "%s is stopped (process %d is in state T)." % (case.name(host), process["pid"])
            others = "continues where it stopped"
            if case.in_state(CRASHED):
                others = "can be restarted: ansible-playbook train.yml -i INVENTORY --tags restart"
            remedy = "On %s: kill -CONT %d; the run then %s." % (host, process["pid"], others)
            return finding("rank-frozen", host, seen, remedy=remedy)
        if process and process["state"] == "D" and age is not None and age > 10:
            where = process["waits_in"] or "the kernel"
            seen = "%s hangs in the kernel (%s), probably on a disk or a network file system that does not respond."
            return finding("rank-in-kernel", host, seen % (case.name(host), where))
    return None


def cut(case: Case) -> Optional[Finding]:
    """A link that loses packets, as the active probe shows."""
    for host, found in case.known.items():
        nic = next((node.get("nic") for node in case.plan["nodes"] if node["host"] == host), None)
        nics = found["system"]["nics"] or {}
        if nics and nic and nics.get(nic, "down") in ("down", "lowerlayerdown", "notpresent"):
            return finding("link-cut", host, "The network interface %s of %s is down." % (nic, host))
    broken = [
        (host, peer, how)
        for host, found in case.known.items()
        for peer, how in found["links"].items()
        if how not in PASSES
    ]
    if not broken or not (case.stalled or case.in_state(CRASHED)):
        return None
    host, peer, how = broken[0]
    both = any(one == peer and other == host for one, other, dummy in broken)
    way = (
        "nor in the other direction" if both else "but %s reaches %s, so a firewall is the likely cause" % (peer, host)
    )
    if peer not in case.known:
        way = "and %s cannot be contacted" % peer
    return finding("link-cut", host, "%s gets no answer from %s (%s), %s." % (host, peer, how, way), peer=peer)


def behind(case: Case) -> Optional[Finding]:
    """The rank that cannot save, or else has not reached the collective where the others wait."""
    for host, found in case.known.items():
        free, idle = low_disk(found), found["run"]["idle_seconds"] or 0.0
        if free is not None and found["run"]["phase"] == "save" and idle > case.limits.minimum:
            seen = "%s cannot save: %s are free in its run folder." % (case.name(host), bytes_text(free))
            return finding("disk-full", host, seen)
    late = latest(case)
    if not case.stalled:
        # A working rank is slow if all others have waited for it longer than an idle rank may take.
        return slow(case, late) if late and works(case.known[late]) and case.lags else None
    if late is None:
        return stuck(case)
    found = case.known[late]
    if works(found) or slow_reasons(found):
        return slow(case, late)
    phase = found["run"]["phase"] or "unknown"
    code = "data-mismatch" if phase == "data" else "rank-stuck"
    stack, ahead = innermost_frame(found), [one for one in case.known if one != late]
    at = " at " + stack if stack else ""
    waits = (
        " %s waits for it in phase %s." % (case.name(ahead[0]), case.known[ahead[0]]["run"]["phase"]) if ahead else ""
    )
    return finding(code, late, "%s did not arrive: it is in phase %s%s.%s" % (case.name(late), phase, at, waits))


def slow(case: Case, host: str) -> Finding:
    found = case.known[host]
    phase, reasons = found["run"]["phase"] or "unknown", slow_reasons(found)
    seen = "%s is behind the others in phase %s but works (%d %% of a core)"
    seen %= (case.name(host), phase, round(100 * (found["run"]["busy"] or 0.0)))
    return finding("rank-slow", host, seen + (": " + "; ".join(reasons) if reasons else "") + ".")


def latest(case: Case) -> Optional[str]:
    """The host whose rank has done the fewest steps and, if all count them, collectives; None if all are at the same one."""
    runs = {host: found["run"] for host, found in case.known.items()}
    collectives = {host: whole(run, "collective") for host, run in runs.items()}
    if None in collectives.values():
        collectives = dict.fromkeys(runs)
    places = {host: (-1 if run["step"] is None else run["step"], collectives[host] or 0) for host, run in runs.items()}
    if len(set(places.values())) > 1:
        return min(places, key=lambda host: places[host])
    elsewhere = [host for host, found in case.known.items() if not PHASES.get(found["run"]["phase"], OTHER).waits]
    if len(elsewhere) != 1 or len(case.known) < 2:
        # Of several at the same one, the one that computes delays the others.
        elsewhere = [host for host in elsewhere or case.known if works(case.known[host])]
    return elsewhere[0] if len(elsewhere) == 1 else None


def stuck(case: Case) -> Optional[Finding]:
    """Nobody is behind: all wait, or all compute."""
    known = case.known
    if any(map(works, known.values())):
        return None
    phases = ", ".join(
        "%s in %s" % (case.name(one), found["run"]["phase"] or "the rendezvous") for one, found in sorted(known.items())
    )
    seen = "All ranks wait for each other and the links between them are open: %s." % phases
    return finding("rank-stuck", case.leader(), seen)


# In order of certainty.
QUESTIONS = (silent, died, not_examined, not_running, frozen, cut, behind)


def healthy(case: Case) -> Finding:
    """All are alive and none is stuck: report the speed, and who sets the pace."""
    known, host = case.known, case.leader()
    for one, found in known.items():
        free = low_disk(found)
        if free is not None:
            seen = "All ranks make progress, but %s has %s free in its run folder, too little for a checkpoint."
            return finding("disk-full", one, seen % (case.name(one), bytes_text(free)), severity=WARNING)
    done = [step for step in (found["run"]["step"] for found in known.values()) if step is not None]
    slow = {one: slow_reasons(found) for one, found in known.items()}
    reasons = ["%s: %s" % (case.name(one), "; ".join(words)) for one, words in sorted(slow.items()) if words]
    pace = max([found["run"]["step_seconds"] or 0.0 for found in known.values()] + [0.0])
    where = "at step %d, %.2g s a step" % (max(done), pace) if done else "before the first step"
    if reasons:
        seen = "All ranks make progress (%s), but slowly: %s." % (where, " / ".join(reasons))
        return finding("healthy-slow", host, seen)
    return finding("healthy", host, "All ranks make progress (%s)." % where)
