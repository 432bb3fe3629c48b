# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The doctor's judge: one story of evidence, one verdict."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import decode
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import finding
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings_table import (
    CATALOGUE,
    WARNING,
    FindingKind,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor import judge
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.evidence import (
    CODES,
    FAILED,
    Case,
    RankEvidence,
    lines_of,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.causes import LOSSES, Cause
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import keeper, run_of

PLAN: dict[str, Any] = {
    "run": "d4",
    "master": {"host": "desktop", "address": "192.168.1.10", "port": 29500},
    "nodes": [
        {"host": "desktop", "rank": 0, "address": "192.168.1.10", "nic": "enp4s0"},
        {"host": "laptop", "rank": 1, "address": "192.168.1.11", "nic": "wlp3s0"},
    ],
}
RUN = run_of(
    step=40, done=41, steps_counted=39, phase="forward_backward", collective=300, last_lines=["step 00040/05000"]
)
PROCESS = {
    "pid": 4711,
    "state": "R",
    "cpu_share": 1.9,
    "memory_bytes": 2**30,
    "waits_for_core": None,
    "waits_in": "",
}
SYSTEM = {
    "cpus": 4, "load1": 2.0, "memory_available": 2**33, "disk_free": 2**36,
    "throttled": False, "limited": None, "pressure": None, "oom_kills": 0, "nics": {"enp4s0": "up", "wlp3s0": "up"},
}  # fmt: skip


def rank(peer: str, run: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A rank in good health, but for what a test says about it."""
    found = {
        "rank": 0,
        "run": dict(RUN, **(run or {})),
        "process": PROCESS,
        "stacks": {},
        "links": {peer: "refused"},
    }
    found.update({"system": SYSTEM, "others": [], "kernel": [], "oom_kills_before": None}, **more)
    if found["run"]["busy"] is None and found["process"]:
        found["run"]["busy"] = found["process"]["cpu_share"]
    return copy.deepcopy(found)


def exited(peer: str, run: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A rank without a process."""
    return rank(peer, run, process=None, **more)


TIMED_OUT = {"failed": True, "msg": "Timed out after 25 second(s).", "timedout": {"period": 25}}


def result_of(found: dict[str, Any] | None) -> dict[str, Any]:
    """The registered result of a host's task; None means no answer in time."""
    return (
        TIMED_OUT
        if found is None
        else found
        if "failed" in found or "unreachable" in found
        else {"evidence": decode(RankEvidence, found)}
    )


def diagnosed(plan: Any, results: dict[str, Any]) -> Any:
    return diagnose(Case(plan, results))


def verdict(desktop: dict[str, Any] | None, laptop: dict[str, Any] | None) -> dict[str, Any]:
    told = diagnosed(PLAN, {"desktop": result_of(desktop), "laptop": result_of(laptop)})
    assert len(told["evidence"]) >= 2
    return dict(told["verdict"])


def blamed(desktop: dict[str, Any] | None, laptop: dict[str, Any] | None) -> tuple[str, str]:
    told = verdict(desktop, laptop)
    return told["code"], told["host"]


WAITS = {"phase": "sync", "phase_seconds": 100.0, "idle_seconds": 100.0}
IDLE = dict(PROCESS, state="S", cpu_share=0.0)


def crashed(error: str, code: int = 1, ended: float = 1000.0) -> dict[str, Any]:
    return {
        "state": "crashed",
        "error": error,
        "exit_code": code,
        "ended": ended,
        "phase": "sync",
        "idle_seconds": None,
    }


def missed(cause: str, blamed: int) -> dict[str, Any]:
    """The end event of a rank that ended because of another one."""
    return {**crashed("stopped in phase sync of step 40"), "end_cause": cause, "end_blames": [blamed]}


KILLED = {**crashed("", code=137), "signal": 9}
DISK_FULL = {**crashed("rank 1 could not save step 20"), "end_cause": "disk-full", "end_blames": [1]}
BY_ITS_KEEPER = {**crashed(""), "last_lines": ["keeper: rank 1 was killed by signal 9 (SIGKILL, exitcode: -9)"]}
OOM_KILLS = {**SYSTEM, "oom_kills": 4}
MAKE = {"pid": 99, "user": "eve", "command": "make -j8", "cpu_share": 7.5}
WAITING = rank("laptop", WAITS, process=IDLE)
BEHIND = {"idle_seconds": 60.0, "collective": 299}


@pytest.mark.parametrize(
    ("desktop", "laptop", "code", "words"),
    [
        # A disk that could not be looked at is not full, and a rank that computes for long is not stuck.
        (rank("laptop"), rank("desktop", system={**SYSTEM, "disk_free": None}), "healthy", ""),
        (rank("laptop", {"idle_seconds": 100.0}), rank("desktop", {"idle_seconds": 100.0}), "healthy", ""),
        (WAITING, None, "rank-host-no-answer", "rank 0 (desktop) waits for it"),
        (rank("laptop", WAITS, process=IDLE, links={"laptop": "timeout"}),
         rank("desktop", WAITS, process=IDLE, links={"desktop": "timeout"}), "link-cut", "nor in the other direction"),
        # Slow is not stuck.
        (WAITING, rank("desktop", {**BEHIND, "phase": "forward_backward"}, others=[MAKE], system={**SYSTEM, "load1": 9.0}),
         "rank-slow", "make -j8"),
        (exited("laptop", missed("peer-late", 1)), rank("desktop"), "rank-stuck", ""),
        (WAITING, rank("desktop", {**BEHIND, "phase": "data"}, process=IDLE), "data-mismatch", ""),
        (WAITING, rank("desktop", {**BEHIND, "phase": "save"}, process=IDLE, system={**SYSTEM, "disk_free": 1000}), "disk-full", ""),
        (exited("laptop", missed("disk-full", 1)), exited("desktop", missed("store-lost", 0)), "disk-full", ""),
        # field_18: all say who could not save
        (exited("laptop", DISK_FULL), exited("desktop", {**DISK_FULL, "ended": 1001.0}), "disk-full", ""),
        (WAITING, exited("desktop", KILLED, kernel=["Out of memory: Killed process 4711 (python)"]), "rank-oom", "kernel: out of memory"),
        # field_19: an OOM kill since the last heartbeat, and one long before
        (WAITING, exited("desktop", BY_ITS_KEEPER, system=OOM_KILLS, oom_kills_before=3), "rank-oom", ""),
        (WAITING, exited("desktop", BY_ITS_KEEPER, system=OOM_KILLS, oom_kills_before=4), "rank-killed", ""),
    ],
)  # fmt: skip
def test_what_is_seen_has_one_verdict(desktop: dict[str, Any], laptop: Any, code: str, words: str) -> None:
    told = verdict(desktop, laptop)
    assert told["code"] == code and words in told["seen"], told
    if code not in ("healthy", "not-running"):
        assert (told["host"], told["peer"]) == (("desktop", "laptop") if code == "link-cut" else ("laptop", None)), told


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        ({"throttled": True}, "its cores are thermally throttled"),
        ({"limited": 0.8}, "its cgroup's CPU limit throttles it 80 % of the time"),
        ({"pressure": {"cpu": 1.0, "memory": 0.0, "io": 71.0}}, "a process there waits for the disk 71 % of the time"),
        ({"pressure": {"cpu": 1.0, "memory": 33.0, "io": None}}, "a process there waits for memory 33 % of the time"),
    ],
)
def test_what_holds_a_host_back_is_named(system: dict[str, Any], reason: str) -> None:
    told = verdict(rank("laptop"), rank("desktop", system={**SYSTEM, **system}))
    assert told["code"] == "healthy-slow"
    assert f"rank 1 (laptop): {reason}" in told["seen"]


def test_a_stopped_process_of_a_run_that_is_over_is_told_with_a_restart() -> None:
    stopped = rank("desktop", {"idle_seconds": 90.0}, process=dict(PROCESS, state="T", cpu_share=0.0))
    ended = verdict(exited("laptop", missed("peer-lost", 1)), stopped)
    assert ended["code"] == "rank-frozen" and "--tags restart" in ended["remedy"]


def test_field_01_a_link_cut_in_one_direction() -> None:
    told = verdict({**WAITING, "links": {"laptop": "timeout"}}, rank("desktop", WAITS, process=IDLE))
    assert (told["code"], told["host"], told["peer"]) == ("link-cut", "desktop", "laptop")
    assert "but laptop reaches desktop, so a firewall is the likely cause" in told["seen"]


def test_a_rank_that_swaps_is_slow() -> None:
    told = verdict(rank("laptop"), rank("desktop", process={**PROCESS, "swapped_bytes": 2**30}))
    assert told["code"] == "healthy-slow" and "it is swapping (1.1 GB swapped out)" in told["seen"]


def test_a_network_card_that_is_down() -> None:
    down = {**SYSTEM, "nics": {"wlp3s0": "down"}}
    told = verdict(WAITING, rank("desktop", WAITS, process=IDLE, system=down))
    assert (told["code"], told["host"]) == ("link-cut", "laptop") and "wlp3s0" in told["seen"]


def test_field_17_who_waits_for_a_core_is_slow_however_many_share_it() -> None:
    crowd = [{**MAKE, "cpu_share": 0.2}]
    process = {**PROCESS, "cpu_share": 0.2}
    told = verdict(rank("laptop"), rank("desktop", process={**process, "waits_for_core": 0.6}, others=crowd))
    assert told["code"] == "healthy-slow"
    assert "make -j8" in told["seen"] and "waits for a core 60 % of the time" in told["seen"]
    assert verdict(rank("laptop"), rank("desktop", process=process, others=crowd))["code"] == "healthy"


def test_a_rank_that_wants_no_core_is_stuck_however_busy_its_machine_is() -> None:
    idle = {**IDLE, "waits_for_core": 0.0}
    told = verdict(
        WAITING, rank("desktop", {**BEHIND, "phase": "forward_backward", "busy": 0.0}, process=idle, others=[MAKE])
    )
    assert (told["code"], told["host"]) == ("rank-stuck", "laptop")


@pytest.mark.parametrize("cause", [cause.value for cause in Cause])
def test_the_trainers_causes_are_read_and_not_its_sentences(cause: str) -> None:
    blamed = {**crashed("qwertz"), "end_cause": cause, "end_blames": [1]}
    heard = {**blamed, "ended": 900.0}
    told = verdict(exited("laptop", heard), exited("desktop", blamed))
    if cause not in LOSSES:
        assert (told["code"], told["host"]) == (CODES.get(cause, FAILED), "laptop")
    assert told["code"] in CATALOGUE


def test_two_ranks_that_did_not_find_each_other() -> None:
    """The link between them was cut while they started, and is whole again."""
    lost = {**crashed("only 1 of 2 ranks came to the rendezvous"), "end_cause": "store-lost", "end_blames": []}
    told = verdict(exited("laptop", lost), exited("desktop", lost))
    assert (told["code"], told["host"]) == ("link-cut", "desktop") and "only 1 of 2 ranks" in told["seen"]
    # One that ended for a reason of its own is to blame.
    assert blamed(exited("laptop", lost), exited("desktop", crashed("qwertz"))) == ("rank-failed", "laptop")


def test_nobody_past_the_rendezvous_after_two_minutes() -> None:
    mute = {"step": None, "phase": None, "idle_seconds": None, "heartbeat_age": None, "trainer": "ours"}
    late = {**mute, "session_age": 120.0}
    told = verdict(rank("laptop", late, process=IDLE), rank("desktop", late, process=IDLE))
    assert told["code"] == "rank-stuck" and "rank 0 (desktop) in the rendezvous" in told["seen"]
    assert verdict(rank("laptop", late), rank("desktop", late, process=IDLE))["code"] == "rank-slow"
    begun = {**mute, "session_age": 30.0}
    assert verdict(rank("laptop", begun, process=IDLE), rank("desktop", begun, process=IDLE))["code"] == "healthy"


def test_field_18_a_disk_that_fills_up_is_told_before_it_matters() -> None:
    told = verdict(rank("laptop"), rank("desktop", system=dict(SYSTEM, disk_free=1000)))
    assert (told["code"], told["severity"], told["host"]) == ("disk-full", "warning", "laptop")


def test_a_rank_is_described_by_what_its_host_and_its_dump_told() -> None:
    stacks = {"MainThread": ["train.py:5 in main", "comm.py:9 in wait"]}
    told = rank("laptop", {"phase": "sync", "phase_seconds": 12.0, "error": "RuntimeError: x"}, stacks=stacks)
    one, stack, said = lines_of(told)
    other, last = lines_of(rank("desktop", {"phase_seconds": None}))
    assert "phase sync for 12 s, collective 300, process 4711 state R" in one
    assert (stack, said) == ("  stack: comm.py:9 in wait", "  said: RuntimeError: x")
    assert "phase forward_backward for 0 s, collective 300, process 4711 state R" in other
    assert last == "  said: step 00040/05000"
    # The stack of a rank that has ended is an old one.
    assert not any("stack" in line for line in lines_of({**told, "run": {**told["run"], "state": "stopped"}}))
    assert len(lines_of(rank("laptop", {"last_lines": []}))) == 1


def test_a_failed_module_is_never_told_as_a_host_out_of_reach() -> None:
    failed = {"failed": True, "msg": "dmesg: Operation not permitted"}
    told = verdict(rank("laptop"), failed)
    assert (told["code"], told["severity"], told["host"]) == ("rank-not-examined", "error", "laptop")
    assert told["seen"] == "rank 1 (laptop) could not be examined: dmesg: Operation not permitted."
    assert verdict(exited("laptop", crashed("ValueError: x")), failed)["code"] == "rank-failed"
    assert "was not contacted" in diagnosed(PLAN, {"desktop": None, "laptop": {}})["verdict"]["seen"]


def test_what_a_rank_reported_outweighs_that_its_processes_are_still_there() -> None:
    said = "rank 0 (desk.lan) stopped in phase eval, after 31 s: no heartbeat from rank 1 (lap.lan), last seen in phase sync"
    ending = {"phase": "end", "end_reason": "error", "end_error": said, "end_cause": "peer-lost", "end_blames": [1]}
    told = verdict(rank("laptop", ending, links={"laptop": "timeout"}), None)
    assert (told["code"], told["severity"], told["host"]) == ("rank-host-no-answer", "error", "laptop")
    assert "makes progress" not in told["seen"] and "no heartbeat from rank 1" in told["seen"]


def together(*members: str, state: str = "training", **more: Any) -> dict[str, Any]:
    return {"membership": keeper(state, 2, *members, **more)}


def test_field_35_who_is_away_from_a_run_that_goes_on_is_told_from_who_crashed():
    desktop = rank("laptop", together("desktop"))
    for laptop, words in (
        (rank("desktop", {"state": "stopped"}), "laptop is stopped there"),
        (rank("desktop", {"state": "crashed", "error": "gone"}), "laptop is crashed there"),
        (rank("desktop", together(state="idle", why="the rank of laptop died")), "is being readmitted by desktop"),
        (None, "laptop "),
    ):
        told = verdict(desktop, laptop)
        assert (told["code"], told["host"], told["severity"]) == ("rank-away", "laptop", "warning")
        assert words in told["seen"]


ENDED_KEEPER = {
    "state": "crashed",
    "signal": 9,
    "error": "its keeper ended by signal 9",
    "end_cause": "stopped",
    "ended": 1.0,
}


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({}, "keeper-gone"),
        ({"kernel": ["Out of memory: Killed process 7"]}, "rank-oom"),
        ({"system": dict(SYSTEM, disk_free=0)}, "disk-full"),
    ],
)
def test_who_waits_for_a_dead_keeper_and_what_it_died_of(more: dict[str, Any], code: str):
    laptop = rank("desktop", {**ENDED_KEEPER, **together("desktop", "laptop")}, **more)
    told = verdict(rank("laptop", together(state="idle")), laptop)
    assert (told["code"], told["host"]) == (code, "laptop")
    assert "its keeper ended by signal 9" in told["seen"] and "desktop waits for laptop" in told["seen"]


