# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stalls import StallLimits
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import Observation, intervals, judge
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import away, keeper

LIMITS = StallLimits(factor=5, minimum=45, timeout=300)


def running(**more: Any) -> dict[str, Any]:
    usual = {"state": "running", "step": 9, "done": 10, "steps": 100, "step_seconds": 2.0, "steps_counted": 9}
    return {**EMPTY, **usual, "phase": "sync", "phase_seconds": 1.0, "idle_seconds": 1.0, "heartbeat_age": 0.5, **more}


def verdict(host: str, first_step: bool = False, **seen: Observation) -> str | None:
    found = judge(host, seen, LIMITS, first_step)
    return found.verdict if found else None


def sentence(host: str, **seen: Observation) -> str:
    found = judge(host, seen, LIMITS)
    assert found is not None
    return found.sentence


def test_while_all_make_progress_there_is_no_verdict() -> None:
    assert verdict("a", a=Observation(running()), b=Observation(running())) is None


@pytest.mark.parametrize("state", ["finished", "stopped", "crashed"])
def test_an_end_is_an_end_whatever_the_others_do(state: str) -> None:
    assert verdict("a", a=Observation(running(state=state)), b=Observation(running())) == state


def test_a_crash_is_told_with_code_place_and_error() -> None:
    said = sentence("a", a=Observation(running(state="crashed", exit_code=1, error="rank 1 did not come")))
    assert said == "crashed with code 1, 10 of 100 steps made: rank 1 did not come"


def test_field_19_all_standing_still_is_a_stall_named_with_phase_and_time() -> None:
    still = running(idle_seconds=46.0, phase="sync", collective=17)
    assert verdict("a", a=Observation(still), b=Observation(still)) == "stalled"
    assert "no progress for 46 s in phase sync (collective 17)" in sentence(
        "a", a=Observation(still), b=Observation(still)
    )


def test_the_first_steps_are_given_longer() -> None:
    starting = running(step=None, done=0, step_seconds=None, steps_counted=0, idle_seconds=70.0)
    assert verdict("a", a=Observation(starting)) is None
    assert verdict("a", a=Observation({**starting, "idle_seconds": 76.0})) == "stalled"


def test_field_19_a_frozen_process_gives_no_sign_of_life() -> None:
    frozen = running(heartbeat_age=50.0, idle_seconds=50.0)
    waiting = running(idle_seconds=49.0)
    assert verdict("a", a=Observation(frozen), b=Observation(waiting)) == "stalled"
    assert "has no heartbeat for 50 s" in sentence("a", a=Observation(frozen), b=Observation(waiting))


@pytest.mark.parametrize("phase", ["eval", "save", "forward_backward"])
def test_field_19_where_one_gives_no_sign_of_life_the_others_are_not_given_their_usual_time(phase: str) -> None:
    frozen = running(heartbeat_age=50.0, idle_seconds=50.0, step_seconds=72.0)
    others = running(phase=phase, idle_seconds=40.0, step_seconds=72.0)
    assert verdict("a", a=Observation(frozen), b=Observation(others)) is None
    later = {**others, "idle_seconds": 46.0}
    assert (
        verdict("a", a=Observation(frozen), b=Observation(later))
        == verdict("b", a=Observation(frozen), b=Observation(later))
        == "stalled"
    )
    assert verdict("b", a=Observation(running(), silent=21), b=Observation(later)) == "stalled"


def test_a_trainer_without_signs_of_progress_is_never_called_stalled() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None)
    assert verdict("a", a=Observation(mute, age=10000)) is None


def test_a_rank_that_waits_for_a_crashed_one_is_given_up_after_its_grace() -> None:
    crashed = running(state="crashed", exit_code=1)
    assert verdict("a", a=Observation(running()), b=Observation(crashed, ended=5)) is None
    assert verdict("a", a=Observation(running()), b=Observation(crashed, ended=21)) == "orphaned"
    assert "waits for b, which crashed" in sentence("a", a=Observation(running()), b=Observation(crashed, ended=21))


@pytest.mark.parametrize("phase", [None, "rendezvous"])
def test_before_the_ranks_have_met_no_connection_breaks_that_would_have_to_be_waited_for(phase: str | None) -> None:
    waits, crashed = running(phase=phase, trainer="ours", step=None), running(state="crashed", exit_code=3)
    assert verdict("a", a=Observation(waits), b=Observation(crashed, ended=4)) is None
    assert verdict("a", a=Observation(waits), b=Observation(crashed, ended=6)) == "orphaned"
    assert verdict("a", a=Observation({**waits, "phase": "agree"}), b=Observation(crashed, ended=6)) is None
    # Of a trainer that tells no phase nobody knows whether it has met the others.
    assert verdict("a", a=Observation({**waits, "trainer": "git"}), b=Observation(crashed, ended=6)) is None


