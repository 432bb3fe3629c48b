# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host of a run answers with anything: it has its sentence, the others keep their rows, and nothing ends in a traceback."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.filter.values import status_table
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.evidence import Case, RankEvidence
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.module_utils._run import report
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import Seen, StallLimits
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line, phases_text, regrouped
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import judge
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import decoded
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.watch import closing_table
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements import doctor, preflight
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan import plan_probes
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import away, keeper, run_of

PAGE = str(Path(__file__).resolve().parents[3] / "roles" / "collect" / "files")
CASES = int(os.environ.get("NANOCHAT_DDP_CASES", "300"))  # of each document
ODD = [
    *(None, True, False, 0, -1, 1, 7.5, 2**40, 2**70, -(2**62), 1e300, -1e49, float("nan"), float("inf"), 1764000000),
    *("", "a\0b", "\x1b[2J", "\ud800", "x" * 5000, "x", "0", "../../etc", "/", "lo", "running", "good", "evil"),
    *([], {}, [[]], [1], ["x"], [None], [{}], {"a": 1}, {"": None}, ["good"], [0.5, 1.0], [[0.5, 1.0]]),
]


def places(thing: Any, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a document."""
    inner = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    for key, value in inner:
        yield (*so_far, key)
        yield from places(value, (*so_far, key))


def mutated(document: Any, chance: random.Random) -> Any:
    """The document with one to three values replaced, removed or repeated."""
    changed = copy.deepcopy(document)
    for dummy in range(chance.choice([1, 1, 2, 3])):
        ways = list(places(changed))
        if not ways:
            break
        *way, last = chance.choice(ways)
        part = changed
        for one in way:
            part = part[one]
        if chance.random() < 0.2:
            del part[last]
        else:
            part[last] = copy.deepcopy(chance.choice([*ODD, part[last], [part[last]]]))
    return changed


def cases(*documents: Any) -> Iterator[Any]:
    chance = random.Random(45)
    for number in range(CASES):
        yield mutated(documents[number % len(documents)], chance)


EVIL = {"inventory_hostname": "evil"}


# Honest documents, in all their parts.
HONEST = json.loads(Path(__file__).with_name("hostile_answers.json").read_text(encoding="utf-8"))
NODES, SPEED, MORE, PAST = (HONEST[name] for name in ("nodes", "speed", "more", "past"))
LOST = {"time": 1.7e9, "host": "evil", "why": "others had more"}
KEPT = keeper("training", 2, "good", "evil", away=[away("good", step=4)], gave_way=[LOST])
RUNS = [
    run_of(None, **MORE),
    run_of(KEPT, **MORE),
    run_of(keeper("idle", 2, why="too few hosts", hears=["good"]), **{**MORE, "phase": "eval", "batch": 3, "batches": 9}),
    run_of(keeper("resting", 2, rests_since=1.7e9), **MORE),
    run_of(keeper("failed", 2, why="died"), **{**MORE, "state": "crashed", "error": "it broke", "exit_code": 1}),
    run_of(None, **{**MORE, "state": "finished", "end_reason": "finished", "ended": 1.7e9, "updated": 1.7e9, "steps": 10}),
    run_of(None, **{**MORE, "stage": {"stage": "eval", "base": "d4", "step": 3}, "batch": 2, "batches": 4}),
]  # fmt: skip
GOOD = run_of(keeper("training", 2, "good"), rank=0, plan_facts=HONEST["facts"], links={"evil": [900.0, 0.3]}, **SPEED)
PREDICTED = {"tokens_per_second": 500.0, "wait_seconds": {"good": 0.1}, "bytes_sent": 10**6}


def shown(results: dict[str, Any]) -> str:
    """The screens and documents about a run, made of these results."""
    texts = [status_table(results), closing_table(results, PREDICTED)]
    json.loads(status_table(results, True), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    answered = {host: result["run"] for host, result in results.items() if result.get("run")}
    seen = {host: Seen(host, run, age=100.0, looked=3.0, silent=30.0) for host, run in answered.items()}
    rows = list(seen.values())
    texts += [live_line(rows, 80), phases_text(rows), regrouped(rows, 0)[1]]
    texts += [str(judge(host, seen, StallLimits(), first)) for host in seen for first in (True, False)]
    return texts[0]


def row_of(host: str, text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [host]).split()


def test_whatever_a_host_says_of_its_run_the_others_keep_their_rows(agent):
    alone = row_of("good", shown({"good": {"run": GOOD}, "evil": {"failed": True, "msg": "broken"}}))
    refused = 0
    for run in cases(*RUNS):
        told = agent("run_info", EVIL, prints={"run": run}, base_dir="/srv")
        screen = shown({"good": {"run": GOOD}, "evil": told})
        if told.get("failed"):
            refused += 1
            assert "  evil: evil sent an invalid answer: its " in screen and told["msg"].isprintable()
            assert row_of("good", screen) == alone
        else:
            assert row_of("good", screen)[:2] == alone[:2]
    assert refused > CASES / 3


def test_the_host_that_was_asked_for_another_is_named(agent):
    told = agent("run_info", EVIL, prints={"run": {}}, delegate="attic", base_dir="/srv")
    assert (
        told["failed"] and told["msg"].startswith("attic sent an invalid answer: its ") and "is missing" in told["msg"]
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["state"])
def test_an_honest_answer_is_believed(agent, run):
    told = agent("run_info", EVIL, prints={"run": run}, base_dir="/srv")
    assert told["run"] == json.loads(json.dumps(run))
    shown({"good": {"run": GOOD}, "evil": told})


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers of this machine as the laptop of the tests of the plan, new and with an earlier run."""
    base = str(tmp_path_factory.mktemp("base"))
    real = host.host_info(base, peers=["desktop"], folders=["/"])["probe"]
    laptop = plan_probes.laptop()
    part: dict[str, Any] = {
        name: {**real[name], **laptop[name]} for name in ("host", "python", "cpu", "memory", "disk")
    }
    part["python"]["venv"] = {**real["python"]["venv"], "exists": False}
    part |= {name: laptop[name] for name in ("nics", "routes", "tmux", "base_dir")}
    whole = {**real, **part, "measured": HONEST["measured"]}
    more = {**HONEST["leftovers"], "run": PAST, "base_run": PAST}
    used = {**whole, **more, "usage": {"graphical": ["x"]}}
    resumed = {**used, "run": {**PAST, "lineage": {"model": {}, "stage": {}, "data": {}}}}
    documents: list[dict[str, Any]] = json.loads(json.dumps([whole, used, resumed]))
    return documents


def plan_with(probe: Any, **settings: Any) -> str:
    """The plan of the desktop and this laptop, or why there is none."""
    given = plan_probes.hosts({"ddp_data_paths": ["/a"], "ddp_data_host": "desktop", **settings})
    given[1]["probe"] = probe
    try:
        made = make_plan(given)
    except PlanError as why:
        return str(why)
    json.dumps([made.plan, made.findings], allow_nan=False)
    return render(made.plan)


def test_whatever_a_host_says_of_itself_is_a_plan_or_a_sentence_about_it(agent, probes):
    refused = 0
    for number, probe in enumerate(cases(*probes)):
        told = agent("host_info", EVIL, prints={"probe": probe}, asked={})
        if told.get("failed"):
            refused += 1
            assert told["msg"].startswith("evil sent an invalid answer: its ") and told["msg"].isprintable()
        else:
            plan_with(
                told["probe"], **[{}, {"ddp_budget": "8h"}, {"ddp_polite": "guest", "ddp_restarts": 3}][number // 3 % 3]
            )
    assert refused > CASES / 4


def test_honest_facts_are_believed(agent, probes):
    for probe in probes:
        assert agent("host_info", EVIL, prints={"probe": probe}, asked={})["probe"] == probe
    assert plan_with(probes[0]).startswith("Run ") and plan_with(probes[2]).startswith("Run ")


MASTER = {"host": "good", "address": "10.0.0.0", "port": 29500}


def evidence_of(run: Any) -> dict[str, Any]:
    return {"run": run, **copy.deepcopy(HONEST["evidence"])}


def examined(evidence: Any, host: str) -> dict[str, Any]:
    return decoded({"evidence": json.loads(json.dumps(evidence))}, {"evidence": RankEvidence}, host)


def test_whatever_a_host_gives_the_doctor_is_evidence_or_a_sentence():
    plan: Any = {
        "run": "d4",
        "nodes": [{**node, "nic": "eth0"} for node in NODES],
        "master": {"host": "good", "address": "10.0.0.0", "port": 29500},
    }
    good = examined(evidence_of(GOOD), "good")
    for number, evidence in enumerate(cases(*map(evidence_of, RUNS))):
        silent = number % 2 == 0
        results = {
            "good": {"unreachable": True} if silent else good,
            "evil": examined(evidence, "evil"),
        }
        told = diagnose(Case(plan, results))
        assert told["verdict"]["host"] in ("good", "evil")
        refused = [line for line in told["evidence"] if "sent an invalid answer" in line]
        assert all(line.startswith("rank 1 (evil): ") and line.isprintable() for line in refused)


def test_whatever_plan_a_host_sends_back_the_doctor_goes_by_one_that_can_be():
    ports = {"data_ports": {"low": 32768, "high": 60999}, "timeout_seconds": 300, "master": MASTER, "run": "d4"}
    deployed = {"nodes": [{**node, "nic": "eth0", "peers": ["10.0.0.9"]} for node in NODES], **ports}
    evidence = {
        node["host"]: examined(evidence_of(run), "good") for node, run in zip(NODES, (GOOD, RUNS[0]), strict=True)
    }
    call: Any = SimpleNamespace(variables={"groups": {"all": ["good", "evil"]}}, which_run=lambda: {"run": None})
    believed = 0
    for plan in cases(deployed):
        results = {"evil": {"run": GOOD, "plan": json.loads(json.dumps(plan))}}
        one = doctor.deployed_plan(call, results).get("plan")
        if one:
            believed += 1
            assert re.fullmatch(r"[\w.-]+", one["run"]) and one["data_ports"]["high"] > 1023
            diagnose(Case(one, evidence))
    assert CASES / 10 < believed < CASES


def test_whatever_a_host_measures_of_links_the_preflight_judges_the_rest(monkeypatch, agent):
    monkeypatch.setattr(preflight, "display_is_ours", lambda: False)
    machines: list[Any] = plan_probes.hosts()
    plan = make_plan(machines, tolerant=True).plan
    honest: dict[str, Any] = HONEST["tries"]
    step = {"measured": {"pass_seconds": 0.5, "adamw_seconds": 0.01, "muon_seconds": 0.1}}
    hostvars: dict[str, Any] = {host["name"]: {"ddp_probe": host["probe"]} for host in machines}
    for told in cases(honest):
        for name, one in zip(hostvars, (honest, told), strict=True):
            known = {"inventory_hostname": name, "hostvars": hostvars}
            answering = {"responder": one.get("responder")}
            hostvars[name]["__preflight_answering"] = agent("start_responder", known, prints=answering, plan=plan)
            links = {"links": [one.get("link")]}
            hostvars[name].update(
                ddp_links=agent("peer_check", known, prints=links, plan=plan, rates=True),
                __preflight_gloo={"stdout": json.dumps(one.get("gloo")), "rc": 0},
                __preflight_step=step,
            )
        judged: Any = SimpleNamespace(variables={"hostvars": hostvars}, check=True)
        preflight.judge_links(judged, plan, rates=True)
        found: dict[str, Any] = preflight.judge_preflight(judged, plan, show="none", rehearsal=True)
        json.dumps(found, allow_nan=False)
        refused = [one for one in found["findings"] if "sent an invalid answer" in one["seen"]]
        assert {one["host"] for one in refused} <= {"laptop"}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collected files of a run that is over, from two hosts with keepers."""
    run = fake_run.collected(tmp_path_factory.mktemp("collected"), steps=6, hosts=("evil", "good"))
    for name in ("evil", "good"):
        story = [{**one, "host": name if one["host"] == "NAME" else one["host"]} for one in HONEST["story"]]
        (run / name / "members.jsonl").write_text("".join(json.dumps(one) + "\n" for one in story))
    return run


def page_of(run: Path) -> dict[str, Any]:
    """The data of the page that the report is, as a browser reads it."""
    page = report.make_report([str(run)], PAGE)
    text = page.split('type="application/json">')[1].split("</script>")[0]
    found: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return found


def test_whatever_was_collected_from_a_host_the_report_is_made_and_the_others_are_whole(collected, tmp_path):
    names = ["metrics-rank0.jsonl", "members.jsonl", "session.json", "plan.json"]
    good = [one["summary"] for one in page_of(collected)["ranks"] if one["summary"]["host"] == "good"]
    told = 0
    shutil.copytree(collected, tmp_path / "d4")
    files = {name: (collected / "evil" / name).read_text() for name in names}
    for number, lines in enumerate(
        cases(*([json.loads(line) for line in text.splitlines()] for text in files.values()))
    ):
        name = names[number % len(names)]
        (tmp_path / "d4" / "evil" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        page = page_of(tmp_path / "d4")
        rows = [one["summary"] for one in page["ranks"] if one["summary"]["host"] == "good"]
        # A plan that fits may be another one, which does not have that host.
        assert rows == good or (name == "plan.json" and not rows)
        said = [one for one in page["sentences"] if "left out" in one]
        assert all(one.startswith("evil: left out ") and name in one and one.isprintable() for one in said)
        told += len(said)
        (tmp_path / "d4" / "evil" / name).write_text(files[name])
    assert told > CASES / 4
