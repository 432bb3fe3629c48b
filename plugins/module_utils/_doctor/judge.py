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
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import WARNING, finding
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import bytes_text

Evidence = Mapping[str, Any]

# How the trainer says that another rank was missing; whoever says so is not to blame.
STOPPED = re.compile(r"\brank \d+ \([^)]*\) stopped in phase")
ECHO = re.compile(
    r"did not (come|arrive)|(closed|reset) by peer|broken pipe|timed out|timeout|connectfullmesh|clients joined|has given up",
    re.I,
)
# What such a rank knows of the cause.
GIVEN_UP = re.compile(r"rank (\d+) \([^)]*\) has given up, saying: (.*)", re.S)
SILENT = re.compile(r"no sign of life from rank (\d+)")
ABSENT = re.compile(r"rank (\d+) \([^)]*\) did not come, it lives")
# Words of an error and the code they stand for, the more specific first.
WORDS = (
    (re.compile(r"no space left|disk (is )?full|not enough (disk )?space|the disk has \d+", re.I), "disk-full"),
    (
        re.compile(r"hold different weights|weights.*(differ|not identical|diverged)|first tensor that differs", re.I),
        "weights-differ",
    ),
    (re.compile(r"ranks differ in (shard|tokenizer)\b", re.I), "data-mismatch"),
    (re.compile(r"ranks differ in torch\b", re.I), "torch-differs"),
    (re.compile(r"ranks differ in code\b", re.I), "trainer-differs"),
    (
        re.compile(r"ranks differ in|settings? differ|differs? (between|across) (the )?ranks|disagree", re.I),
        "settings-differ",
    ),
    (re.compile(r"EADDRINUSE|address already in use|another process holds that port", re.I), "port-held"),
    (re.compile(r"no data connection to another rank came up|could not reach the rendezvous", re.I), "link-cut"),
    (
        re.compile(
            r"out of memory|cannot allocate|can't allocate|MemoryError|memory of this machine|this machine allows", re.I
        ),
        "rank-oom",
    ),
    (re.compile(r"checkpoint", re.I), "rank-failed"),
    (
        re.compile(r"parquet|\bshards?\b|row groups?|tokenizer|no documents|no (train|val) documents|no data", re.I),
        "data-mismatch",
    ),
)
BUSY = 0.5  # share of a CPU from which a rank counts as computing
LATE = 0.2  # seconds a second that its threads may be ready to run and have no core
PRESSED = 40.0  # percent of the time that somebody may wait for the disk
LOW_DISK = 64 * 1024 * 1024
PASSES = ("open", "refused")  # answers of a peer: packets go there and come back
LOST_PACKETS = ("timeout", "no route")
STILL_SECONDS = 10.0  # the least time without progress that counts as standing still
START_SECONDS = 60.0  # a rank that says nothing of itself for so long waits for another one
WAITING = ("sync", "agree", "rendezvous", "end")


class Case(NamedTuple):
    """All that the judge looks at."""

    plan: Mapping[str, Any]
    evidence: Dict[str, Optional[Evidence]]  # by host, None where the host could not be reached
    stall_factor: float

    def rank(self, host: str) -> int:
        return next((int(node["rank"]) for node in self.plan["nodes"] if node["host"] == host), -1)

    def host_of(self, rank: int) -> Optional[str]:
        return next((str(node["host"]) for node in self.plan["nodes"] if node["rank"] == rank), None)

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
    # Where a host gave no answer, a template may say so by false or an empty one.
    case = Case(plan, {host: found or None for host, found in evidence.items()}, stall_factor)
    for question in (unreachable, died, not_running, frozen, cut, behind, healthy):
        verdict = question(case)
        if verdict:
            return {"verdict": verdict, "evidence": lines(case)}
    raise AssertionError("the last question always has an answer")


# -- the questions, each a verdict or None ------------------------------------------------------------------------------


