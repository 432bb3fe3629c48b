# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When watching a host is over, and why."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import UNSEEN, Seen, StallLimits
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import intervals, judge
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import away, keeper
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import run_of as running

LIMITS = StallLimits(minimum=45, timeout=300)


def hosts(seen: dict[str, Seen]) -> dict[str, Seen]:
    return {host: one._replace(host=host) for host, one in seen.items()}


def verdict(host: str, first_step: bool = False, **seen: Seen) -> str | None:
    found = judge(host, hosts(seen), LIMITS, first_step)
    return found.verdict if found else None


def sentence(host: str, **seen: Seen) -> str:
    found = judge(host, hosts(seen), LIMITS)
    assert found is not None
    return found.sentence


GOES = Seen("", running())
MUTE = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None)
OURS = {**MUTE, "trainer": "ours"}
STILL = running(idle_seconds=46.0, collective=17)
FROZEN = Seen("", running(heartbeat_age=50.0, idle_seconds=50.0))
PREPARED = running(state="prepared", step=None)
CRASHED = running(state="crashed", exit_code=1, error="rank 1 did not come")
STARTING = running(step=None, done=0, step_seconds=None, steps_counted=0, idle_seconds=70.0)
EVALUATES = Seen("", running(phase="eval", idle_seconds=61.0))
ENDING = running(end_reason="error", end_error="the disk has 3 MB left", phase="end")
# What is seen of the hosts, and the verdict on some of them, with a part of its sentence.
CASES: dict[str, tuple[dict[str, Seen], dict[str, str | tuple[str, str] | None]]] = {
    "field_19: all are stuck": (
        {"a": Seen("", STILL), "b": Seen("", STILL)},
        {"a": ("stalled", "no progress for 46 s in phase sync (collective 17)")},
    ),
    "field_19: a process is frozen": (
        {"a": FROZEN, "b": Seen("", running(idle_seconds=49.0))},
        {"a": ("stalled", "has no heartbeat for 50 s")},
    ),
    "one has just crashed": ({"a": GOES, "b": Seen("", CRASHED, ended=5)}, {"a": None}),
    "one crashed, and the other still waits for it": (
        {"a": Seen("", STILL), "b": Seen("", CRASHED, ended=46)},
        {"a": "stalled", "b": "crashed"},
    ),
    "a host is out of reach for long": ({"a": Seen("", running(), silent=601)}, {"a": "lost"}),
    "field_12: the others go on without an answer of one": (
        {"a": Seen("", running(), silent=100), "b": GOES},
        {"a": None, "b": None},
    ),
    "field_19: the others wait for a host out of reach": (
        {"a": Seen("", running(), silent=21), "b": Seen("", STILL)},
        {"a": ("stalled", "has not answered for 21 s, and the others make no progress"), "b": "stalled"},
    ),
    "field_20: a rank begins to wait for a host out of reach at the rendezvous": (
        {"a": Seen("", running(), silent=30), "b": Seen("", OURS, age=10)},
        {"b": None},
    ),
    "field_20: a rank waits for a host out of reach at the rendezvous": (
        {"a": Seen("", running(), silent=30), "b": Seen("", OURS, age=46)},
        {"b": ("stalled", "has made no progress for 46 s in phase start")},
    ),
    "nothing is started after a minute": ({"a": Seen("", PREPARED, age=61)}, {"a": "missing"}),
    "field_20: one has met the others": ({"a": Seen("", OURS, age=76), "b": GOES}, {"a": None}),
    "field_20: ranks never meet": (
        {"a": Seen("", OURS, age=76), "b": Seen("", OURS, age=76)},
        {"a": ("stalled", "has made no progress for 76 s in phase start")},
    ),
    "field_20: one was never started": (
        {"a": Seen("", OURS, age=76), "b": Seen("", PREPARED, age=76)},
        {"a": "stalled", "b": "missing"},
    ),
    "the loop of another host has seen a stall": (
        {"a": GOES, "b": Seen("", running(idle_seconds=90.0), verdict="stalled")},
        {"a": "stalled"},
    ),
    "a host that is no longer watched is not missed": (
        {"a": EVALUATES, "b": Seen("", running(state="finished"), silent=300.0, verdict="finished")},
        {"a": None},
    ),
    "a host that is still watched is missed": (
        {"a": EVALUATES, "b": Seen("", running(), silent=61.0)},
        {"a": "stalled"},
    ),
    "a rank that has reported an error has crashed, although its session is there": (
        {"a": Seen("", ENDING, ended=21), "b": GOES},
        {"a": "crashed", "b": None},
    ),
    "a trainer is started again in its session": (
        {"a": Seen("", ENDING, ended=90, without_cpu=1.0), "b": GOES},
        {"a": None},
    ),
    "a trainer has started again in its session": (
        {"a": Seen("", {**ENDING, "phase": "start"}, ended=90), "b": GOES},
        {"a": None},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case: str) -> None:
    seen, verdicts = CASES[case]
    for host, wanted in verdicts.items():
        found = judge(host, hosts(seen), LIMITS)
        kind, text = wanted if isinstance(wanted, tuple) else (wanted, "")
        assert (found.verdict if found else None) == kind
        assert found is None or text in found.sentence


@pytest.mark.parametrize("phase", ["eval", "save", "forward_backward"])
def test_field_19_where_one_gives_no_sign_of_life_the_others_are_not_given_their_usual_time(phase: str) -> None:
    frozen = Seen("", running(heartbeat_age=50.0, idle_seconds=50.0, step_seconds=72.0))
    others = running(phase=phase, idle_seconds=40.0, step_seconds=72.0)
    assert verdict("a", a=frozen, b=Seen("", others)) is None
    later = Seen("", {**others, "idle_seconds": 46.0})
    assert [verdict(host, a=frozen, b=later) for host in "ab"] == ["stalled", "stalled"]
    assert verdict("b", a=Seen("", running(), silent=21), b=later) == "stalled"


def test_looks_become_rarer_in_a_long_run() -> None:
    assert intervals(0)["at_least"] == 3
    assert intervals(86400)["at_least"] == 20
    assert intervals(86400, first_step=True)["at_least"] == 0
    assert all(intervals(t)["timeout"] > intervals(t)["at_least"] for t in (0, 100, 10000))


def both(desktop: Seen, laptop: Seen) -> list[str | None]:
    """The verdicts on the two hosts of a run with keepers."""
    return [verdict(host, desktop=desktop, laptop=laptop) for host in ("desktop", "laptop")]


TOGETHER = {"membership": keeper("training", 2, "desktop", "laptop")}
ALONE = {"membership": keeper("training", 3, "laptop", away=[away("desktop", step=9)])}
WAITS = {"membership": keeper("idle", 2, why="desktop is not heard")}
OFF = Seen("", running(**TOGETHER), silent=700.0)
DEAD = running(state="crashed", error="its keeper ended by signal 9", **TOGETHER)


@pytest.mark.parametrize("desktop", [OFF, Seen("", DEAD, ended=700.0), Seen("", running(state="away"))])
def test_field_35_a_host_that_the_others_go_on_without_is_no_failure(desktop: Seen) -> None:
    assert both(desktop, Seen("", running(**ALONE))) == [None, None]
    finished = Seen("", running(state="finished", **ALONE), verdict="finished")
    assert both(desktop, finished) == ["away", "finished"]


def test_field_35_a_keeper_that_waits_is_neither_stalled_nor_crashed() -> None:
    waits = running(**WAITS, idle_seconds=60.0, heartbeat_age=60.0, end_reason="error", step_age=60.0)
    assert both(Seen("", running(), silent=60.0), Seen("", waits)) == [None, None]


def test_who_waits_for_a_host_without_keeper_is_told_its_name() -> None:
    dead, waits = Seen("", DEAD, ended=91.0), Seen("", running(**WAITS, step_age=91.0))
    assert both(dead, waits) == ["crashed", "orphaned"]
    assert "waits for desktop, which has lost its keeper" in sentence("laptop", desktop=dead, laptop=waits)
    # The others may do without it, once they have missed it for long enough.
    assert both(dead, Seen("", running(**WAITS, step_age=89.0))) == [None, None]


def test_a_keeper_that_has_just_died_is_not_given_up_before_the_others_miss_it() -> None:
    assert both(Seen("", DEAD, ended=1.0), Seen("", running(**TOGETHER))) == [None, None]


def test_who_waits_for_a_host_that_is_off_is_given_as_long_as_that_host() -> None:
    assert verdict("laptop", desktop=OFF, laptop=Seen("", running(**WAITS, step_age=500.0))) is None
    waits = Seen("", running(**WAITS, step_age=690.0))
    assert both(OFF, waits) == ["lost", "orphaned"]
    assert "waits for desktop, which does not answer" in sentence("laptop", desktop=OFF, laptop=waits)


def test_with_the_first_step_of_the_others_a_host_that_is_off_is_away() -> None:
    trains = running(membership=keeper("training", 1, "laptop"))
    off = Seen("", UNSEEN, silent=30.0)
    assert verdict("desktop", True, desktop=off, laptop=Seen("", trains, verdict="started")) == "away"
    assert verdict("desktop", True, desktop=off, laptop=Seen("", trains)) is None