def test_a_host_out_of_reach_is_given_time() -> None:
    assert verdict("a", a=Observation(running(), silent=500)) is None
    assert verdict("a", a=Observation(running(), silent=601)) == "lost"


def test_field_12_a_host_out_of_reach_while_the_others_go_on_is_given_time() -> None:
    away = Observation(running(), silent=100)
    assert verdict("a", a=away, b=Observation(running())) is None
    assert verdict("b", a=away, b=Observation(running())) is None


def test_field_19_a_host_out_of_reach_that_the_others_miss_is_no_matter_of_ten_minutes() -> None:
    away, still = Observation(running(), silent=21), Observation(running(idle_seconds=46.0))
    assert verdict("a", a=away, b=still) == verdict("b", a=away, b=still) == "stalled"
    assert "has not answered for 21 s, and the others make no progress" in sentence("a", a=away, b=still)


def test_field_20_a_rank_that_waits_at_the_rendezvous_for_a_host_out_of_reach() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None, trainer="ours")
    away = Observation(running(), silent=30)
    assert verdict("b", a=away, b=Observation(mute, age=10)) is None
    assert "waits for a, which does not answer" in sentence("b", a=away, b=Observation(mute, age=46))


def test_nothing_started_is_said_after_a_minute() -> None:
    prepared = running(state="prepared", step=None)
    assert verdict("a", a=Observation(prepared, age=10)) is None
    assert verdict("a", a=Observation(prepared, age=61)) == "missing"


def test_field_20_ranks_that_never_meet_are_told_before_their_timeout() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None, trainer="ours")
    assert verdict("a", a=Observation(mute, age=70), b=Observation(mute, age=76)) is None
    assert verdict("a", a=Observation(mute, age=76), b=Observation(running(), age=76)) is None
    assert "waits at the rendezvous" in sentence("a", a=Observation(mute, age=76), b=Observation(mute, age=76))


def test_field_20_a_rank_that_waits_for_one_that_was_never_started() -> None:
    prepared = running(state="prepared", step=None)
    assert verdict("a", a=Observation(running(), age=50), b=Observation(prepared, age=50)) is None
    assert verdict("a", a=Observation(running(), age=61), b=Observation(prepared, age=61)) == "orphaned"
    assert "b, where nothing was started" in sentence(
        "a", a=Observation(running(), age=61), b=Observation(prepared, age=61)
    )


def test_a_trainer_that_will_speak_has_not_started_before_it_did() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None)
    assert verdict("a", True, a=Observation(mute, age=61)) == "started"
    assert verdict("a", True, a=Observation({**mute, "trainer": "ours"}, age=61)) is None


def test_with_the_first_step_watching_is_over_if_that_is_wanted() -> None:
    before = running(step=None, done=0, step_seconds=None, idle_seconds=5.0)
    assert verdict("a", True, a=Observation(before)) is None
    assert verdict("a", True, a=Observation(running(step=0))) == "started"


def test_looks_become_rarer_in_a_long_run() -> None:
    assert intervals(0)["at_least"] == 3
    assert intervals(86400)["at_least"] == 20
    assert intervals(86400, first_step=True)["at_least"] == 0
    assert all(intervals(t)["timeout"] > intervals(t)["at_least"] for t in (0, 100, 10000))


def test_all_loops_end_together_when_the_run_stalls() -> None:
    assert (
        verdict("a", a=Observation(running()), b=Observation(running(idle_seconds=90.0), over="stalled")) == "stalled"
    )


def test_a_host_whose_watching_is_over_is_not_missed() -> None:
    done = Observation(running(state="finished"), silent=300.0, over="finished")
    evaluates = Observation(running(phase="eval", idle_seconds=61.0))
    assert verdict("a", a=evaluates, b=done) is None
    assert verdict("a", a=evaluates, b=Observation(running(), silent=61.0)) == "stalled"


def test_what_a_rank_reported_outweighs_that_its_session_is_there() -> None:
    ending = running(end_reason="error", end_error="the disk has 3 MB left", phase="end")
    assert verdict("a", a=Observation(ending, ended=10), b=Observation(running())) is None
    assert (
        sentence("a", a=Observation(ending, ended=21))
        == "ended with an error, 10 of 100 steps made: the disk has 3 MB left"
    )
    assert verdict("b", a=Observation(ending, ended=21), b=Observation(running())) == "orphaned"


def test_a_trainer_that_is_started_again_in_its_session_has_not_crashed() -> None:
    ended = running(end_reason="error", end_error="rank 1 is gone", phase="end")
    assert verdict("a", a=Observation(ended, ended=90, quiet=1.0), b=Observation(running())) is None
    assert verdict("a", a=Observation({**ended, "phase": "start"}, ended=90), b=Observation(running())) is None


