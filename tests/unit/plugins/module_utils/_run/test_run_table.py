# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import table as run_table
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import Seen
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line, regrouped
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.plugin_utils._runs import why_no_answer
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import keeper


def row(
    host: str, rank: int | None, verdict: str | None = None, looked: float = 0.0, age: float = 0.0, **more: Any
) -> Seen:
    usual = {"state": "running", "run": "d4", "rank": rank, "world": 2, "step": 4, "done": 5, "steps": 10, "loss": 5.25}
    means = {"first_loss": 8.0, "wait_seconds": 2.0, "wait_share": 0.1, "steps_counted": 4}
    speeds = {"tokens_per_second": 2000.0, "tokens_per_second_mean": 1900.0}
    run = {**EMPTY, **usual, **means, **speeds, **more}
    return Seen(host, run, verdict=verdict, looked=looked, age=age)


def with_run(one: Seen, **more: Any) -> Seen:
    return one._replace(run={**one.run, **more})


def finished(**more: Any) -> list[Seen]:
    both = {"state": "finished", "done": 10, "identical": True, "digest": "abcdef", **more}
    return [row("b", 1, **both), row("a", 0, val_bpb=1.25, **both)]


def test_what_the_start_said_and_how_often_the_data_were_read_is_told_once() -> None:
    rows = [row(host, rank, notices=["Step 5 is damaged"], epoch=3) for rank, host in enumerate("ab")]
    told = ["  Step 5 is damaged", "  epoch 3: all data were read 2 times before"]
    assert run_table.status_screen(rows).splitlines()[-2:] == told
    rows = [with_run(one, state="finished") for one in rows]
    assert [line for line in run_table.status_screen(rows).splitlines() if line in told] == told
    assert "epoch" not in run_table.status_screen([row("a", 0, epoch=1)])


def test_field_21_weights_that_differ_are_said_to() -> None:
    differing = finished()
    differing[0] = with_run(differing[0], digest="123456")
    assert "weights NOT identical on both ranks" in run_table.status_screen(differing)
    assert "weights not compared" in run_table.status_screen(finished()[:1])


def test_field_17_the_slow_one_is_the_one_that_waits_least() -> None:
    rows = [row("fast", 0, wait_share=0.4), row("slow", 1, wait_share=0.02)]
    assert "slow one: slow" in run_table.status_screen(rows)
    assert run_table.status_data(rows)["slowest"] == "slow"
    rows[1] = with_run(rows[1], wait_share=0.39)
    assert run_table.status_data(rows)["slowest"] is None


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (
            {"timedout": {"period": 25}, "msg": "Timed out"},
            "it did not answer within 25 s; check that it is on and not frozen",
        ),
        ({"failed": True, "msg": "the folder is of another user\ndetails"}, "the folder is of another user"),
        ({"unreachable": True}, "it did not answer"),
    ],
)
def test_why_a_host_did_not_answer_is_said_in_one_line(result: dict[str, object], why: str) -> None:
    assert why_no_answer(result) == why


def test_the_live_line_goes_by_the_slowest_rank_and_tells_all_shares() -> None:
    rows = [row("a", 0, done=6, eta_seconds=90.0), row("b", 1, done=5, wait_share=0.33)]
    words = "step 5/10  loss 5.2500  2000 tok/s  waited a 10 %, b 33 %  1 min 30 s left"
    assert live_line(rows) == words
    assert live_line(rows, len(words) + 12, unicode=False) == words
    assert live_line(rows, len(words) + 12) == "█████░░░░░  " + words
    assert live_line(rows, 300).startswith("█" * 15 + "░" * 15 + "  step")


def test_no_step_is_shown_beyond_the_last_where_a_host_was_seen_before_the_run_got_more() -> None:
    rows = [row("a", 0, step=None, done=60, steps=60), row("b", 1, step=60, done=61, steps=120)]
    assert "step 61/120  loss" in live_line(rows, 60)


def member(state: str, generation: int, *members: str, why: str = "") -> dict[str, Any]:
    return keeper(state, generation, *members, why=why, hosts=["a", "b"])


def test_the_live_line_says_why_no_rank_runs_while_keepers_start_them_again() -> None:
    died = member("idle", 1, "a", "b", why="the rank of b died")
    rows = [row("a", 0, membership=died), row("b", 1, membership=member("offered", 2, "a", "b"))]
    assert live_line(rows).startswith("step 5/10, starting again (the rank of b died)  loss")
    rows = [row("a", 0, membership=member("idle", 1, "a", "b", why="b is not heard"))]
    assert live_line(rows).startswith("step 5/10, waiting for hosts (b is not heard)  loss")
    again = {"membership": member("training", 2, "a", "b")}
    rows = [row("a", 0, phase="resume", phase_seconds=2.0, step_age=9.0, **again), row("b", 1, **again)]
    assert "loading the model for 2 s" in live_line(rows)


