# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence about a run: of each rank, collected on its host (gather.py), and all of it as the judge (judge.py) reads it and a person
may share it."""

from __future__ import annotations

import math
import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, TypedDict

from .._contract.plan import Plan
from .._kit.words import bytes_text, plain_reason
from .._rules.causes import Cause, is_echo
from .._run.health import BUSY, Health, Seen, StallLimits, without_cpu
from .._run.state import CRASHED, RUNNING, RunState

MASK = "***"
LOW_DISK = 64 * 1024 * 1024
LATE = 0.2  # fraction of the time that its threads may be ready to run without a core
PRESSED = 40.0  # percentage of the time that a process may wait for the disk
# Findings by the trainer's cause of an end; FAILED for all others.
FAILED = "rank-failed"
CODES = {
    Cause.PEER_LOST.value: "link-cut",
    Cause.PEER_LATE.value: "rank-stuck",
    Cause.STORE_LOST.value: "link-cut",
    Cause.LINK_LOST.value: "link-cut",
    Cause.PORT_TAKEN.value: "port-held",
    Cause.SETTINGS_DIFFER.value: "settings-differ",
    Cause.DATA_DIFFER.value: "data-mismatch",
    Cause.TORCH_DIFFERS.value: "torch-differs",
    Cause.CODE_DIFFERS.value: "trainer-differs",
    Cause.WEIGHTS_DIFFER.value: "weights-differ",
    Cause.NON_FINITE_LOSS.value: "loss-not-finite",
    Cause.OOM.value: "rank-oom",
    Cause.DISK_FULL.value: "disk-full",
    Cause.BAD_DATA.value: "data-mismatch",
}
# In the log of a keeper, which then exits with a code of its own.
KILLED = re.compile(r"keeper: rank \d+ was killed by signal 9\b")


class RankProcess(TypedDict):
    """The rank's process; shares are of one core."""

    pid: int
    state: str
    waits_for_core: Optional[float]
    memory_bytes: int
    swapped_bytes: Optional[int]
    waits_in: Optional[str]


class OtherProcess(TypedDict):
    """Another process that uses the CPU."""

    pid: int
    user: str
    command: str
    cpu_share: float


class System(TypedDict):
    """The machine during the examination."""

    cpus: int
    load1: float
    memory_available: int
    disk_free: Optional[int]
    throttled: Optional[bool]
    limited: Optional[float]
    pressure: Optional[Dict[str, Optional[float]]]  # percent of the last ten seconds that a process waited for it
    oom_kills: Optional[int]  # of the kernel since boot
    nics: Optional[Dict[str, str]]  # the state of each network interface


class RankEvidence(TypedDict):
    """All evidence about a rank."""

    rank: int
    run: RunState
    process: Optional[RankProcess]
    stacks: Optional[Dict[str, List[str]]]  # of the trainer's threads
    links: Dict[str, str]  # whether packets come back, for each other host
    system: System
    others: List[OtherProcess]
    kernel: List[str]  # its messages about lack of memory since the run began
    oom_kills_before: Optional[int]  # at the rank's last heartbeat


class RankDeath(NamedTuple):
    """Why a rank ended."""

    code: str
    blames: List[int]  # the ranks at fault, if known
    is_echo: bool  # it ended only because another rank was missing or at fault
    cause: str = ""  # as the trainer recorded it


# -- one rank's evidence in words: its messages, its CPU use, and why it may be slow ------------------------------------


def error_of(found: RankEvidence) -> str:
    """The recorded end of the rank; its processes may still be exiting."""
    return str(found["run"]["error"] or found["run"]["end_error"] or "")


def low_disk(found: RankEvidence) -> Optional[int]:
    """The free bytes of the run folder's disk, if too few for a checkpoint; None if enough or unknown."""
    free = found["system"]["disk_free"]
    return free if free is not None and free < LOW_DISK else None


def works(found: RankEvidence) -> bool:
    """Whether a rank uses CPU, or is ready to while others take all cores."""
    return (found["run"]["busy"] or 0.0) >= BUSY


def innermost_frame(found: RankEvidence) -> str:
    """The innermost line of the main thread's stack."""
    frames = (found["stacks"] or {}).get("MainThread")
    return frames[-1] if frames else ""


