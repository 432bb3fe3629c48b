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
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule
from ansible_collections.nanochat.ddp.plugins.filter.run_tables import FilterModule
from ansible_collections.nanochat.ddp.plugins.filter.values import FilterModule as ValueFilters
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.module_utils._run import report
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import Seen, StallLimits
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line, phases_text, regrouped
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import judge
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import carrier
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements import preflight
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements.evidence import JudgeTask
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan import plan_probes
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import away, keeper, run_of

PAGE = str(Path(__file__).resolve().parents[3] / "roles" / "collect" / "files")
CASES = int(os.environ.get("NANOCHAT_DDP_CASES", "300"))  # of each document
ODD = [
    *(None, True, False, 0, -1, 1, 7.5, 2**40, 2**70, -(2**62), 1e300, -1e49, float("nan"), float("inf"), 1764000000),
    *(
        "",
        "x",
        "0",
        "a\0b",
        "\x1b[2J",
        "\ud800",
        "../../etc",
        "/",
        "lo",
        "running",
        "training",
        "good",
        "evil",
        "x" * 5000,
    ),
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


@pytest.fixture
def answer_of(monkeypatch: pytest.MonkeyPatch):
    """`answer_of(verb, document)`: the result of a task whose host prints this document."""
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(carrier, "program", lambda *dummy: "")
    monkeypatch.setattr(carrier, "python_of", lambda action, variables: ["python3"])

    def answer(verb: str, document: Any, delegate: str | None = None) -> dict[str, Any]:
        args = {"verb": verb, **({"asked": {}} if verb == "host_info" else {"base_dir": "/srv"})}
        task = SimpleNamespace(args=args, check_mode=False, delegate_to=delegate, environment=None)
        made = ActionModule(task, SimpleNamespace(has_pipelining=True), None, None, None, None)
        printed = carrier.MARK + json.dumps(document)
        monkeypatch.setattr(made, "get_shell_option", lambda name, default: default, raising=False)
        monkeypatch.setattr(made, "_low_level_execute_command", lambda *dummy, **more: {"stdout": printed})
        return dict(made.run(task_vars={"inventory_hostname": "evil"}))

    return answer


NODES = [
    {"host": host, "rank": rank, "address": f"10.0.0.{rank}", "rows": 4} for rank, host in enumerate(["good", "evil"])
]
FACTS = {
    "world": 2,
    "nodes": NODES,
    "model": {"depth": 4, "sequence": 128, "vocab_size": 32768, "n_embd": 256},
    "training": {"device_batch": 4, "batch_split": "auto", "rows": [4, 4], "timed": "8h"},
}
SPEED = {
    "compute_seconds": 1.0,
    "optimizer_seconds": 0.1,
    "rows": 4,
    "tokens_per_second": 512.0,
    "wait_share": 0.1,
    "world": 2,
}
MORE = {
    "links": {"good": [900.0, 0.3]},
    "checkpoint": {"step": 5, "time": 1.7e9, "path": "/srv/x/model.pt", "bytes": 7},
    "started": 1.7e9,
    "ends": 1.7e9,
    "previous": {"path": "/p", "count": 1, "checkpoint": 3},
    "training": {"id": "0" * 16, "number": 2, "begun": 17},
    "last_lines": ["step 9"],
    "eta_seconds": 90.0,
    "loss": 3.0,
    **SPEED,
    "rows_changed": 3,
    "rows_before": 5,
    "digest": "0f",
    "identical": True,
    "end_blames": [0],
    "session_age": 30.0,
    "rank": 1,
}
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
GOOD = run_of(keeper("training", 2, "good"), rank=0, plan_facts=FACTS, links={"evil": [900.0, 0.3]}, **SPEED)
PREDICTED = {"tokens_per_second": 500.0, "wait_seconds": {"good": 0.1}, "bytes_sent": 10**6}


def shown(results: dict[str, Any]) -> str:
    """The screens and documents about a run, made of these results."""
    filters = FilterModule().filters()
    texts = [filters["status_table"](results), filters["closing_table"](results, PREDICTED)]
    json.loads(filters["status_table"](results, True), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    answered = {host: result["run"] for host, result in results.items() if result.get("run")}
    seen = {host: Seen(host, run, age=100.0, looked=3.0, silent=30.0) for host, run in answered.items()}
    rows = list(seen.values())
    texts += [live_line(rows, 80), phases_text(rows), regrouped(rows, 0)[1]]
    texts += [str(judge(host, seen, StallLimits(), first)) for host in seen for first in (True, False)]
    return texts[0]


def row_of(host: str, text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [host]).split()


def test_whatever_a_host_says_of_its_run_the_others_keep_their_rows(answer_of):
    alone = row_of("good", shown({"good": {"run": GOOD}, "evil": {"failed": True, "msg": "broken"}}))
    refused = 0
    for run in cases(*RUNS):
        told = answer_of("run_info", {"run": run})
        screen = shown({"good": {"run": GOOD}, "evil": told})
        if told.get("failed"):
            refused += 1
            assert "  evil: evil sent an invalid answer: its " in screen and told["msg"].isprintable()
            assert row_of("good", screen) == alone
        else:
            assert row_of("good", screen)[:2] == alone[:2]
    assert refused > CASES / 3


def test_the_host_that_was_asked_for_another_is_named(answer_of):
    told = answer_of("run_info", {"run": {}}, "attic")
    assert told["failed"] and told["msg"].startswith("attic sent an invalid answer: its ")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["state"])
def test_an_honest_answer_is_believed(answer_of, run):
    told = answer_of("run_info", {"run": run})
    assert told["run"] == json.loads(json.dumps(run))
    shown({"good": {"run": GOOD}, "evil": told})


MEASURED = {
    "pass_seconds": 1.5,
    "adamw_seconds": 0.1,
    "muon_seconds": 0.2,
    "tokens_per_second": 700.0,
    "matmul": "fp32",
    "capability": "AVX2",
    "cores": [0, 1],
    "link": {"mbit": 900.0, "latency_ms": 0.3},
    "links": {"desktop": [900.0, 0.3]},
    "key": "k",
    "device_batch": 8,
    "products": {"fp32": {"tokens_per_second": 700.0, "pass_seconds": 1.5}},
    "model": {
        "sequence": 512,
        "n_embd": 256,
        "flops_per_token": 7,
        "parameters": {"lm_head": 9, "transformer_matrices": 9},
    },
}
PAST = {
    "path": "/r",
    "exists": True,
    "plan_digest": "0f",
    "rows": {"laptop": 4, "desktop": 4},
    "head_shares": {"laptop": 1},
    "cores": {"laptop": [0]},
    "sync": "int8",
    "matmul": "fp32",
    "total_batch": 4096,
    "iterations": 100,
    "polite": {"laptop": "low"},
    "lineage": {"model": {"depth": 4}, "stage": {}, "data": {"id": "text-1", "source": "text", "paths": ["/a"]}},
    "session": {"id": "s", "exit_code": 0, "ended": None, "stopped": False},
    "training": {"id": "0" * 16, "number": 2, "begun": 17},
    "checkpoints": [10, 20],
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers of this machine as the laptop of the tests of the plan, new and with an earlier run."""
    base = str(tmp_path_factory.mktemp("base"))
    real = host.probe(base, peers=["desktop"], folders=["/"])
    laptop = plan_probes.laptop()
    part: dict[str, Any] = {
        name: {**real[name], **laptop[name]} for name in ("host", "python", "cpu", "memory", "disk")
    }
    part["python"]["venv"] = {**real["python"]["venv"], "exists": False}
    part["nics"] = [{"duplex": None, **one} for one in laptop["nics"]]
    whole = {
        **real,
        **part,
        **{name: laptop[name] for name in ("routes", "tmux", "base_dir", "venv_dir")},
        "measured": MEASURED,
    }
    finished = {
        "run": "d4",
        "evals": [[0.5, 2.0], [1.0, 1.5]],
        "training": None,
        "lineage": PAST["lineage"],
        "eval_tokens": 1,
    }
    holder = {"port": 29500, "addresses": ["::"], "pid": 3, "user": "x", "command": "y", "session": None, "run": None}
    process = {"pid": 1, "parent": 0, "user": "x", "command": "torchrun", "session": None, "run": None, "age": 9}
    more = {
        "run": PAST,
        "base_run": PAST,
        "finished": [{**finished, "total_batch": 4096, "tokens": 10**6}],
        "ports": [holder],
        "processes": [process],
    }
    used = {
        **whole,
        **more,
        "usage": {"graphical": ["x"], "blind": ["y"]},
        "transfer": {"folder": "/a b", "shell": "/bin/sh"},
    }
    resumed = {**used, "transfer": None, "run": {**PAST, "lineage": {"model": {}, "stage": {}, "data": {}}}}
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


def test_whatever_a_host_says_of_itself_is_a_plan_or_a_sentence_about_it(answer_of, probes):
    refused = 0
    for number, probe in enumerate(cases(*probes)):
        told = answer_of("host_info", {"probe": probe})
        if told.get("failed"):
            refused += 1
            assert told["msg"].startswith("evil sent an invalid answer: its ") and told["msg"].isprintable()
        else:
            plan_with(
                told["probe"], **[{}, {"ddp_budget": "8h"}, {"ddp_polite": "guest", "ddp_restarts": 3}][number // 3 % 3]
            )
    assert refused > CASES / 4


@pytest.mark.parametrize(
    "missing",
    [("nics", 1, "kind"), ("disk",), ("disk", "free"), ("python", "version"), ("cpu", "allowed"), ("ephemeral", "low")],
)
def test_a_probe_that_lacks_something_is_one_sentence_with_the_hosts_name(answer_of, probes, missing):
    probe = copy.deepcopy(probes[0])
    part = probe
    for one in missing[:-1]:
        part = part[one]
    del part[missing[-1]]
    place = ".".join("*" if isinstance(one, int) else one for one in missing)
    told = answer_of("host_info", {"probe": probe})
    assert (
        told["failed"]
        and told["msg"] == f"evil sent an invalid answer: its {place} is missing; {told['msg'].partition('; ')[2]}"
    )


def test_honest_facts_are_believed(answer_of, probes):
    for probe in probes:
        assert answer_of("host_info", {"probe": probe})["probe"] == probe
    assert plan_with(probes[0]).startswith("Run ") and plan_with(probes[2]).startswith("Run ")


MASTER = {"host": "good", "address": "10.0.0.0", "port": 29500}


def evidence_of(run: Any) -> dict[str, Any]:
    process = {
        "pid": 7,
        "state": "S",
        "cpu_share": 0.5,
        "waits_in": "x",
        "memory_bytes": 2**30,
        "swapped_bytes": 2**29,
        "command": "python",
    }
    system = {
        "cpus": 4,
        "load1": 1.0,
        "memory_available": 2**33,
        "disk_free": 2**20,
        "oom_kills": 1,
        "pressure": {"io": 50.0},
    }
    nics = {"eth0": {"state": "up", "carrier_changes": 0, "errors": 0}}
    socket = {
        "peer": "10.0.0.0",
        "port": 5,
        "state": "established",
        "unsent_bytes": 9,
        "unread_bytes": 0,
        "retransmits": 4,
    }
    other = {"pid": 9, "user": "x", "command": "make", "cpu_share": 3.0}
    dump = {"time": 1.0, "pid": 7, "stacks": {"MainThread": ["a.py:1 in f"]}, "flight": {"last_seq": 7, "entries": []}}
    more = {
        "sockets": [socket],
        "links": {"good": "timeout"},
        "system": {**system, "nics": nics},
        "others": [other],
        "kernel": ["Killed"],
    }
    return {"run": run, "rank": 1, "process": process, "dump": dump, "oom_kills_before": 0, **more}


def test_whatever_a_host_gives_the_doctor_is_evidence_or_a_sentence():
    plan: Any = {
        "run": "d4",
        "nodes": [{**node, "nic": "eth0"} for node in NODES],
        "master": {"host": "good", "address": "10.0.0.0", "port": 29500},
    }
    good = {"evidence": evidence_of(GOOD)}
    for number, evidence in enumerate(cases(*map(evidence_of, RUNS))):
        silent = number % 2 == 0
        results = {
            "good": {"unreachable": True} if silent else good,
            "evil": {"evidence": json.loads(json.dumps(evidence))},
        }
        told = diagnose(plan, results)
        assert told["verdict"]["host"] in ("good", "evil")
        refused = [line for line in told["evidence"] if "sent an invalid answer" in line]
        assert all(line.startswith("rank 1 (evil): ") and line.isprintable() for line in refused)


def test_whatever_plan_a_host_sends_back_the_doctor_goes_by_one_that_can_be():
    ports = {"data_ports": {"low": 32768, "high": 60999}, "timeout_seconds": 300, "master": MASTER, "run": "d4"}
    deployed = {"nodes": [{**node, "nic": "eth0", "peers": ["10.0.0.9"]} for node in NODES], **ports}
    evidence = {node["host"]: {"evidence": evidence_of(run)} for node, run in zip(NODES, (GOOD, RUNS[0]), strict=True)}
    believed_plans = ValueFilters().filters()["believed_plans"]
    believed = 0
    for plan in cases(deployed):
        results = {"evil": {"run": GOOD, "plan": json.loads(json.dumps(plan))}}
        for one in believed_plans(results, ["good", "evil"]):
            believed += 1
            assert re.fullmatch(r"[\w.-]+", one["run"]) and one["data_ports"]["high"] > 1023
            diagnose(one, evidence)
    assert CASES / 10 < believed < CASES


def test_whatever_a_host_measures_of_links_the_preflight_judges_the_rest(monkeypatch):
    monkeypatch.setattr(preflight, "display_is_ours", lambda: False)
    known: list[Any] = plan_probes.hosts()
    plan = make_plan(known, tolerant=True).plan
    port = {"port": 40000, "reachable": False, "error": "dropped", "words": "x", "milliseconds": 5.0}
    link = {
        "address": "192.168.1.10",
        "ports": [port],
        "latency_ms": 0.3,
        "bandwidth_mbit": 800.0,
        "mtu": 1500,
    }
    more = {"duplex_mbit": 700.0, "full_size": False, "passing_size": 1400, "error": "", "nic": "eth0", "gateway": None}
    gloo = {
        "ok": False,
        "phase": "connect",
        "error": "timeout",
        "bandwidth_mbit": 700.0,
        "message_ms": 0.3,
        "torch": "2.13.0",
    }
    probes = {host["name"]: host["probe"] for host in known}
    step = {"pass_seconds": 0.5, "adamw_seconds": 0.01, "muon_seconds": 0.1}
    honest: dict[str, Any] = {"link": {**link, **more}, "gloo": gloo}
    for told in cases(honest):
        evidence = {
            host["name"]: {
                "answering": {"responder": {"pid": 1, "ports": [40000], "token": "x"}, "holders": [], "error": ""},
                "links": {"links": [json.loads(json.dumps(one.get("link")))]},
                "gloo": {"stdout": json.dumps(one.get("gloo")), "rc": 0},
                "measured": step,
            }
            for host, one in zip(known, (honest, told), strict=True)
        }
        options = {"plan": plan, "evidence": evidence, "probes": probes, "plan_findings": [], "before_network": False}
        task = JudgeTask({**options, "rehearsal": True, "running": False, "show": "none", "file": None}, {}, True)
        found: dict[str, Any] = preflight.judge_preflight(task)
        json.dumps(found, allow_nan=False)
        refused = [one for one in found["findings"] if "sent an invalid answer" in one["seen"]]
        assert {one["host"] for one in refused} <= {"laptop"}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collected files of a run that is over, from two hosts with keepers."""
    run = fake_run.collected(tmp_path_factory.mktemp("collected"), steps=6, hosts=("evil", "good"))
    for name in ("evil", "good"):
        begun = {"time": 1.7e9, "host": name, "generation": 1, "members": ["evil", "good"], "steps": 0}
        story = [
            {**begun, "what": "training", "why": ""},
            {**begun, "time": 1.7e9 + 9, "host": "good", "what": "lost", "why": "good is not heard any more"},
            {
                **begun,
                "time": 1.7e9 + 9,
                "what": "training",
                "why": "x",
                "generation": 2,
                "members": ["evil"],
                "steps": 3,
            },
            {**begun, "time": 1.7e9 + 12, "what": "gave way", "why": "others had more", "generation": 2, "steps": 5},
            {**begun, "time": 1.7e9 + 20, "what": "finished", "why": "", "generation": 2},
        ]
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


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics-rank0.jsonl", '{"kind": "step", "step": 9, "time": 1.7e9, "loss": NaN, "seconds": NaN}'),
        ("metrics-rank0.jsonl", '{"kind": "eval", "step": 9, "time": Infinity, "val_bpb": [1]}'),
        ("members.jsonl", '{"time": 1.7e9, "what": "training", "generation": [2], "members": ["evil"]}'),
        ("members.jsonl", '{"time": NaN, "what": "training", "generation": 2, "members": ["evil"]}'),
    ],
)
def test_no_number_in_a_collected_file_ends_the_report(collected, tmp_path, name, line):
    shutil.copytree(collected, tmp_path / "d4")
    with (tmp_path / "d4" / "evil" / name).open("a") as file:
        file.write(line + "\n")
    page = page_of(tmp_path / "d4")
    assert len(page["ranks"]) == 2
    left_out = [one for one in page["sentences"] if f"evil: left out 1 line of its {name}: " in one]
    assert bool(left_out) is ('NaN, "seconds"' not in line)