def test_a_generation_that_follows_another_is_told_once() -> None:
    rows = [row("a", 0, membership=member("training", 1, "a", "b"))]
    assert regrouped(rows, 1) == (1, "")
    rows[0] = with_run(rows[0], membership=member("ending", 1, "a", "b", why="b is not heard"))
    assert regrouped(rows, 1) == (1, "")
    rows[0] = with_run(rows[0], membership=member("training", 2, "a", why="b is not heard"))
    number, line = regrouped(rows, 1)
    assert number == 2 and re.fullmatch(r".*\d\d:\d\d  generation 2: a \(b is not heard\)", line)
    assert regrouped(rows, 2) == (2, "")
    rows.append(row("b", 1, membership=member("training", 3, "b")))
    assert "b (5 steps) and a (5 steps) train apart: two models" in regrouped(rows, 2)[1]
    assert regrouped([row("a", 0)], 1) == (1, "")


def test_a_narrow_live_line_leaves_out_what_matters_least() -> None:
    rows = [row("a", 0, eta_seconds=90.0), row("b", 1, wait_share=0.33)]
    widths = range(len("step 5/10"), 120)
    lines = {width: live_line(rows, width) for width in widths}
    assert all(len(line) <= width for width, line in lines.items())
    assert live_line(rows, 60) == "step 5/10  loss 5.2500  2000 tok/s  1 min 30 s left"
    assert live_line(rows, 40) == "step 5/10  loss 5.2500  1 min 30 s left"
    assert live_line(rows, 12) == "step 5/10"


@pytest.mark.parametrize(
    ("run", "age", "text"),
    [
        ({"step_age": 0.5, "step_seconds": 0.3}, 1.0, "step 5/10  "),
        ({"step_age": 0.5, "step_seconds": 60.0}, 0.0, "step 5/10, 0 s ago  "),
        ({"step_age": 0.5, "step_seconds": 60.0}, 42.0, "step 5/10, 42 s ago  "),
        ({"step_age": 0.5, "step_seconds": 60.0}, 80.0, "step 5/10, 1 min 20 s ago  "),
        # Looked at too long ago to know of newer steps.
        ({"step_age": 0.5, "step_seconds": 0.3}, 20.0, "step 5/10, seen 20 s ago  "),
        # Looked for news since, and there was none.
        ({"step_age": 0.5, "step_seconds": 0.3}, 40.0, "step 5/10, 40 s ago  "),
        ({"step_age": 4.0, "phase": "eval", "phase_seconds": 3.9}, 1.0, "step 5/10, evaluating for 4 s  "),
        ({"step_age": 4.0, "phase": "sync", "phase_seconds": 3.9}, 1.0, "step 5/10, 5 s ago  "),
    ],
)
def test_the_live_line_counts_the_seconds_of_a_long_step(run: dict[str, Any], age: float, text: str) -> None:
    rows = [row("a", 0, looked=age, **run), row("b", 1, looked=age, **run)]
    assert live_line(rows).startswith(text)


def test_before_the_first_step_the_phases_are_told() -> None:
    rows = [row("a", 0, step=None, phase="rendezvous"), row("b", None, step=None, state="prepared")]
    assert live_line(rows) == "starting: a waiting for the others; b prepared"
    rows = [
        row(host, rank, step=None, phase="sync", checkpoint=None, done=0, age=61.0) for rank, host in enumerate("ab")
    ]
    assert live_line(rows) == "starting for 1 min 01 s: a, b making a step"


def test_the_live_line_is_that_of_those_who_train() -> None:
    trains = member("training", 3, "a")
    rows = [row("a", 0, membership=trains, step=8, done=9), row("b", 1, membership=member("idle", 2), step=2, done=3)]
    assert live_line(rows).startswith("step 9/10")
    rows[1] = with_run(rows[1], membership=member("training", 4, "b"))
    assert live_line(rows).startswith("step 3/10")


def test_a_narrow_screen_gets_the_table_in_blocks() -> None:
    rows = finished()
    told = run_table.status_screen
    wide, narrow = (
        [line for line in told(rows, width).splitlines() if line.split()[0] in ("host", "a", "b")] for width in (0, 34)
    )
    assert max(map(len, wide)) > 34 >= max(map(len, narrow))
    assert set(" ".join(wide).split()) == set(" ".join(narrow).split())
    assert told(rows, 200) == told(rows)