def unreachable(case: Case) -> Optional[Dict[str, Any]]:
    """A host that does not answer explains all, unless a rank that does answer died of something of its own."""
    gone = sorted(host for host, found in case.evidence.items() if not found)
    if not gone or (own_deaths(case) and not stalled(case)):
        return None
    seen = "%s cannot be reached over ssh" % ", ".join(case.name(host) for host in gone)
    dark = [host for host, found in case.known().items() if (found.get("links") or {}).get(gone[0]) in LOST_PACKETS]
    if dark:
        seen += ", nor does %s get an answer from it" % dark[0]
    running = [host for host, state in case.states().items() if state == "running"]
    if running and not stalled(case) and not any(is_echo(found) for found in case.known().values()):
        seen += "; %s makes progress, so the run goes on and only the way from here is broken." % case.name(running[0])
        return finding(
            "rank-host-unreachable",
            gone[0],
            seen,
            severity=WARNING,
            remedy="Nothing is lost; mend the way to that host, or look again later.",
        )
    waiting = [case.name(host) for host in running]
    return finding(
        "rank-host-unreachable", gone[0], seen + (", and %s waits for it" % waiting[0] if waiting else "") + "."
    )


def own_deaths(case: Case) -> List[str]:
    """The hosts whose rank crashed of its own."""
    return [host for host, state in case.states().items() if state == "crashed" and not is_echo(case.known()[host])]


def died(case: Case) -> Optional[Dict[str, Any]]:
    """The first cause among the ranks that crashed; a rank that only heard of it is not to blame."""
    crashed = [host for host, state in case.states().items() if state == "crashed"]
    if not crashed:
        return None
    causes = own_deaths(case)
    if not causes:
        return frozen(case) or cut(case) or hearsay(case, crashed) or behind(case) or cause_of(case, crashed[0])
    ended = {host: case.known()[host]["run"].get("ended") or float("inf") for host in causes}
    host = min(causes, key=lambda one: (code_of(case.known()[one]) == "rank-failed", ended[one]))
    # What all ranks say together, such as a checkpoint that one of them could not write, names the one it is about.
    about = re.search(r"\brank (\d+) could not save", case.known()[host]["run"].get("error") or "")
    named = case.host_of(int(about.group(1))) if about else None
    return cause_of(case, named if named in causes else host)


def hearsay(case: Case, crashed: Sequence[str]) -> Optional[Dict[str, Any]]:
    """All ranks that ended were left alone by another one: what they say of it."""
    for host in crashed:
        text = case.known()[host]["run"].get("error") or ""
        told = GIVEN_UP.search(text)
        accused = told or SILENT.search(text) or ABSENT.search(text)
        other = case.host_of(int(accused.group(1))) if accused else None
        if other is None or accused is None:
            continue
        if told and not STOPPED.search(told.group(2)):
            return finding(code_of_words(told.group(2)), other, "%s ended: %s" % (case.name(other), told.group(2)))
        state = case.states().get(other)
        if state and state not in ("running", "crashed"):
            seen = "%s is %s, and %s waited for it: %s" % (case.name(other), state, case.name(host), text)
            return finding("rank-not-started", other, seen)
        if SILENT.search(text) and state == "crashed":
            # Both ended, and each missed the other: the way between them was gone for a while.
            return finding(
                "link-cut",
                host,
                "%s and %s lost each other: %s" % (case.name(host), case.name(other), text),
                peer=other,
            )
        if state == "running":
            return finding("rank-stuck", other, "%s did not come: %s" % (case.name(other), text))
    return None


def is_echo(found: Evidence) -> bool:
    """Whether this rank ended for no other reason than that another one was missing."""
    run, text = found["run"], found["run"].get("error") or ""
    if run.get("signal") or run.get("state") != "crashed":
        return False
    return bool(STOPPED.search(text)) or (bool(ECHO.search(text)) and code_of(found) == "rank-failed")


def code_of(found: Evidence) -> str:
    """What kind of death this was."""
    run, killed = found["run"], was_killed(found)
    if killed or run.get("ended") is None:
        return "rank-oom" if out_of_memory(found) else "rank-killed" if killed else "rank-vanished"
    return code_of_words(run.get("error") or "")


def was_killed(found: Evidence) -> bool:
    """By SIGKILL; torchrun ends with a code of its own then and says so in the log."""
    run = found["run"]
    # A trainer that could still say why was not killed; the log may hold what an earlier attempt said.
    log = [] if run.get("end_error") else run.get("last_lines") or []
    said = re.search(r"exitcode\s*: -9|\bsignal 9\b|SIGKILL", "\n".join(log) + (run.get("error") or ""))
    return run.get("signal") == 9 or run.get("exit_code") in (137, -9) or bool(said)


