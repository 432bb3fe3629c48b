# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The judge over the evidence of all ranks (_evidence.py): one verdict, with what it rests on. Pure, so it can be tried.

The order of the questions is the order of certainty: a host that cannot be reached explains everything else, a rank that
died explains why the others wait, a rank that is stopped explains a stall, and only where all live are links and speeds
compared.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._findings import finding

Evidence = Mapping[str, Any]

# A rank that ended with one of these words only says that another one was gone.
ECHO = re.compile(
    r"did not (come|arrive)|(closed|reset) by peer|broken pipe|timed out|timeout|connectfullmesh|not reachable|lost",
    re.I,
)
# Words of an error and the code they stand for, the more specific first.
WORDS = (
    (re.compile(r"no space left|disk (is )?full|not enough (disk )?space", re.I), "disk-full"),
    (re.compile(r"weights.*(differ|not identical|diverged)|first tensor that differs", re.I), "weights-differ"),
    (re.compile(r"settings? differ|differs? (between|across) (the )?ranks|disagree", re.I), "settings-differ"),
    (re.compile(r"parquet|shard|row groups?|tokenizer|no data", re.I), "data-mismatch"),
    (re.compile(r"out of memory|cannot allocate|can't allocate|MemoryError", re.I), "rank-oom"),
)
BUSY = 0.5  # share of a CPU from which a rank counts as computing
LOW_DISK = 64 * 1024 * 1024


class Case(NamedTuple):
    """All that the judge looks at."""

    plan: Mapping[str, Any]
    evidence: Dict[str, Optional[Evidence]]  # by host, None where the host could not be reached
    stall_factor: float

    def rank(self, host: str) -> int:
        return next((int(node["rank"]) for node in self.plan["nodes"] if node["host"] == host), -1)

    def name(self, host: str) -> str:
        return "rank %d (%s)" % (self.rank(host), host)

    def states(self) -> Dict[str, str]:
        return {host: found["run"]["state"] for host, found in self.evidence.items() if found}

    def known(self) -> Dict[str, Evidence]:
        return {host: found for host, found in self.evidence.items() if found}


def diagnose(
    plan: Mapping[str, Any], evidence: Dict[str, Optional[Evidence]], stall_factor: float = 5.0
) -> Dict[str, Any]:
    """One verdict over all ranks: a finding, and the lines it rests on."""
    case = Case(plan, evidence, stall_factor)
    for question in (unreachable, died, not_running, frozen, cut, behind, healthy):
        verdict = question(case)
        if verdict:
            return {"verdict": verdict, "evidence": lines(case)}
    raise AssertionError("the last question always has an answer")


# -- the questions, each a verdict or None ------------------------------------------------------------------------------


def unreachable(case: Case) -> Optional[Dict[str, Any]]:
    gone = sorted(host for host, found in case.evidence.items() if not found)
    if not gone:
        return None
    waiting = [case.name(host) for host, state in case.states().items() if state == "running"]
    seen = "%s cannot be reached over ssh" % ", ".join(case.name(host) for host in gone)
    return finding(
        "rank-host-unreachable", gone[0], seen + (", and %s waits for it" % waiting[0] if waiting else "") + "."
    )


def died(case: Case) -> Optional[Dict[str, Any]]:
    """The first cause among the ranks that crashed; a rank that only heard of it is not to blame."""
    crashed = [host for host, state in case.states().items() if state == "crashed"]
    if not crashed:
        return None
    causes = [host for host in crashed if not is_echo(case.known()[host])]
    if not causes and len(crashed) < len(case.evidence):
        # All that ended were left alone by one that still lives: look at that one.
        return frozen(case) or cut(case) or behind(case) or cause_of(case, crashed[0])
    if not causes:
        cutting = cut(case)
        if cutting:
            return cutting
    ended = {host: case.known()[host]["run"].get("ended") or float("inf") for host in causes or crashed}
    return cause_of(case, min(ended, key=lambda host: (code_of(case.known()[host]) == "rank-failed", ended[host])))


def is_echo(found: Evidence) -> bool:
    run = found["run"]
    return not run.get("signal") and bool(ECHO.search(run.get("error") or "")) and code_of(found) == "rank-failed"


def code_of(found: Evidence) -> str:
    """What kind of death this was."""
    run, text = found["run"], found["run"].get("error") or ""
    log = "\n".join(run.get("last_lines") or [])
    killed = (
        run.get("signal") == 9
        or run.get("exit_code") in (137, -9)
        or re.search(r"exitcode\s*: -9|signal 9|SIGKILL", log + text)
    )
    if killed:
        return "rank-oom" if out_of_memory(found) else "rank-killed"
    if run.get("ended") is None:
        return "rank-oom" if out_of_memory(found) else "rank-vanished"
    for pattern, code in WORDS:
        if pattern.search(text):
            return code
    return "rank-failed"


def out_of_memory(found: Evidence) -> bool:
    return bool(found.get("kernel")) or bool((found.get("system") or {}).get("oom_kills"))


