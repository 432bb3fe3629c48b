# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import Patience, Sight, intervals, judge

PATIENCE = Patience(factor=5, minimum=45, timeout=300, lost=600)


def running(**more: Any) -> dict[str, Any]:
    usual = {"state": "running", "step": 9, "done": 10, "steps": 100, "step_seconds": 2.0, "steps_counted": 9}
    return {**EMPTY, **usual, "phase": "sync", "phase_seconds": 1.0, "idle_seconds": 1.0, "heartbeat_age": 0.5, **more}


def verdict(host: str, first_step: bool = False, **sights: Sight) -> str | None:
    found = judge(host, sights, PATIENCE, first_step)
    return found.verdict if found else None


def sentence(host: str, **sights: Sight) -> str:
    found = judge(host, sights, PATIENCE)
    assert found is not None
    return found.sentence


def test_while_all_make_progress_there_is_no_verdict() -> None:
    assert verdict("a", a=Sight(running()), b=Sight(running())) is None


@pytest.mark.parametrize("state", ["finished", "stopped", "crashed"])
def test_an_end_is_an_end_whatever_the_others_do(state: str) -> None:
    assert verdict("a", a=Sight(running(state=state)), b=Sight(running())) == state


def test_a_crash_is_told_with_code_place_and_error() -> None:
    said = sentence("a", a=Sight(running(state="crashed", exit_code=1, error="rank 1 did not come")))
    assert said == "crashed with code 1, 10 of 100 steps made: rank 1 did not come"


def test_field_19_all_standing_still_is_a_stall_named_with_phase_and_time() -> None:
    still = running(idle_seconds=46.0, phase="sync", collective=17)
    assert verdict("a", a=Sight(still), b=Sight(still)) == "stalled"
    assert "46 s in phase sync (collective 17)" in sentence("a", a=Sight(still), b=Sight(still))


def test_one_that_still_moves_is_no_stall() -> None:
    still = running(idle_seconds=500.0)
    assert verdict("a", a=Sight(still), b=Sight(running())) is None


def test_waiting_for_an_evaluation_a_sample_or_a_save_is_no_stall() -> None:
    still = running(idle_seconds=200.0)
    for phase in ("eval", "sample", "save"):
        assert verdict("b", a=Sight(running(phase=phase, idle_seconds=200.0)), b=Sight(still)) is None
        gone = Sight(running(phase=phase, idle_seconds=901.0))
        assert verdict("b", a=gone, b=Sight(running(idle_seconds=901.0))) == "stalled"


def test_slow_steps_are_given_five_of_their_own() -> None:
    slow = running(step_seconds=72.0, idle_seconds=300.0)
    assert verdict("a", a=Sight(slow), b=Sight(slow)) is None
    longer = running(step_seconds=72.0, idle_seconds=361.0)
    assert verdict("a", a=Sight(longer), b=Sight(longer)) == "stalled"


def test_the_first_steps_are_given_twice_the_minimum() -> None:
    starting = running(step=None, done=0, step_seconds=None, steps_counted=0, idle_seconds=80.0)
    assert verdict("a", a=Sight(starting)) is None
    assert verdict("a", a=Sight({**starting, "idle_seconds": 91.0})) == "stalled"


def test_field_19_a_frozen_process_gives_no_sign_of_life() -> None:
    frozen = running(heartbeat_age=50.0, idle_seconds=50.0)
    waiting = running(idle_seconds=49.0)
    assert verdict("a", a=Sight(frozen), b=Sight(waiting)) == "stalled"
    assert "no sign of life for 50 s" in sentence("a", a=Sight(frozen), b=Sight(waiting))


@pytest.mark.parametrize("phase", ["eval", "save", "forward_backward"])
def test_field_19_where_one_gives_no_sign_of_life_the_others_are_not_given_their_usual_time(phase: str) -> None:
    frozen = running(heartbeat_age=50.0, idle_seconds=50.0, step_seconds=72.0)
    others = running(phase=phase, idle_seconds=40.0, step_seconds=72.0)
    assert verdict("a", a=Sight(frozen), b=Sight(others)) is None
    later = {**others, "idle_seconds": 46.0}
    assert verdict("a", a=Sight(frozen), b=Sight(later)) == verdict("b", a=Sight(frozen), b=Sight(later)) == "stalled"
    assert verdict("b", a=Sight(running(), unreachable=21), b=Sight(later)) == "stalled"