ALONE = keeper("training", 3, "laptop", away=[away("desktop", step=9)])
WAITS = keeper("idle", 2, why="desktop is not heard")
OFF = Observation(running(membership=keeper("training", 2, "desktop", "laptop")), silent=700.0)
DEAD = running(
    state="crashed", error="its keeper ended by signal 9", membership=keeper("training", 2, "desktop", "laptop")
)


@pytest.mark.parametrize("desktop", [OFF, Observation(DEAD, ended=700.0), Observation(running(state="away"))])
def test_field_35_a_host_that_the_others_go_on_without_is_no_failure(desktop: Observation) -> None:
    seen = {"desktop": desktop, "laptop": Observation(running(membership=ALONE))}
    assert verdict("desktop", **seen) is None
    assert verdict("laptop", **seen) is None
    seen["laptop"] = Observation(running(state="finished", membership=ALONE), over="finished")
    assert verdict("laptop", **seen) == "finished"
    assert verdict("desktop", **seen) == "away"
    assert re.search(r"was away since .*, step 9 while the others finished", sentence("desktop", **seen))


def test_field_35_a_keeper_that_waits_is_neither_stalled_nor_crashed() -> None:
    waits = running(membership=WAITS, idle_seconds=60.0, heartbeat_age=60.0, end_reason="error", step_age=60.0)
    seen = {"desktop": Observation(running(), silent=60.0), "laptop": Observation(waits)}
    assert verdict("laptop", **seen) is None
    assert verdict("desktop", **seen) is None


def test_who_waits_for_a_host_without_keeper_is_told_its_name() -> None:
    waits = Observation(running(membership=WAITS, step_age=91.0))
    seen = {"desktop": Observation(DEAD, ended=91.0), "laptop": waits}
    assert verdict("laptop", **seen) == "orphaned"
    assert "waits for desktop, which has lost its keeper" in sentence("laptop", **seen)
    assert verdict("desktop", **seen) == "crashed"
    # The others may do without it, once they have missed it for long enough.
    seen["laptop"] = Observation(running(membership=WAITS, step_age=89.0))
    assert verdict("laptop", **seen) is None
    assert verdict("desktop", **seen) is None


def test_hosts_that_wait_for_a_guest_are_watched_on() -> None:
    states = {"desktop": "idle", "laptop": "resting"}
    seen = {host: Observation(running(membership=keeper(state), step_age=9e9)) for host, state in states.items()}
    assert [verdict(host, **seen) for host in seen] == [None, None]


def test_a_keeper_that_has_just_died_is_not_given_up_before_the_others_miss_it() -> None:
    trains = running(membership=keeper("training", 2, "desktop", "laptop"))
    seen = {"desktop": Observation(DEAD, ended=1.0), "laptop": Observation(trains)}
    assert verdict("desktop", **seen) is None
    assert verdict("laptop", **seen) is None


def test_who_waits_for_a_host_that_is_off_is_given_as_long_as_that_host() -> None:
    seen = {"desktop": OFF, "laptop": Observation(running(membership=WAITS, step_age=500.0))}
    assert verdict("laptop", **seen) is None
    seen["laptop"] = Observation(running(membership=WAITS, step_age=690.0))
    assert verdict("laptop", **seen) == "orphaned"
    assert "waits for desktop, which does not answer" in sentence("laptop", **seen)
    assert verdict("desktop", **seen) == "lost"


def test_a_user_who_stops_all_hosts_left_nobody_away() -> None:
    stopped = running(state="stopped", membership=keeper("stopped", 2), cause="it was stopped")
    seen = {"desktop": Observation(stopped), "laptop": Observation(running(membership=keeper("ending", 2)))}
    assert verdict("desktop", **seen) is None
    seen["laptop"] = Observation(stopped)
    assert verdict("desktop", **seen) == "stopped"
    assert "10 of 100 steps made: it was stopped" in sentence("desktop", **seen)


def test_a_stall_of_those_who_train_ends_watching_everywhere() -> None:
    still = running(membership=keeper("training", 2, "desktop", "laptop"), idle_seconds=90.0)
    seen = {"desktop": Observation(still, over="stalled"), "laptop": Observation(still)}
    assert verdict("laptop", **seen) == "stalled"
    seen["laptop"] = Observation(still, silent=60.0)
    assert verdict("laptop", **seen) == "stalled"


def test_with_the_first_step_of_the_others_a_host_that_is_off_is_away() -> None:
    trains = running(membership=keeper("training", 1, "laptop"))
    off = Observation({"state": None, "step": None}, silent=30.0)
    assert verdict("desktop", True, desktop=off, laptop=Observation(trains, over="started")) == "away"
    assert verdict("desktop", True, desktop=off, laptop=Observation(trains)) is None
