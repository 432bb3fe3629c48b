# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import membership_view
from ansible_collections.nanochat.ddp.plugins.module_utils._run.table import closing_table, status_table
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import away, keeper, run_of


def told(**runs: dict[str, Any]) -> str:
    return "\n".join(membership_view.lines(runs))


def status(**runs: dict[str, Any]) -> str:
    return status_table([{"host": host, "run": {**run, "run": "d4"}} for host, run in runs.items()])


TOGETHER = keeper("training", 2, "desktop", "laptop")
SPLIT = {
    "desktop": run_of(keeper("training", 6, "desktop", away=[away("laptop", step=1900)]), done=2200),
    "laptop": run_of(keeper("training", 7, "laptop", away=[away("desktop", step=1890)]), done=2212),
}


def test_a_guest_that_is_away_says_since_when_why_and_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_view, "clock_text", lambda time: "14:02" if time == 1.6e9 else "later")
    rests = run_of(keeper("resting", 2, why="on battery; back when plugged in", rests_since=1.6e9))
    said = status(desktop=run_of(keeper("training", 3, "desktop")), laptop=rests)
    assert "laptop: away since 14:02, on battery; back when plugged in" in said
    assert [line.split()[1] for line in said.splitlines() if line.split()[:1] == ["laptop"]] == ["away"]


def test_two_parts_that_train_apart_are_told_as_two_models() -> None:
    assert [part.members for part in membership_view.parts(SPLIT)] == [("laptop",), ("desktop",)]
    said = told(**SPLIT)
    assert "laptop (2212 steps) and desktop (2200 steps) train apart: two models" in said
    assert "waits" not in said
    assert "slow one" not in status(**SPLIT)


def test_a_look_that_was_too_early_is_no_part_apart() -> None:
    runs = {"desktop": run_of(keeper("training", 6, "desktop")), "laptop": run_of(TOGETHER)}
    assert [part.members for part in membership_view.parts(runs)] == [("desktop",)]


def test_who_gave_way_is_told_with_where_its_steps_are() -> None:
    why = "its checkpoints since step 1900 are kept in apart/generation-6"
    word = {**TOGETHER, "gave_way": [{"time": 1.7e9, "host": "desktop", "why": why}]}
    runs = {"desktop": run_of(word), "laptop": run_of(TOGETHER)}
    line = f", because others had made more steps; {why}\n"
    assert line in told(**runs) + "\n"
    assert line in closing_table([{"host": host, "run": run} for host, run in runs.items()]) + "\n"


def test_a_dead_keeper_is_named_by_itself_and_by_who_waits_for_it() -> None:
    dead = run_of(TOGETHER, state="crashed", exit_code=137, error="its keeper ended with code 137")
    said = status(desktop=run_of(keeper("idle", 2, why="laptop is not heard")), laptop=dead)
    assert "no keeper" in said
    assert "laptop has lost its keeper: its keeper ended with code 137; `ansible-playbook nanochat.ddp.join" in said
    assert "desktop waits for laptop, which has lost its keeper" in said
    # What it said last was true before it died.
    assert "is being readmitted" not in told(desktop=run_of(keeper("training", 3, "desktop")), laptop=dead)


@pytest.mark.parametrize(
    ("laptop", "words"),
    [
        (None, "waits for laptop, which does not answer"),
        (run_of(None, state="prepared"), "waits for laptop, where nothing was started"),
        (run_of(keeper("idle", 1)), "which cannot be heard although its keeper runs"),
    ],
)
def test_for_whom_a_keeper_waits(laptop: dict[str, Any] | None, words: str) -> None:
    runs = {"desktop": run_of(keeper("idle", 2)), **({"laptop": laptop} if laptop else {})}
    assert words in membership_view.reason("desktop", runs)


def test_what_a_keeper_says_of_its_waiting_is_told() -> None:
    word = keeper("idle", 2, waits="laptop is of another start of the run")
    assert (
        membership_view.reason("desktop", {"desktop": run_of(word)}) == "waits: laptop is of another start of the run"
    )


def test_who_is_to_be_let_in_and_does_not_hear_the_others_is_told_so() -> None:
    runs = {"desktop": run_of(keeper("training", 3, "desktop")), "laptop": run_of(keeper("idle", 2))}
    assert membership_view.reason("laptop", runs) == "is being readmitted by desktop, but does not hear desktop"
    runs["laptop"] = run_of(keeper("idle", 2, hears=["desktop"]))
    assert membership_view.reason("laptop", runs) == "is being readmitted by desktop"
    runs["laptop"] = run_of(keeper("idle", 2, waits="desktop is of another start of the run"))
    waits = "is being readmitted by desktop, but desktop is of another start of the run"
    assert membership_view.reason("laptop", runs) == waits


def test_the_reason_for_which_all_gave_up_is_told_once() -> None:
    why = "the run died 4 times within an hour, and ddp_restarts is 3"
    ends = {"state": "crashed", "end_error": "rank 0 or its host is gone", "end_cause": "store-lost"}
    desktop = run_of(keeper("failed", 5, "desktop", why=why), error=why, **ends)
    heard = f"desktop gave up: {why}"
    laptop = run_of(keeper("failed", 5, why=heard, since=1.7e9 + 1), error=heard, **ends)
    said = status(desktop=desktop, laptop=laptop)
    assert said.count(why) == 1
    assert f"desktop, laptop gave up: {why}" in said
    assert "rank 0 or its host" not in said


@pytest.mark.parametrize(
    ("state", "word", "words"),
    [
        ("stopped", keeper("stopped", 2, why="laptop was stopped"), "desktop was stopped: laptop was stopped"),
        ("stopped", keeper("stopped", 2), "desktop was stopped by a user"),
        ("away", keeper("left", 2), "desktop was removed by hand"),
        ("away", keeper("away", 2), "desktop shut down"),
        ("away", keeper("finished", 2, why="laptop has finished"), "desktop was away when the run finished"),
        ("away", keeper("training", 2, "desktop"), "desktop shut down"),
        ("finished", keeper("finished", 2), ""),
    ],
)
def test_why_it_ended_on_a_host(state: str, word: dict[str, Any], words: str) -> None:
    said = told(desktop=run_of(word, state=state, cause=word["why"]))
    assert said.startswith(words) if words else said == ""


def test_a_keeper_that_was_started_again_is_told() -> None:
    said = told(desktop=run_of(TOGETHER, revived=2, died_of="signal 9"), laptop=run_of(TOGETHER))
    assert "the keeper of desktop was restarted 2 times; it last died of signal 9" in said


def test_the_error_that_a_rank_only_heard_of_is_not_told_in_its_name() -> None:
    ended = {"state": "crashed", "exit_code": 1}
    heard = run_of(None, rank=0, error="rank 1 is gone", end_cause="peer-lost", end_blames=[1], **ended)
    own = run_of(None, rank=1, error="the disk has 3 MB left", end_cause="disk-full", end_blames=[1], **ended)
    assert membership_view.own_errors({"desktop": heard, "laptop": own}) == {"laptop": "the disk has 3 MB left"}
    assert membership_view.own_errors({"desktop": heard}) == {"desktop": "rank 1 is gone"}


def test_a_rank_that_makes_no_step_is_told_with_the_time_and_without_a_speed() -> None:
    still = run_of(None, step_age=35.0, tokens_per_second=14570.0, phase="sync")
    said = status(desktop=still)
    assert "no step for 35 s (sync)" in said and "14570" not in said
    assert "no step" not in status(desktop=run_of(None, step_age=35.0, step_seconds=20.0))
