# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import sentences
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import Health
from ansible_collections.nanochat.ddp.plugins.module_utils._run.table import status_screen
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import keeper, run_of, seen_of


def told(**runs: dict[str, Any]) -> str:
    return "\n".join(sentences.membership_lines(Health(seen_of(**runs))))


def status(**runs: dict[str, Any]) -> str:
    return status_screen(seen_of(**{host: {**run, "run": "d4"} for host, run in runs.items()}))


def reason(host: str, runs: dict[str, dict[str, Any]]) -> str:
    return sentences.reason(Health(seen_of(**runs)), host)


TOGETHER = keeper("training", 2, "desktop", "laptop")


def test_a_look_that_was_too_early_is_no_part_apart() -> None:
    seen = seen_of(desktop=run_of(keeper("training", 6, "desktop")), laptop=run_of(TOGETHER))
    assert [part.members for part in Health(seen).parts] == [("desktop",)]


@pytest.mark.parametrize(
    ("laptop", "words"),
    [
        (None, "waits for laptop, which does not answer"),
        (run_of(keeper("idle", 1)), "which cannot be heard although its keeper runs"),
    ],
)
def test_for_whom_a_keeper_waits(laptop: dict[str, Any] | None, words: str) -> None:
    runs = {"desktop": run_of(keeper("idle", 2)), **({"laptop": laptop} if laptop else {})}
    assert words in reason("desktop", runs)


def test_who_is_to_be_let_in_and_does_not_hear_the_others_is_told_so() -> None:
    runs = {"desktop": run_of(keeper("training", 3, "desktop")), "laptop": run_of(keeper("idle", 2))}
    assert reason("laptop", runs) == "is being readmitted by desktop, but does not hear desktop"
    runs["laptop"] = run_of(keeper("idle", 2, hears=["desktop"]))
    assert reason("laptop", runs) == "is being readmitted by desktop"
    runs["laptop"] = run_of(keeper("idle", 2, waits="desktop is of another start of the run"))
    waits = "is being readmitted by desktop, but desktop is of another start of the run"
    assert reason("laptop", runs) == waits


@pytest.mark.parametrize(
    ("state", "word", "words"),
    [
        ("stopped", keeper("stopped", 2, why="laptop was stopped"), "desktop was stopped: laptop was stopped"),
        ("away", keeper("away", 2), "desktop shut down"),
        ("away", keeper("finished", 2, why="laptop has finished"), "desktop was away when the run finished"),
        ("away", keeper("training", 2, "desktop"), "desktop shut down"),
        ("finished", keeper("finished", 2), ""),
    ],
)
def test_why_it_ended_on_a_host(state: str, word: dict[str, Any], words: str) -> None:
    said = told(desktop=run_of(word, state=state, cause=word["why"]))
    assert said.startswith(words) if words else said == ""


def test_the_restart_of_a_keeper_is_told() -> None:
    revived = run_of(keeper("training", 2, "desktop"), revived=2, died_of="signal 9")
    assert "the keeper of desktop was restarted 2 times; it last died of signal 9" in told(desktop=revived)


def test_the_error_that_a_rank_only_heard_of_is_not_told_in_its_name() -> None:
    ended = {"state": "crashed", "exit_code": 1}
    heard = run_of(None, rank=0, error="rank 1 is gone", end_cause="peer-lost", end_blames=[1], **ended)
    own = run_of(None, rank=1, error="the disk has 3 MB left", end_cause="disk-full", end_blames=[1], **ended)
    assert sentences.own_errors(Health(seen_of(desktop=heard, laptop=own))) == {"laptop": "the disk has 3 MB left"}
    assert sentences.own_errors(Health(seen_of(desktop=heard))) == {"desktop": "rank 1 is gone"}


def test_a_rank_that_makes_no_step_is_told_with_the_time_and_without_a_speed() -> None:
    still = run_of(None, step_age=35.0, tokens_per_second=14570.0, phase="sync")
    said = status(desktop=still)
    assert "no step for 35 s (sync)" in said and "14570" not in said
    assert "no step" not in status(desktop=run_of(None, step_age=35.0, step_seconds=20.0))