def code_of_words(text: str) -> str:
    return next((code for pattern, code in WORDS if pattern.search(text)), "rank-failed")


def out_of_memory(found: Evidence) -> bool:
    """The kernel says so, or has killed for want of memory since the rank's last sign of life."""
    before, now = found.get("oom_kills_before"), (found.get("system") or {}).get("oom_kills")
    return bool(found.get("kernel")) or (before is not None and now is not None and now > before)


def cause_of(case: Case, host: str) -> Dict[str, Any]:
    found = case.known()[host]
    run, code = found["run"], code_of(found)
    at = " at step %s" % run["step"] if run.get("step") is not None else " before its first step"
    ended = "ended by signal %s" % run["signal"] if run.get("signal") else "ended with code %s" % run.get("exit_code")
    what = {
        "rank-oom": "was killed for want of memory" if was_killed(found) else ended,
        "rank-killed": "was killed by signal 9 (SIGKILL)",
        "rank-vanished": "is gone without a word",
    }.get(code, ended)
    words = (found.get("kernel") or [""])[-1] if was_killed(found) else run.get("error") or ""
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
            seen = "%s is stopped (process %d is in state T)." % (case.name(host), process["pid"])
            others = "continues where it stands"
            if "crashed" in case.states().values():
                others = "can be restarted: ansible-playbook train.yml -i INVENTORY --tags restart"
            remedy = "On %s: kill -CONT %d; the run then %s." % (host, process["pid"], others)
            return finding("rank-frozen", host, seen, remedy=remedy)
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
        if how not in PASSES
    ]
    if not broken or not (stalled(case) or "crashed" in case.states().values()):
        return None
    host, peer, how = broken[0]
    both = any(one == peer and other == host for one, other, dummy in broken)
    way = "nor the other way round" if both else "but %s reaches %s, so a firewall is the likely cause" % (peer, host)
    if case.evidence.get(peer) is None:
        way = "and %s cannot be asked" % peer
    sockets = [one for one in case.known()[host].get("sockets") or [] if one["retransmits"]]
    resent = max([one["retransmits"] for one in sockets] + [0])
    unsent = sum(one["unsent_bytes"] for one in sockets)
    more = "; %d bytes wait there to be acknowledged, sent again %d times" % (unsent, resent) if resent else ""
    return finding("link-cut", host, "%s gets no answer from %s (%s), %s%s." % (host, peer, how, way, more), peer=peer)


def nic_down(found: Evidence, nic: Optional[str]) -> bool:
    """Whether the card of the plan is down or gone."""
    nics = (found.get("system") or {}).get("nics") or {}
    if not nics or not nic:
        return False
    return nic not in nics or nics[nic]["state"] in ("down", "lowerlayerdown", "notpresent")


def behind(case: Case) -> Optional[Dict[str, Any]]:
    """The rank that has not reached the collective at which the others wait."""
    if not stalled(case):
        return None
    full = no_room(case)
    if full:
        return full
    late = latest(case)
    if late is None:
        return stuck(case)
    found = case.known()[late]
    phase = found["run"].get("phase") or "unknown"
    share, reasons = busy(found), slow_reasons(found)
    if share >= BUSY or reasons:
        seen = "%s is behind the others in phase %s but works (%d %% of a core)" % (
            case.name(late),
            phase,
            round(100 * share),
        )
        return finding("rank-slow", late, seen + (": " + "; ".join(reasons) if reasons else "") + ".")
    code = "data-mismatch" if phase == "data" else "rank-stuck"
    stack, ahead = innermost(found), [one for one in case.known() if one != late]
    at = " at " + stack if stack else ""
    waits = (
        " %s waits for it in phase %s." % (case.name(ahead[0]), case.known()[ahead[0]]["run"].get("phase"))
        if ahead
        else ""
    )
    return finding(code, late, "%s did not arrive: it stands in phase %s%s.%s" % (case.name(late), phase, at, waits))


def busy(found: Evidence) -> float:
    return float((found.get("process") or {}).get("cpu_share", 0.0))


def no_room(case: Case) -> Optional[Dict[str, Any]]:
    """A rank that cannot save, though it is still there."""
    for host, found in case.known().items():
        free = (found.get("system") or {}).get("disk_free")
        if free is not None and free < LOW_DISK and found["run"].get("phase") == "save":
            seen = "%s cannot save: %s are free in its run folder." % (case.name(host), bytes_text(free))
            return finding("disk-full", host, seen)
    return None


