# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence about a rank: collected on its host (gather.py), read and judged on the controller (judge.py)."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, TypedDict

from .._kit.words import bytes_text
from .._rules.causes import Cause, is_echo
from .._run.health import BUSY, Seen
from .._run.state import RUNNING, RunState

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
    pressure: Optional[Dict[str, Optional[float]]]
    oom_kills: Optional[int]
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
    system = found["system"]
    process: Mapping[str, Any] = found["process"] or {}
    reasons = []
    if (process.get("swapped_bytes") or 0) > 256 * 2**20:
        reasons.append("it is swapping (%s swapped out)" % bytes_text(process["swapped_bytes"]))
    others, late = found["others"], (process.get("waits_for_core") or 0.0)
    taken = sum(one["cpu_share"] for one in others)
    # A rank that neither uses a core nor waits for one is not slowed by who does.
    if others and (late > LATE or (works(found) and taken + max(found["run"]["busy"] or 0.0, 1.0) > system["cpus"])):
        reasons.append("pid %(pid)d of %(user)s (%(command)s) takes %(cpu_share).1f cores" % others[0])
    if late > (LATE if others else 2 * LATE):
        reasons.append("it waits for a core %d %% of the time" % min(100, round(100 * late)))
    return reasons + host_reasons(system)


def host_reasons(system: System) -> List[str]:
    """Reasons why everything on a host is slow."""
    reasons = []
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
    told, said = [describe(found)], error_of(found) or "".join(found["run"]["last_lines"][-1:])
    # Of an ended rank it is an old one.
    if found["run"]["state"] == RUNNING and innermost_frame(found):
        told.append("  stack: " + innermost_frame(found))
    return [*told, *(["  said: " + said] if said else [])]


def describe(found: RankEvidence) -> str:
    system, process = found["system"], found["process"]
    run = found["run"]
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
    return ", ".join(parts)


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
