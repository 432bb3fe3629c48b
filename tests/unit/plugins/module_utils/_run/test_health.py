# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The watcher, the status and the doctor agree whether a run makes progress."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import decode
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.evidence import Case, RankEvidence
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose
from ansible_collections.nanochat.ddp.plugins.module_utils._run import table as run_table
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import (
    PHASES,
    UNSEEN,
    Health,
    Seen,
    StallLimits,
    without_cpu,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import judge
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import keeper
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import run_of as rank

MUTE = dict.fromkeys(("step", "phase", "idle_seconds", "heartbeat_age", "step_seconds")) | {"steps_counted": 0}


LATE = {"heartbeat_age": 50.0, "idle_seconds": 50.0}
IMPORTS = {**MUTE, "session_age": 120.0}
FIRST = {"steps_counted": 0, "step_seconds": None}

WAITS_100 = rank(idle_seconds=100.0)
EVALUATES = {"phase": "eval", "idle_seconds": 61.0}


def both(stalls: bool, **more: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
    return rank(**more), rank(**more), stalls


# What two ranks look like, and whether their run stalls.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "both save for 40 s on a slow disk": both(False, phase="save", idle_seconds=40.0),
    "both save for 10 minutes": both(False, phase="save", idle_seconds=600.0),
    "both save for more than three timeouts": both(True, phase="save", idle_seconds=901.0),
    "one saves, one waits for it": (rank(phase="save", idle_seconds=100.0), WAITS_100, False),
    "one evaluates, one waits for it": (rank(phase="eval", idle_seconds=100.0, busy=1.0), WAITS_100, False),
    "one writes samples, one waits for it": (rank(phase="sample", idle_seconds=100.0), WAITS_100, False),
    "both read a checkpoint": both(False, phase="resume", idle_seconds=200.0),
    "both wait at a step": both(True, idle_seconds=46.0),
    "both wait, not yet for long": both(False, idle_seconds=44.0),
    "steps of 30 s": both(False, step_seconds=30.0, idle_seconds=140.0),
    "steps of 30 s, for more than five of them": both(True, step_seconds=30.0, idle_seconds=151.0),
    "one computes on a busy machine": (rank(phase="forward_backward", idle_seconds=100.0, busy=0.9), WAITS_100, False),
    "one computes for longer than the timeout": (rank(idle_seconds=301.0, busy=1.0), rank(idle_seconds=301.0), True),
    "agents wait for each other at the end": both(False, phase="end", idle_seconds=60.0),
    "an end that does not come": both(True, phase="end", idle_seconds=80.0),
    "one makes progress": (rank(), rank(idle_seconds=500.0), False),
    "one has no heartbeat": (rank(**LATE), rank(idle_seconds=49.0), True),
    "one has no heartbeat, but computes": (rank(**LATE, busy=0.8), rank(idle_seconds=49.0), False),
    "one has no heartbeat, one evaluates and computes": (rank(**LATE), rank(**EVALUATES, busy=1.0), False),
    "one has no heartbeat, one evaluates and waits": (rank(**LATE), rank(**EVALUATES), True),
    "both import their libraries on a busy machine": both(False, **IMPORTS, busy=1.2),
    "one waits at the rendezvous for one that imports": (rank(**IMPORTS, busy=0.0), rank(**IMPORTS, busy=0.9), False),
    "both wait at the rendezvous": both(True, **MUTE, session_age=80.0, busy=0.0),
    "the first step takes long, with CPU": (
        rank(**FIRST, idle_seconds=200.0, busy=1.0),
        rank(idle_seconds=90.0),
        False,
    ),
}

PLAN = {
    "run": "d4",
    "timeout_seconds": 300,
    "master": {"host": "a", "address": "10.0.0.1", "port": 29500},
    "nodes": [{"host": host, "rank": at, "address": f"10.0.0.{at + 1}", "nic": "eth0"} for at, host in enumerate("ab")],
}


def is_stalled(*ranks: Seen) -> bool:
    return Health([one._replace(host="ab"[at]) for at, one in enumerate(ranks)]).stalled


@pytest.mark.parametrize("case", CASES)
def test_watch_status_and_doctor_agree(case: str) -> None:
    first, second, stalls = CASES[case]
    timed = [{**run, "timeout_seconds": 300.0} for run in (first, second)]
    seen = {host: Seen(host, run, without_cpu=without_cpu(run)) for host, run in zip("ab", timed)}
    watched = {host: judge(host, seen, StallLimits()) for host in seen}
    assert {verdict is not None for verdict in watched.values()} == {stalls}
    table = run_table.status_screen(list(seen.values()))
    assert ("stalled" in table or "no heartbeat" in table) is (stalls or "no heartbeat, one evaluates" in case)
    answers = {"a": {"evidence": evidence(first, "b")}, "b": {"evidence": evidence(second, "a")}}
    told = diagnose(Case(PLAN, answers))
    # A rank that computes for longer than the timeout is examined, and found to be slow.
    alarm = told["verdict"]["severity"] == "error"
    assert alarm is (stalls and "computes" not in case)


def evidence(run: Any, peer: str) -> dict[str, Any]:
    process = {"pid": 7, "state": "S", "cpu_share": run["busy"] or 0.0, "waits_in": "", "memory_bytes": 0}
    system = {"cpus": 2, "load1": 0.0, "memory_available": 0}
    found = {
        "rank": 0,
        "run": run,
        "process": process,
        "links": {peer: "refused"},
        "system": system,
        "others": [],
        "kernel": [],
    }
    return dict(decode(RankEvidence, found))


def test_a_host_that_gives_no_answer_is_missed_only_if_the_others_wait() -> None:
    away, evaluates = Seen("", UNSEEN, silent=60.0), rank(phase="eval", idle_seconds=100.0)
    assert not is_stalled(Seen("", rank()), away)
    assert not is_stalled(Seen("", evaluates, without_cpu=1.0), away)
    assert is_stalled(Seen("", evaluates, without_cpu=math.inf), away)
    assert not is_stalled(away)


def test_use_of_cpu_counts_from_when_it_was_last_seen() -> None:
    waits = rank(idle_seconds=100.0)
    assert [is_stalled(Seen("", waits, without_cpu=seconds)) for seconds in (44.0, 46.0)] == [False, True]


def test_every_phase_of_the_trainer_has_its_patience() -> None:
    folder = Path(__file__).resolve().parents[5] / "trainer" / "nanochat"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    told = set(re.findall(r"\.enter\(\"(\w+)\"", source))
    assert {"head", "forward_backward", "save"} < told
    assert {"start", *told} == set(PHASES)


WAITS = keeper("idle", 3, why="b is not heard", hosts=["a", "b"])


def test_a_host_whose_keeper_waits_for_others_is_neither_stalled_nor_crashed() -> None:
    quiet = rank(membership=WAITS, heartbeat_age=500.0, idle_seconds=500.0, end_reason="error")
    assert not is_stalled(Seen("", quiet), Seen("", quiet))
    crashed = Seen("b", rank(state="crashed", exit_code=1, error="gone"), age=600.0, ended=600.0)
    seen = {"a": Seen("a", quiet, age=600.0), "b": crashed}
    assert [judge(host, seen, StallLimits()) for host in seen] == [None, None]
    assert is_stalled(Seen("", rank(membership=keeper("training", 3, "a"), heartbeat_age=500.0, idle_seconds=500.0)))
    table = run_table.status_screen([Seen("a", {**quiet, "run": "d4", "rank": 0})])
    assert "waiting (idle)" in table
    assert "a waits for b, which does not answer" in table