def test_an_error_that_a_restart_would_meet_again_is_told_as_what_it_is():
    full = {**crashed("no space"), "end_error": "no space", "end_cause": "disk-full", "end_blames": [0]}
    desktop = rank("laptop", {**full, **together(state="failed", why="no space")})
    laptop = rank("desktop", {**full, **together(state="failed", why="desktop gave up", since=1.7e9 + 1)})
    assert blamed(desktop, laptop) == ("disk-full", "desktop")


def test_a_new_finding_is_a_kind_and_a_question(monkeypatch):
    """The recipe of CONTRIBUTING.md."""

    def hot(case):
        throttled = [host for host, found in case.known.items() if found["system"]["throttled"]]
        return finding("rank-hot", throttled[0], f"{case.name(throttled[0])} is hot.") if throttled else None

    monkeypatch.setitem(
        CATALOGUE, "rank-hot", FindingKind(WARNING, "A host is hot", "It computes slowly.", "Open a window.")
    )
    monkeypatch.setattr(judge, "QUESTIONS", (*judge.QUESTIONS, hot))
    assert verdict(rank("laptop"), rank("desktop"))["code"] == "healthy"
    told = verdict(rank("laptop"), rank("desktop", system=dict(SYSTEM, throttled=True)))
    assert (told["code"], told["host"], told["remedy"]) == ("rank-hot", "laptop", "Open a window.")
