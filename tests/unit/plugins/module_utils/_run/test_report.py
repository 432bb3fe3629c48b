# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import report
from ansible_collections.nanochat.ddp.plugins.module_utils._run.collected import load_run
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.fake_run import collected

PAGE = str(Path(__file__).resolve().parents[5] / "roles" / "collect" / "files")
# What the role tells the verb.
ABOUT: dict[str, Any] = {"found": {}, "brought": {"node1": {"run": "d4"}}, "run": "d4", "page": PAGE, "compare": ""}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return collected(tmp_path)


def data_of(page: str) -> dict[str, Any]:
    embedded = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert embedded is not None
    found: dict[str, Any] = json.loads(embedded[1])
    return found


def report_data(*runs: Path, **more: Any) -> dict[str, Any]:
    return data_of(report.make_report(list(map(str, runs)), PAGE, **more))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def append(path: Path, *events: dict[str, Any]) -> None:
    write_lines(path, [*lines_of(path), *events])


def test_every_figure_of_every_step_is_in_the_page_as_it_was_written(run: Path) -> None:
    data = report_data(run)
    assert data["model"] == "depth 4, 7,340,162 parameters"
    for rank in (0, 1):
        events = lines_of(run / f"node{rank + 1}" / f"metrics-rank{rank}.jsonl")
        steps = [event for event in events if event["kind"] == "step"]
        columns = data["ranks"][rank]["columns"]
        assert columns["step"] == list(range(40))
        for name in report.COLUMNS:
            assert columns[name] == [step[name] for step in steps], name
        summary = data["ranks"][rank]["summary"]
        assert summary["loss"] == steps[-1]["loss"]
        assert summary["wait_seconds"] == pytest.approx(sum(step["wait_seconds"] for step in steps[1:]))


def test_nothing_in_the_data_can_end_the_script_or_reach_out(run: Path) -> None:
    sample = {"kind": "sample", "time": 1.0, "step": 1, "prompt": "</script><img src=x>", "text": "<!--"}
    append(run / "node1" / "metrics-rank0.jsonl", sample)
    page = report.make_report([str(run)], PAGE)
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert not re.search(r"\b(src|href)=[\"']|https?://(?!www.w3.org)", page)
    assert data_of(page)["ranks"][0]["samples"][-1]["prompt"] == "</script><img src=x>"


def test_steps_made_again_after_a_restart_count_once() -> None:
    first = [fake_run.start_event(0, 1, 10, 1.0), *(fake_run.step_event(n, 0, n) for n in range(6))]
    again = [fake_run.step_event(n, 0, 100 + n) for n in range(4, 10)]
    steps = report.made_steps([*first, fake_run.start_event(0, 1, 10, 50.0, resumed=4), *again])
    assert [step["step"] for step in steps] == list(range(10))
    assert [step["time"] for step in steps][3:6] == [3, 104, 105]
    fresh = report.made_steps([*first, fake_run.start_event(0, 1, 10, 60.0), fake_run.step_event(0, 0, 61.0)])
    assert [step["time"] for step in fresh] == [61.0]


@pytest.mark.parametrize("over", [True, False])
def test_end_of_a_run_with_a_budget_is_said(tmp_path: Path, over: bool) -> None:
    run = collected(tmp_path, hosts=("node1",))
    metrics = run / "node1" / "metrics-rank0.jsonl"
    events = lines_of(metrics) if over else lines_of(metrics)[:-1]
    timed = {"start": {"ends": events[-1]["time"] + 60}, "step": {"share": 0.612}, "eval": {"share": 0.5}}
    write_lines(metrics, [{**event, **timed.get(event["kind"], {})} for event in events])
    said = report_data(run)["sentences"]
    if over:
        assert len(said) == 1 and re.fullmatch(r"ended at 20.*, 1 min 00 s early, of a budget", said[0])
    else:
        assert re.fullmatch(r"ends at 20.*, 61 % done", said[0])


def test_a_missing_rank_and_a_crash_are_said(run: Path) -> None:
    for path in (run / "node2").rglob("*.js*"):
        path.unlink()
    fake_run.write_json(run / "node1" / "session.json", fake_run.session_of(0, 1.7e9, ended=1.7e9 + 9, exit_code=1))
    metrics = run / "node1" / "metrics-rank0.jsonl"
    write_lines(metrics, lines_of(metrics)[:-1])
    (run / "node1" / "log" / "rank0.log").write_text("RuntimeError: Connection closed by peer\n")
    data = report_data(run)
    assert data["identical"] is None and data["notices"][0].startswith("node2 is part of the plan, but nothing")
    assert data["ranks"][0]["summary"]["end"].startswith("crashed with code 1, 40 of 40 steps made: RuntimeError: Conn")
    assert data["ranks"][0]["lines"] == ["RuntimeError: Connection closed by peer"]