def cause_of(case: Case, host: str) -> Dict[str, Any]:
    found = case.known()[host]
    run, code = found["run"], code_of(found)
    at = " at step %s" % run["step"] if run.get("step") is not None else " before its first step"
    what = {
        "rank-oom": "was killed for want of memory",
        "rank-killed": "was killed by signal 9 (SIGKILL)",
        "rank-vanished": "is gone without a word",
    }.get(code, "ended with code %s" % run.get("exit_code"))
    words = (found.get("kernel") or [""])[-1] if code == "rank-oom" else run.get("error") or ""
    return finding(code, host, "%s %s%s%s" % (case.name(host), what, at, ": " + words if words else "."))


def not_running(case: Case) -> Optional[Dict[str, Any]]:
    states = case.states()
    if "running" not in states.values():
        summary = ", ".join("%s %s" % (case.name(host), state) for host, state in sorted(states.items()))
        return finding("not-running", case.plan["master"]["host"], "No rank runs: %s." % summary)
    absent = sorted(host for host, state in states.items() if state != "running")
    if absent:
        seen = "%s is %s while the others wait for it." % (case.name(absent[0]), states[absent[0]])
        return finding("rank-not-started", absent[0], seen)
    return None


def frozen(case: Case) -> Optional[Dict[str, Any]]:
    for host, found in case.known().items():
        process = found.get("process") or {}
        age = found["run"].get("heartbeat_age")
        if process.get("state") in ("T", "t"):
            return finding(
                "rank-frozen", host, "%s is stopped (process %d is in state T)." % (case.name(host), process["pid"])
            )
        if process.get("state") == "D" and age is not None and age > 10:
            where = process.get("waits_in") or "the kernel"
            seen = "%s hangs in the kernel (%s), as with a disk or a network file system that does not answer."
            return finding("rank-in-kernel", host, seen % (case.name(host), where))
    return None


def cut(case: Case) -> Optional[Dict[str, Any]]:
    """A link on which packets are lost: the active probe says it outright, sockets that send again and again suggest it."""
    for host, found in case.known().items():
        nic = next((node.get("nic") for node in case.plan["nodes"] if node["host"] == host), None)
        if nic_down(found, nic):
            return finding("link-cut", host, "The network card %s of %s is down." % (nic, host))
    broken = [
        (host, peer, how)
        for host, found in case.known().items()
        for peer, how in (found.get("links") or {}).items()
        if how not in ("open", "refused")
    ]
    if not broken:
        return None
    host, peer, how = broken[0]
    both = any(one == peer and other == host for one, other, dummy in broken)
    way = "in both directions" if both else "in this direction only, so a firewall between them is the likely cause"
    resent = sum(socket["retransmits"] for socket in case.known()[host].get("sockets") or [])
    more = "; %d packets wait to be acknowledged" % resent if resent else ""
    return finding("link-cut", host, "%s does not reach %s (%s), %s%s." % (host, peer, how, way, more), peer=peer)


def nic_down(found: Evidence, nic: Optional[str]) -> bool:
    facts = ((found.get("system") or {}).get("nics") or {}).get(nic or "")
    return bool(facts) and facts["state"] in ("down", "lowerlayerdown", "notpresent")