def idle_of(found: Evidence) -> Optional[float]:
    """Seconds without progress; of a rank that says nothing of itself those since its start."""
    run = found["run"]
    if run.get("idle_seconds") is not None or run.get("state") != "running":
        return run.get("idle_seconds")  # type: ignore[no-any-return]
    now, started = (found.get("system") or {}).get("time"), run.get("started")
    return max(0.0, now - started - START_SECONDS) if now and started and run.get("step") is None else None


def stalled(case: Case) -> bool:
    """No rank made progress for several usual steps, and none of them computes on its own."""
    running = [found for found in case.known().values() if found["run"]["state"] == "running"]
    idle = [one for one in map(idle_of, running) if one is not None]
    usual = max([found["run"].get("step_seconds") or 0.0 for found in running] + [0.0])
    return bool(idle) and min(idle) > max(STILL_SECONDS, case.stall_factor * usual)


def latest(case: Case) -> Optional[str]:
    """The host whose rank has done the fewest collectives, None where all are at the same one."""
    counted = positions(case)
    if len(set(counted.values())) > 1:
        return min(counted, key=lambda host: counted[host])
    elsewhere = [host for host, found in case.known().items() if found["run"].get("phase") not in WAITING]
    if len(elsewhere) != 1 or len(case.known()) < 2:
        # Of several that do the same, the one that computes keeps the others waiting.
        elsewhere = [host for host in elsewhere or case.known() if busy(case.known()[host]) >= BUSY]
    return elsewhere[0] if len(elsewhere) == 1 else None


def positions(case: Case) -> Dict[str, Tuple[int, int]]:
    """How far each rank came, counted in the same way on all: by the flight record if every rank gave one."""
    known = case.known()
    flights = {host: recorded(found) for host, found in known.items()}
    if all(number is not None for number in flights.values()):
        return {host: (number or 0, 0) for host, number in flights.items()}
    told = {host: found["run"].get("collective") for host, found in known.items()}
    steps = {host: found["run"].get("step") for host, found in known.items()}
    whole = all(isinstance(number, int) for number in told.values())
    return {
        host: (step if isinstance(step, int) else -1, int(told[host] or 0) if whole else 0)
        for host, step in steps.items()
    }


def recorded(found: Evidence) -> Optional[int]:
    """The number of the last collective in Gloo's flight record."""
    number = ((found.get("dump") or {}).get("flight") or {}).get("last_seq")
    return number if isinstance(number, int) else None


def stuck(case: Case) -> Optional[Dict[str, Any]]:
    """Nobody is behind the others: all wait, or all compute."""
    known = case.known()
    working = [host for host, found in known.items() if busy(found) >= BUSY]
    if working:
        return None
    host = case.plan["master"]["host"] if case.plan["master"]["host"] in known else sorted(known)[0]
    if all(found["run"].get("phase") is None for found in known.values()):
        seen = "No rank got past the rendezvous at %s:%s." % (
            case.plan["master"].get("address"),
            case.plan["master"]["port"],
        )
        return finding("rank-stuck", host, seen)
    phases = ", ".join("%s in %s" % (case.name(one), found["run"].get("phase")) for one, found in sorted(known.items()))
    seen = "All ranks wait in the same collective and the links between them are open: %s." % phases
    return finding("rank-stuck", host, seen)


def slow_reasons(found: Evidence) -> List[str]:
    """Why a rank may be slow, as far as its host tells."""
    system, process, reasons = found.get("system") or {}, found.get("process") or {}, []
    if system.get("swapped_pages_per_second", 0) > 50 or process.get("swapped_bytes", 0) > 256 * 2**20:
        reasons.append("it is swapping (%s of it are out)" % bytes_text(process.get("swapped_bytes", 0)))
    others, late = found.get("others") or [], process.get("waits_for_core", 0.0)
    taken = sum(one["cpu_share"] for one in others)
    if others and (late > LATE or taken + max(busy(found), 1.0) > system.get("cpus", 1)):
        first = others[0]
        told = "pid %d of %s (%s) takes %.1f cores" % (
            first["pid"],
            first["user"],
            first["command"],
            first["cpu_share"],
        )
        reasons.append(
            told + (", and it waits for a core %d %% of the time" % min(100, round(100 * late)) if late > LATE else "")
        )
    elif late > 2 * LATE:
        reasons.append("it waits for a core %d %% of the time" % min(100, round(100 * late)))
    return reasons + held_back(system)