def test_a_run_that_goes_on_and_one_without_metrics_have_a_page(tmp_path: Path) -> None:
    run = collected(tmp_path, hosts=("node1",))
    metrics = run / "node1" / "metrics-rank0.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:20]) + '{"kind": "st')
    fake_run.write_json(run / "node1" / "session.json", fake_run.session_of(0, 1.7e9))
    assert report_data(run)["ranks"][0]["summary"]["end"].startswith("still running")
    metrics.unlink()
    data = report_data(run)
    assert data["ranks"][0]["columns"] == {"step": []}


def test_happenings_go_by_time_with_findings_first(tmp_path: Path) -> None:
    run = collected(tmp_path, steps=10)
    finding = {"code": "slow-link", "host": "node2", "severity": "warning", "seen": "100 Mbit/s"}
    fake_run.write_json(run / "rehearsal.json", {"run": "d4", "findings": [finding, finding], "prediction": {}})
    found = report_data(run)["happenings"]
    assert (found[0]["text"], found[0]["severity"]) == ("slow-link: 100 Mbit/s", "warning")
    assert [one["text"] for one in found].count("slow-link: 100 Mbit/s") == 1
    times = [one["time"] for one in found[1:]]
    assert times == sorted(times)
    first = next(one["text"] for one in found if one["host"] == "node1")
    assert first == "started"


def test_what_the_start_said_and_how_often_the_data_were_read_is_in_the_report(tmp_path: Path) -> None:
    run = collected(tmp_path, steps=5)
    for rank, host in enumerate(("node1", "node2")):
        again = {**fake_run.start_event(rank, 2, 9, 1.7e9 + 50, resumed=3), "notices": ["Step 4 is damaged"]}
        append(run / host / f"metrics-rank{rank}.jsonl", again)
        append(run / host / f"metrics-rank{rank}.jsonl", {**fake_run.step_event(3, rank, 1.7e9 + 51), "epoch": 2})
    data = report_data(run)
    assert data["sentences"] == ["Step 4 is damaged", "epoch 2: all data were read 1 time before"]
    told = [one for one in data["happenings"] if one["text"] == "Step 4 is damaged"]
    assert [(one["severity"], one["step"]) for one in told] == [("warning", 3)]


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_a_host_that_left_is_no_rank_any_more_and_a_changed_rank_is_the_new_one(tmp_path: Path, host: str) -> None:
    run = collected(tmp_path / "runs")
    # One host goes on alone, as rank 0; the other one's folder is of before, and that of node2 has the figures of both its ranks.
    plan = fake_run.plan_for([run / host], 60)
    plan["nodes"][0]["host"] = host
    fake_run.write_json(run / host / "plan.json", plan)
    fake_run.write_history(run / host, fake_run.history(0, 1, 60, 9e8), 0)
    fake_run.write_json(run / host / "session.json", fake_run.session_of(0, 4e9, ended=4e9 + 5, exit_code=0))
    loaded = load_run(str(run))
    assert [(rank.host, rank.files.rank) for rank in loaded.ranks] == [(host, 0)]
    assert report.made_steps(loaded.ranks[0].files.events)[-1]["step"] == 59


def test_who_left_and_came_back_is_among_what_happened(run: Path) -> None:
    at = 1.7e9
    both = {"what": "training", "members": ["node1", "node2"]}
    story = [
        {"time": at, **both, "generation": 1},
        {"time": at + 5, "what": "ending", "why": "node2 is not heard"},
        {"time": at + 6, "what": "training", "members": ["node1"], "generation": 2},
        {"time": at + 9, **both, "generation": 3},
    ]
    write_lines(run / "node1" / "members.jsonl", story)
    found = [(one["time"], one["host"], one["text"]) for one in report_data(run)["happenings"]]
    assert [one for one in found if re.search("generation|in the run|left", one[2])] == [
        (at + 5, "node2", "left the run (node2 is not heard)"),
        (at + 9, "node2", "back in the run"),
    ]


def test_all_checkpoints_of_a_rank_are_one_line(tmp_path: Path) -> None:
    run = collected(tmp_path, steps=5)
    metrics = run / "node1" / "metrics-rank0.jsonl"
    save = {"kind": "checkpoint", "bytes": 24e6, "seconds": 0.2}
    saves = [{**save, "time": 1.7e9 + 10 + n, "step": 10 * n} for n in range(86)]
    broken = [{"kind": "end", "time": 1.7e9 + 50.5, "step": 405, "reason": "error", "error": "rank 1 is gone"}]
    again = [fake_run.start_event(0, 2, 1000, 1.7e9 + 50.7, resumed=400)]
    events = sorted([*lines_of(metrics)[:-1], *saves, *broken, *again], key=lambda event: event["time"])
    write_lines(metrics, events)
    data = report_data(run)
    happened = [one for one in data["happenings"] if one["time"] and one["time"] > 1.7e9 + 9]
    assert [one["text"] for one in happened] == [
        "error: rank 1 is gone (and was restarted)",
        "started again from step 400",
        f"{len(data['ranks'][0]['checkpoints'])} checkpoints; the last: 24.0 MB in 0.2 s",
    ]
    # An error that was survived is none of the run's.
    assert [(one["severity"], one["kind"]) for one in happened[:2]] == [("warning", "warning"), ("info", "start")]
    assert len(data["ranks"][0]["checkpoints"]) > 86