def behind(case: Case) -> Optional[Dict[str, Any]]:
    """The rank that has not reached the collective at which the others wait."""
    if not stalled(case):
        return None
    for host, found in case.known().items():
        free = (found.get("system") or {}).get("disk_free")
        if free is not None and free < LOW_DISK and found["run"].get("phase") == "save":
            return finding(
                "disk-full",
                host,
                "%s cannot save: %d MB are free in its run folder." % (case.name(host), free // 2**20),
            )
    late = latest(case)
    if late is None:
        return stuck(case)
    found = case.known()[late]
    process = found.get("process") or {}
    phase = found["run"].get("phase") or "unknown"
    reasons = slow_reasons(found)
    if process.get("cpu_share", 0.0) >= BUSY or reasons:
        seen = "%s is behind the others in phase %s but works (%d %% of a core)" % (
            case.name(late),
            phase,
            round(100 * process.get("cpu_share", 0.0)),
        )
        return finding("rank-slow", late, seen + (": " + "; ".join(reasons) if reasons else "") + ".")
    code = "data-mismatch" if phase == "data" else "rank-stuck"
    stack = innermost(found)
    return finding(
        code,
        late,
        "%s did not arrive: it stands in phase %s%s." % (case.name(late), phase, " at " + stack if stack else ""),
    )


def stalled(case: Case) -> bool:
    """No rank made progress for several usual steps."""
    idle = [found["run"].get("idle_seconds") for found in case.known().values()]
    usual = max([found["run"].get("step_seconds") or 0.0 for found in case.known().values()] + [0.0])
    seconds = [one for one in idle if one is not None]
    return bool(seconds) and min(seconds) > max(10.0, case.stall_factor * usual)


def latest(case: Case) -> Optional[str]:
    """The host whose rank has done the fewest collectives, None where all are at the same one."""
    at = {host: position(found) for host, found in case.known().items()}
    if len(set(at.values())) > 1:
        return min(at, key=lambda host: at[host])
    waiting = [
        host for host, found in case.known().items() if found["run"].get("phase") not in ("sync", "agree", "rendezvous")
    ]
    return waiting[0] if len(waiting) == 1 and len(at) > 1 else None


def position(found: Evidence) -> tuple[int, int]:
    """How far a rank came: its step, then the number of its last collective."""
    flight = (found.get("dump") or {}).get("flight") or {}
    last = flight.get("last_seq")
    sequence = last if isinstance(last, int) else found["run"].get("collective")
    step = found["run"].get("step")
    return (step if isinstance(step, int) else -1, sequence if isinstance(sequence, int) else -1)


def stuck(case: Case) -> Dict[str, Any]:
    host = case.plan["master"]["host"] if case.plan["master"]["host"] in case.known() else sorted(case.known())[0]
    phases = ", ".join(
        "%s in %s" % (case.name(one), found["run"].get("phase")) for one, found in sorted(case.known().items())
    )
    return finding(
        "rank-stuck", host, "All ranks wait in the same collective and the links between them are open: %s." % phases
    )


def slow_reasons(found: Evidence) -> List[str]:
    """Why a rank may be slow, as far as its host tells."""
    system, process, reasons = found.get("system") or {}, found.get("process") or {}, []
    if system.get("swapped_pages_per_second", 0) > 50 or process.get("swapped_bytes", 0) > 256 * 2**20:
        swapped = process.get("swapped_bytes", 0) // 2**20
        reasons.append("it is swapping (%d MB of it are out)" % swapped)
    others = [one for one in found.get("others") or [] if one["cpu_share"] >= 0.5]
    if others and system.get("load1", 0) > system.get("cpus", 1):
        first = others[0]
        reasons.append(
            "pid %d of %s (%s) takes %.1f cores" % (first["pid"], first["user"], first["command"], first["cpu_share"])
        )
    if system.get("throttled"):
        reasons.append("its cores are slowed because they are too hot")
    return reasons


def innermost(found: Evidence) -> str:
    """The innermost line of the main thread's stack."""
    stacks = (found.get("dump") or {}).get("stacks") or {}
    frames: Sequence[str] = stacks.get("MainThread") or []
    return frames[-1] if frames else ""


def healthy(case: Case) -> Dict[str, Any]:
    """All live and none stands still: say how fast, and who sets the pace."""
    known = case.known()
    host = case.plan["master"]["host"] if case.plan["master"]["host"] in known else sorted(known)[0]
    steps = {one: found["run"].get("step") for one, found in known.items()}
    slow = {one: slow_reasons(found) for one, found in known.items()}
    reasons = ["%s: %s" % (case.name(one), "; ".join(words)) for one, words in sorted(slow.items()) if words]
    pace = max([found["run"].get("step_seconds") or 0.0 for found in known.values()] + [0.0])
    where = "at step %s, %.1f s a step" % (
        max((step for step in steps.values() if step is not None), default="?"),
        pace,
    )
    if reasons:
        return finding(
            "healthy-slow", host, "All ranks make progress (%s), but slowly: %s." % (where, " / ".join(reasons))
        )
    return finding("healthy", host, "All ranks make progress (%s)." % where)


# -- what the verdict rests on --------------------------------------------------------------------------------------------


def lines(case: Case) -> List[str]:
    """The evidence, a few lines a host."""
    told = []
    for host in sorted(case.evidence, key=case.rank):
        found = case.evidence[host]
        told.append("%s: %s" % (case.name(host), describe(found) if found else "no answer over ssh"))
        if found and innermost(found):
            told.append("  stack: " + innermost(found))
        if found and (found["run"].get("error") or found["run"].get("last_lines")):
            told.append("  said: " + str(found["run"].get("error") or found["run"]["last_lines"][-1]))
    return told


def describe(found: Evidence) -> str:
    run, process, system = found["run"], found.get("process") or {}, found.get("system") or {}
    parts = [
        run["state"],
        "step %s" % run.get("step"),
        "phase %s for %.0f s" % (run.get("phase"), run.get("phase_seconds") or 0.0),
    ]
    if position(found)[1] >= 0:
        parts.append("collective %d" % position(found)[1])
    if process:
        parts.append(
            "process %d state %s, %d %% of a core, %d MB"
            % (process["pid"], process["state"], round(100 * process["cpu_share"]), process["memory_bytes"] // 2**20)
        )
    if system:
        parts.append(
            "load %.1f on %d cores, %d MB free memory"
            % (system["load1"], system["cpus"], system["memory_available"] // 2**20)
        )
    parts += ["%s %s" % (peer, how) for peer, how in sorted((found.get("links") or {}).items())]
    return ", ".join(parts)