def test_a_trainer_without_signs_of_progress_is_never_called_stalled() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None)
    assert verdict("a", a=Sight(mute, age=10000)) is None


def test_a_rank_that_waits_for_a_crashed_one_is_given_up_after_its_grace() -> None:
    crashed = running(state="crashed", exit_code=1)
    assert verdict("a", a=Sight(running()), b=Sight(crashed, ended=5)) is None
    assert verdict("a", a=Sight(running()), b=Sight(crashed, ended=21)) == "orphaned"
    assert "waits for b, which crashed" in sentence("a", a=Sight(running()), b=Sight(crashed, ended=21))


def test_a_host_out_of_reach_is_given_time() -> None:
    assert verdict("a", a=Sight(running(), unreachable=500)) is None
    assert verdict("a", a=Sight(running(), unreachable=601)) == "lost"


def test_field_12_a_host_out_of_reach_while_the_others_go_on_is_given_time() -> None:
    away = Sight(running(), unreachable=100)
    assert verdict("a", a=away, b=Sight(running())) is None
    assert verdict("b", a=away, b=Sight(running())) is None


def test_field_19_a_host_out_of_reach_that_the_others_miss_is_no_matter_of_ten_minutes() -> None:
    away, still = Sight(running(), unreachable=21), Sight(running(idle_seconds=46.0))
    assert verdict("a", a=away, b=still) == verdict("b", a=away, b=still) == "stalled"
    assert "cannot be reached for 21 s, and the others stand still" in sentence("a", a=away, b=still)


def test_field_20_a_rank_that_waits_at_the_rendezvous_for_a_host_out_of_reach() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None)
    away = Sight(running(), unreachable=30)
    assert verdict("b", a=away, b=Sight(mute, age=10)) is None
    assert "waits for a, which cannot be reached" in sentence("b", a=away, b=Sight(mute, age=46))


def test_nothing_started_is_said_after_a_minute() -> None:
    prepared = running(state="prepared", step=None)
    assert verdict("a", a=Sight(prepared, age=10)) is None
    assert verdict("a", a=Sight(prepared, age=61)) == "missing"


def test_field_20_ranks_that_never_meet_are_told_before_their_timeout() -> None:
    mute = running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None)
    patience = PATIENCE._replace(mute=75)
    assert judge("a", {"a": Sight(mute, age=70), "b": Sight(mute, age=76)}, patience) is None
    assert judge("a", {"a": Sight(mute, age=76), "b": Sight(running(), age=76)}, patience) is None
    found = judge("a", {"a": Sight(mute, age=76), "b": Sight(mute, age=76)}, patience)
    assert found is not None and "waits at the rendezvous" in found.sentence


def test_field_20_a_rank_that_waits_for_one_that_was_never_started() -> None:
    prepared = running(state="prepared", step=None)
    assert verdict("a", a=Sight(running(), age=50), b=Sight(prepared, age=50)) is None
    assert verdict("a", a=Sight(running(), age=61), b=Sight(prepared, age=61)) == "orphaned"
    assert "b, where nothing was started" in sentence("a", a=Sight(running(), age=61), b=Sight(prepared, age=61))


def test_a_trainer_that_will_speak_has_not_started_before_it_did() -> None:
    mute = {
        "a": Sight(running(phase=None, phase_seconds=None, idle_seconds=None, heartbeat_age=None, step=None), age=61)
    }
    found = judge("a", mute, PATIENCE, first_step=True)
    assert found and found.verdict == "started"
    assert judge("a", mute, PATIENCE._replace(mute=75), first_step=True) is None


def test_with_the_first_step_watching_is_over_if_that_is_wanted() -> None:
    before = running(step=None, done=0, step_seconds=None, idle_seconds=5.0)
    assert verdict("a", True, a=Sight(before)) is None
    assert verdict("a", True, a=Sight(running(step=0))) == "started"


def test_looks_become_rarer_in_a_long_run() -> None:
    assert intervals(0)["at_least"] == 3
    assert intervals(86400)["at_least"] == 20
    assert all(intervals(t)["timeout"] > intervals(t)["at_least"] for t in (0, 100, 10000))