def slow_reasons(found: RankEvidence) -> List[str]:
    """Why a rank may be slow, as far as its host shows."""
    system, process, others = found["system"], found["process"], found["others"]
    reasons = []
    swapped, late = (process["swapped_bytes"] or 0, process["waits_for_core"] or 0.0) if process else (0, 0.0)
    if swapped > 256 * 2**20:
        reasons.append("it is swapping (%s swapped out)" % bytes_text(swapped))
    taken = sum(one["cpu_share"] for one in others)
    # A rank that neither uses a core nor waits for one is not slowed by who does.
    if others and (late > LATE or (works(found) and taken + max(found["run"]["busy"] or 0.0, 1.0) > system["cpus"])):
        reasons.append("pid %(pid)d of %(user)s (%(command)s) takes %(cpu_share).1f cores" % others[0])
    if late > (LATE if others else 2 * LATE):
        reasons.append("it waits for a core %d %% of the time" % min(100, round(100 * late)))
    disk, memory = ((system["pressure"] or {}).get(name) or 0.0 for name in ("io", "memory"))
    limited = system["limited"] or 0.0
    if disk > PRESSED:
        reasons.append("a process there waits for the disk %d %% of the time" % round(disk))
    if memory > PRESSED / 2:
        reasons.append("a process there waits for memory %d %% of the time" % round(memory))
    if system["throttled"]:
        reasons.append("its cores are thermally throttled")
    if limited > 0.1:
        reasons.append("its cgroup's CPU limit throttles it %d %% of the time" % round(100 * limited))
    return reasons


def lines_of(found: RankEvidence) -> List[str]:
    """The lines about a rank that support a verdict."""
    system, process, run = found["system"], found["process"], found["run"]
    parts = [
        run["state"],
        "step %s" % run["step"],
        "phase %s for %.0f s" % (run["phase"], run["phase_seconds"] or 0.0),
    ]
    if run["collective"] is not None:
        parts.append("collective %s" % run["collective"])
    if process:
        parts.append(
            "process %d state %s, %d %% of a core, %s"
            % (process["pid"], process["state"], round(100 * (run["busy"] or 0.0)), bytes_text(process["memory_bytes"]))
        )
    free = bytes_text(system["memory_available"])
    parts.append("load %.1f on %d cores, %s free memory" % (system["load1"], system["cpus"], free))
    parts += ["%s %s" % (peer, how) for peer, how in sorted(found["links"].items())]
    told, said = [", ".join(parts)], error_of(found) or "".join(run["last_lines"][-1:])
    # Of an ended rank it is an old one.
    if run["state"] == RUNNING and innermost_frame(found):
        told.append("  stack: " + innermost_frame(found))
    return [*told, *(["  said: " + said] if said else [])]


# -- why a rank ended and who caused it: from its own record, its signal, and the kernel ----------------------------------


def death_of(found: RankEvidence, rank: int) -> RankDeath:
    """Classify the end of a crashed rank."""
    run = found["run"]
    if Seen("", run).lost_its_keeper:
        # Its rank could still record why it ended, but only because the keeper had ended first.
        full = low_disk(found) is not None
        return RankDeath("rank-oom" if out_of_memory(found) else "disk-full" if full else "keeper-gone", [rank], False)
    if run["end_cause"]:
        cause, blames = run["end_cause"], run["end_blames"] or []
        return RankDeath(CODES.get(cause, FAILED), blames, is_echo(cause, blames, rank), cause)
    killed = was_killed(found)
    if killed or (run["ended"] is None and not run["end_error"]):
        code = "rank-oom" if out_of_memory(found) else "rank-killed" if killed else "rank-vanished"
        return RankDeath(code, [rank], False)
    return RankDeath(FAILED, [], False)


def was_killed(found: RankEvidence) -> bool:
    """By SIGKILL; a trainer that could record its end was not, and the log may be of an earlier attempt."""
    run = found["run"]
    by_log = not run["end_error"] and KILLED.search("\n".join(run["last_lines"]))
    return run["signal"] == 9 or run["exit_code"] in (137, -9) or bool(by_log)


def out_of_memory(found: RankEvidence) -> bool:
    """The kernel reports it, or its count of OOM kills grew since the rank's last heartbeat."""
    before, now = found["oom_kills_before"], found["system"]["oom_kills"]
    return bool(found["kernel"]) or (before is not None and now is not None and now > before)


