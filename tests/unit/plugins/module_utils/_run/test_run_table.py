# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.filter.run_tables import FilterModule, seen_of
from ansible_collections.nanochat.ddp.plugins.module_utils._run import table as run_table
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import Health, Seen
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line, regrouped
from ansible_collections.nanochat.ddp.plugins.module_utils._run.sentences import state_text
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
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
    assert [line for line in run_table.closing_table(rows).splitlines() if line in told] == told
    assert "epoch" not in run_table.status_screen([row("a", 0, epoch=1)])


def test_a_host_without_which_the_run_finished_is_told_below_the_table() -> None:
    rows = finished(world=2)
    why = "was away since 14:02 while the others finished"
    rows.append(row("c", 2, verdict="away", done=3)._replace(sentence=why))
    told = run_table.closing_table(rows)
    assert "c was away since 14:02 while the others finished" in told
    assert "weights identical on both ranks" in told


def test_field_21_weights_that_differ_are_said_to() -> None:
    differing = finished()
    differing[0] = with_run(differing[0], digest="123456")
    for rows in (finished(identical=False), differing):
        assert "weights NOT identical on both ranks" in run_table.closing_table(rows)
    assert "weights not compared" in run_table.closing_table(finished(identical=None, digest=None))
    assert "weights not compared" in run_table.closing_table(finished()[:1])
    three = [*finished(world=3), row("c", 2, state="finished", identical=True, digest="abcdef", world=3)]
    assert "weights identical on all 3 ranks" in run_table.closing_table(three)


def test_field_17_the_slow_one_is_the_one_that_waits_least() -> None:
    rows = [row("fast", 0, wait_share=0.4), row("slow", 1, wait_share=0.02)]
    assert "slow one: slow" in run_table.status_screen(rows)
    assert run_table.status_data(rows)["slowest"] == "slow"
    rows[1] = with_run(rows[1], wait_share=0.39)
    assert run_table.status_data(rows)["slowest"] is None


def test_a_loss_that_is_no_number_is_said_in_words() -> None:
    rows = [row("a", 0, diverged=True, loss=None)]
    assert "not a number" in run_table.closing_table(rows)
    assert "not a number" in run_table.status_screen(rows)
    assert "not a number" in live_line(rows)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ({"state": "crashed"}, "crashed"),
        ({"state": "running", "heartbeat_age": 100.0}, "no heartbeat for 1 min 40 s"),
        ({"state": "running", "idle_seconds": 100.0, "step_seconds": 2.0, "phase": "sync"}, "stalled for 1 min 40 s"),
        ({"state": "running", "idle_seconds": 100.0, "step_seconds": 2.0, "phase": "eval"}, "running"),
        ({"state": "running", "idle_seconds": 100.0, "step_seconds": 72.0, "phase": "sync"}, "running"),
        ({"state": "running", "idle_seconds": 90000.0, "step_seconds": 2.0, "phase": "sync"}, "stalled since %s"),
        ({"state": "running", "heartbeat_age": 90000.0}, "no heartbeat since %s"),
        ({"state": None}, "not reached"),
    ],
)
def test_states_with_what_one_must_know(run: dict[str, Any], text: str) -> None:
    since = time.strftime("%a %H:%M", time.localtime(time.time() - 90000))
    looked = {**EMPTY, "step": 4, "steps_counted": 3, **run}
    one = Seen("a", looked)
    assert state_text(one, Health([one]).marks().get("a")) == (text % since if "%s" in text else text)


def test_the_status_tells_errors_and_other_runs_and_hosts_out_of_reach() -> None:
    crashed = row("b", 1, state="crashed", exit_code=1, error="rank 0 did not come")
    results = {
        "a": {"run": row("a", 0).run, "newest_run": "d4"},
        "b": {"run": crashed.run, "newest_run": "d4-other"},
        "c": {"unreachable": True, "msg": "Failed to connect\nmore"},
    }
    text = FilterModule().filters()["status_table"](results)
    assert "b: rank 0 did not come" in text
    assert "b: the newest run there is d4-other (-e ddp_run=d4-other shows that one)" in text
    assert "a: the newest run" not in text
    assert "no answer" in text and "run None" not in text
    assert "c: Failed to connect" in text
    data = json.loads(FilterModule().filters()["status_table"](results, True))
    assert data["hosts"]["c"]["reachable"] is False
    assert data["hosts"]["b"]["state"] == "crashed"