def held_back(system: Mapping[str, Any]) -> List[str]:
    """What slows everything on a host."""
    reasons, pressure = [], system.get("pressure") or {}
    if (pressure.get("io") or 0.0) > PRESSED:
        reasons.append("something there waits for the disk %d %% of the time" % round(pressure["io"]))
    if (pressure.get("memory") or 0.0) > PRESSED / 2:
        reasons.append("something there waits for memory %d %% of the time" % round(pressure["memory"]))
    if system.get("throttled"):
        reasons.append("its cores are slowed because they are too hot")
    if system.get("limited", 0.0) > 0.1:
        reasons.append(
            "a limit of its control group holds it back for %d %% of the time" % round(100 * system["limited"])
        )
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
    full = [one for one, found in known.items() if (found.get("system") or {}).get("disk_free", LOW_DISK) < LOW_DISK]
    if full:
        free = known[full[0]]["system"]["disk_free"]
        seen = "All ranks make progress, but %s has %s free in its run folder, too little for a checkpoint."
        return finding("disk-full", full[0], seen % (case.name(full[0]), bytes_text(free)), severity=WARNING)
    done = [found["run"].get("step") for found in known.values() if found["run"].get("step") is not None]
    slow = {one: slow_reasons(found) for one, found in known.items()}
    reasons = ["%s: %s" % (case.name(one), "; ".join(words)) for one, words in sorted(slow.items()) if words]
    pace = max([found["run"].get("step_seconds") or 0.0 for found in known.values()] + [0.0])
    where = "at step %d, %.2g s a step" % (max(done), pace) if done else "before the first step"
    if reasons:
        seen = "All ranks make progress (%s), but slowly: %s." % (where, " / ".join(reasons))
        return finding("healthy-slow", host, seen)
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
    if run.get("collective") is not None:
        parts.append("collective %s" % run["collective"])
    if recorded(found) is not None:
        parts.append("last of Gloo's record %d" % (recorded(found) or 0))
    if process:
        parts.append(
            "process %d state %s, %d %% of a core, %s"
            % (process["pid"], process["state"], round(100 * process["cpu_share"]), bytes_text(process["memory_bytes"]))
        )
    if system:
        parts.append(
            "load %.1f on %d cores, %s free memory"
            % (system["load1"], system["cpus"], bytes_text(system["memory_available"]))
        )
    parts += ["%s %s" % (peer, how) for peer, how in sorted((found.get("links") or {}).items())]
    return ", ".join(parts)


# -- all of it, for a file ----------------------------------------------------------------------------------------------

# Variables that the plan sets itself; whatever else is in the environment may be a secret.
OPEN_NAMES = re.compile(
    r"(NANOCHAT|OMP|GLOO|NCCL|PYTHON|TORCH)[A-Z_]*|CUDA_VISIBLE_DEVICES|GLIBC_TUNABLES",
)
MASK = "***"


def bundle(
    plan: Mapping[str, Any], evidence: Mapping[str, Any], secrets: Sequence[Mapping[str, Any]] = ()
) -> Dict[str, Any]:
    """The plan and all evidence, without the values of secrets and of variables that others chose."""
    nodes = [dict(node, env=masked_env(node.get("env") or {})) for node in plan["nodes"]]
    values = {str(value) for one in secrets for value in one.values() if len(str(value)) > 3}
    whole = {"plan": dict(plan, nodes=nodes), "hosts": {host: found or None for host, found in evidence.items()}}
    return dict(without(whole, sorted(values, key=len, reverse=True)))


def masked_env(env: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: value if OPEN_NAMES.fullmatch(name) else MASK for name, value in env.items()}


def without(found: Any, secrets: Sequence[str]) -> Any:
    """The same with every secret masked, however deep it lies."""
    if isinstance(found, Mapping):
        return {key: without(value, secrets) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [without(value, secrets) for value in found]
    if isinstance(found, str):
        for secret in secrets:
            found = found.replace(secret, MASK)
    return found