def test_a_start_that_had_nothing_to_do_leaves_the_figures_of_the_one_before(run: Path) -> None:
    before = report_data(run)
    end = {"kind": "end", "time": 1.7e9 + 301, "step": 40, "reason": "finished", "identical": None}
    append(run / "node1" / "metrics-rank0.jsonl", fake_run.start_event(0, 2, 40, 1.7e9 + 300, resumed=40), end)
    after, figures = report_data(run), before["ranks"][0]["summary"]
    assert figures["tokens_per_second_mean"] and figures["rows"] and before["identical"] and after["identical"]
    assert after["ranks"][0]["summary"] == figures


def test_why_a_run_was_given_up_stands_in_the_report(run: Path) -> None:
    why = "the run died 4 times within an hour, and ddp_restarts is 3"
    for rank, told in enumerate((why, f"node1 gave up: {why}")):
        folder = run / f"node{rank + 1}"
        word = {"what": "failed", "why": told, "members": ["node1", "node2"], "generation": 4}
        write_lines(folder / "members.jsonl", [{"time": 1.7e9 + 99 + rank, **word}])
        metrics = folder / f"metrics-rank{rank}.jsonl"
        events = lines_of(metrics)
        ended = {**events[-1], "reason": "error", "error": "the rendezvous does not answer"}
        write_lines(metrics, [*events[:-1], ended])
        fake_run.write_json(folder / "session.json", fake_run.session_of(rank, 1.7e9, ended=1.7e9 + 99, exit_code=1))
    data = report_data(run)
    assert data["notices"] == [f"The run was given up: {why}"]
    how = "crashed with code 1, 40 of 40 steps made"
    assert [rank["summary"]["end"] for rank in data["ranks"]] == [f"{how}: {why}", f"{how}: node1 gave up: {why}"]


def test_the_environment_is_not_in_the_page(run: Path) -> None:
    plan = fake_run.plan_for([run / "node1", run / "node2"], 40)
    plan["nodes"][0].update(env={"WANDB_API_KEY": "hunter2"}, argv=["--password=hunter2"])
    fake_run.write_json(run / "node1" / "plan.json", plan)
    assert "hunter2" not in report.make_report([str(run)], PAGE)


def test_predictions_stand_beside_what_was_measured(agent: Any, tmp_path: Path) -> None:
    run = collected(tmp_path)
    expected = {"tokens_per_second": 5000.0, "bytes_sent": 20_000_000, "wait_seconds": {"node1": 0.1, "node2": 0.2}}
    fake_run.write_json(run / "rehearsal.json", {"run": "d4", "findings": [], "prediction": expected})
    said = data_of(Path(agent("report", **ABOUT, dest=str(run.parent))["dest"]).read_text())["compared"]
    assert said.startswith("Expected 5000 tok/s, got 4096 (-18%)") and re.search("node2 +200 ms +150 ms", said), said


def test_new_shares_and_what_each_host_was_worth_are_in_the_page(tmp_path: Path) -> None:
    path = collected(tmp_path)
    for rank, (host, rows) in enumerate((("node1", 6), ("node2", 2))):
        events = fake_run.history(rank, 2, 40, 1.7e9)
        for event in events:
            if event["kind"] == "step":
                event["rows"] = 4 if event["step"] < 20 else rows
        changed = {"rows": [6, 2], "before": [4, 4], "head": [], "before_head": [], "speeds": [0.75, 0.25]}
        at = next(number for number, event in enumerate(events) if event.get("step") == 20)
        events.insert(at, {"kind": "shares", "time": 1.7e9 + 10, "step": 20, **changed, "seconds": 0.5})
        fake_run.write_history(path / host, events, rank)
    data = report_data(path)
    assert [rank["summary"]["rows"] for rank in data["ranks"]] == [6, 2]
    assert data["ranks"][1]["columns"]["rows"] == [4] * 20 + [2] * 20
    told = [one["text"] for one in data["happenings"] if one["text"].startswith("the ranks now")]
    assert told == ["the ranks now take 6, 2 rows (before: 4, 4)"]


def test_it_is_written_once(agent: Any, tmp_path: Path) -> None:
    page = collected(tmp_path) / "report.html"
    options = {**ABOUT, "dest": str(page.parents[1])}
    assert str(page) in agent("report", check=True, **options)["show"] and not page.exists()
    assert agent("report", **options)["changed"] is True and page.exists()
    assert agent("report", **options)["changed"] is False