def test_the_filters_want_results_by_host() -> None:
    with pytest.raises(AnsibleFilterError, match="dictionary from host to result"):
        seen_of(["a"])


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
    assert FilterModule().filters()["why_no_answer"](result) == why


def test_the_live_line_goes_by_the_slowest_rank_and_tells_all_shares() -> None:
    rows = [row("a", 0, done=6, eta_seconds=90.0), row("b", 1, done=5, wait_share=0.33)]
    words = "step 5/10  loss 5.2500  2000 tok/s  waited a 10 %, b 33 %  1 min 30 s left"
    assert live_line(rows) == words
    assert live_line(rows, len(words) + 12, unicode=False) == "[####....]  " + words
    assert live_line(rows, len(words) + 12) == "█████░░░░░  " + words
    assert live_line(rows, 300).startswith("█" * 15 + "░" * 15 + "  step")


def test_no_step_is_shown_beyond_the_last_where_a_host_was_seen_before_the_run_got_more() -> None:
    rows = [row("a", 0, step=None, done=60, steps=60), row("b", 1, step=60, done=61, steps=120)]
    assert "step 61/120  loss" in live_line(rows, 60)


def test_who_was_seen_before_its_first_step_does_not_set_the_live_line_back() -> None:
    rows = [row("a", 0, step=39, done=40, steps=80), row("b", 1, step=None, done=0, phase="agree", steps=80)]
    assert live_line(rows).startswith("step 40/80")


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
    assert "reading the checkpoint for 2 s" in live_line(rows)


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


def test_the_time_left_goes_down_between_two_looks() -> None:
    assert live_line([row("a", 0, looked=5.0, eta_seconds=90.0)]).endswith("1 min 25 s left")


def test_before_the_first_step_the_phases_are_told() -> None:
    rows = [row("a", 0, step=None, phase="rendezvous"), row("b", None, step=None, state="prepared")]
    assert live_line(rows) == "starting: a waiting for the others; b prepared"
    rows = [
        row(host, rank, step=None, phase="sync", checkpoint=None, done=0, age=61.0) for rank, host in enumerate("ab")
    ]
    assert live_line(rows) == "starting for 1 min 01 s: a, b making the first step"
    # After a restart it is not the first.
    resumed = [with_run(one, checkpoint={"step": 224}) for one in rows]
    assert live_line(resumed) == "starting for 1 min 01 s: a, b making a step"
    saved = {"step": 4, "time": 1.0, "path": "model_000004.pt", "bytes": 1}
    rows = [row("a", 0, step=None, phase="resume"), row("b", 1, step=None, phase="resume", checkpoint=saved)]
    assert live_line(rows) == "starting: a making the model; b reading the checkpoint"


def test_the_live_line_is_that_of_those_who_train() -> None:
    trains = member("training", 3, "a")
    rows = [row("a", 0, membership=trains, step=8, done=9), row("b", 1, membership=member("idle", 2), step=2, done=3)]
    assert live_line(rows).startswith("step 9/10")
    rows[1] = with_run(rows[1], membership=member("training", 4, "b"))
    assert live_line(rows).startswith("step 3/10") and live_line(rows).endswith("a apart")


def test_run_that_has_a_time_to_end_at_says_when_and_how_much_of_it_is_used() -> None:
    timed = {"started": time.time() - 7200, "eta_seconds": 600.0, "share": 0.612, "ends": 1.0}
    rows = [row("a", 0, **timed), row("b", 1, **timed)]
    first = run_table.status_screen(rows).splitlines()[0]
    assert re.fullmatch(r"run d4, began .*, 2 h 00 min ago, ends at .*\d\d:\d\d, 61 % done", first)
    live = live_line([one._replace(looked=5.0) for one in rows])
    assert re.search(r"ends at .*\d\d:\d\d, 61 % done$", live)


def test_a_narrow_screen_gets_the_table_in_blocks_and_its_sentences_in_lines() -> None:
    rows = [with_run(one, notices=["nothing of this sentence may be cut"]) for one in finished()]
    for told in (run_table.status_screen, run_table.closing_table):
        wide, narrow = told(rows), told(rows, 34)
        assert max(map(len, wide.splitlines())) > 34 >= max(map(len, narrow.splitlines()))
        assert sorted(set(wide.split())) == sorted(set(narrow.split()))
        assert [line.split()[0] for line in narrow.splitlines()[1:4]] == ["host", "a", "b"]
        assert told(rows, 200) == wide