# -- all hosts together -------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A host's evidence; otherwise why there is none, and whether it returned nothing at all."""

    evidence: Optional[RankEvidence]
    words: str = ""
    is_silent: bool = False


def answer_of(result: Optional[Mapping[str, Any]]) -> Answer:
    """The result of doctor_info on a host, whatever happened to the task."""
    told = result or {"msg": "the host was not contacted"}
    if told.get("evidence"):
        return Answer(told["evidence"])
    if told.get("timedout"):
        return Answer(None, "did not answer within %s s" % told["timedout"].get("period", "some"), True)
    said = (plain_reason(str(told.get("msg") or "")).splitlines() or ["no reason was given"])[0]
    is_silent = bool(told.get("unreachable"))
    return Answer(None, "%s: %s" % ("cannot be reached" if is_silent else "could not be examined", said), is_silent)


class Case:
    """One examination; results: what doctor_info returned by host."""

    def __init__(self, plan: Plan, results: Mapping[str, Any]) -> None:
        self.plan, self.results = plan, results
        self.ranks = {node["host"]: node["rank"] for node in plan["nodes"]}
        self.hosts = {rank: host for host, rank in self.ranks.items()}
        # In the order of their ranks.
        self.answers = {host: answer_of(results[host]) for host in sorted(results, key=self.rank)}
        self.known = {host: one.evidence for host, one in self.answers.items() if one.evidence is not None}
        self.silent = sorted(host for host, one in self.answers.items() if one.is_silent)
        self.limits = StallLimits(timeout=float(plan.get("timeout_seconds") or StallLimits().timeout))
        seen = [Seen(host, one["run"], without_cpu=without_cpu(one["run"])) for host, one in self.known.items()]
        seen += [Seen(host, silent=math.inf) for host in self.answers if host not in self.known]
        self.health = Health(seen, self.limits)
        self.stalled = self.health.stalled
        # Whether the run would count as stalled if no rank used CPU.
        self.lags = Health([one._replace(without_cpu=math.inf) for one in seen], self.limits).stalled
        self.states = {host: str(self.health.seen[host].state) for host in self.known}

    def part(self, hosts: Iterable[str]) -> Case:
        """The same of some hosts."""
        return Case(self.plan, {host: self.results[host] for host in hosts if host in self.results})

    def rank(self, host: str) -> int:
        return self.ranks.get(host, -1)

    def leader(self) -> str:
        """The host of the lowest rank that answered."""
        return next(iter(self.known))

    def name(self, host: str) -> str:
        return "rank %d (%s)" % (self.rank(host), host)

    def in_state(self, state: str) -> List[str]:
        """The hosts that report this state."""
        return [host for host, seen in self.states.items() if seen == state]

    def without_answer(self, hosts: Iterable[str]) -> str:
        """Why these hosts have no evidence."""
        return "; ".join("%s %s" % (self.name(host), self.answers[host].words) for host in hosts)

    def death(self, host: str) -> RankDeath:
        return death_of(self.known[host], self.rank(host))

    def own_deaths(self) -> List[str]:
        """The hosts whose rank crashed by itself."""
        return [host for host in self.in_state(CRASHED) if not self.death(host).is_echo]


# -- a file that can be shared ------------------------------------------------------------------------------------------


def bundle(case: Case, secrets: Sequence[Mapping[str, object]], told: Mapping[str, object]) -> Dict[str, object]:
    """The verdict, the plan and all evidence, without secrets and environment variables."""
    nodes = [{key: value for key, value in node.items() if key != "env"} for node in case.plan["nodes"]]
    values = {str(value) for one in secrets for value in one.values() if len(str(value)) > 3}
    hosts = {host: answer.evidence or answer.words for host, answer in case.answers.items()}
    whole = {**told, "plan": dict(case.plan, nodes=nodes), "hosts": hosts}
    return dict(without(whole, sorted(values, key=len, reverse=True)))


def without(found: Any, secrets: Sequence[str]) -> Any:
    """The same with every secret masked, at any depth."""
    if isinstance(found, Mapping):
        return {key: without(value, secrets) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [without(value, secrets) for value in found]
    if isinstance(found, str):
        for secret in secrets:
            found = found.replace(secret, MASK)
    return found
