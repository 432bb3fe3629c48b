# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host of a run answers with anything: it has its sentence, the others keep their rows, and nothing ends in a traceback."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action import host_info, run_info
from ansible_collections.nanochat.ddp.plugins.filter.run_tables import FilterModule
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import live_line, phases_text, regrouped
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stalls import StallLimits
from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import Observation, judge
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _look
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan import plan_probes
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import away, keeper, run_of

CASES = int(os.environ.get("NANOCHAT_DDP_CASES", "300"))  # of each document
ODD = [
    *(None, True, False, 0, -1, 1, 7.5, 2**40, 2**70, -(2**62), 1e300, -1e49, float("nan"), float("inf"), 1764000000),
    *("", "x", "0", "a\0b", "\x1b[2J", "\ud800", "../../etc", "/", "lo", "running", "training", "good", "evil", "x" * 5000),
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
        *way, last = chance.choice(list(places(changed)) or [("x",)])
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
    """`answer_of(action, document)`: the result of a task whose host prints this document."""
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(_look, "program", lambda code, params: "")
    monkeypatch.setattr(_look, "python_of", lambda action, variables: ["python3"])

    def answer(action: ModuleType, document: Any) -> dict[str, Any]:
        task = SimpleNamespace(args={"base_dir": "/srv"}, check_mode=False, delegate_to=None)
        made = action.ActionModule(task, SimpleNamespace(has_pipelining=True), None, None, None, None)
        printed = _look.MARK + json.dumps(document)
        monkeypatch.setattr(made, "get_shell_option", lambda name, default: default, raising=False)
        monkeypatch.setattr(made, "_low_level_execute_command", lambda *dummy, **more: {"stdout": printed})
        return dict(made.run(task_vars={"inventory_hostname": "evil"}))

    return answer


NODES = [{"host": host, "rank": rank, "address": f"10.0.0.{rank}", "rows": 4} for rank, host in enumerate(["good", "evil"])]
FACTS = {
    "world": 2,
    "nodes": NODES,
    "model": {"depth": 4, "sequence": 128, "vocab_size": 32768, "n_embd": 256},
    "training": {"device_batch": 4, "batch_split": "auto", "rows": [4, 4], "timed": "8h"},
}
SPEED = {"compute_seconds": 1.0, "optimizer_seconds": 0.1, "rows": 4, "tokens_per_second": 512.0, "wait_share": 0.1, "world": 2}
MORE = {
    **{"links": {"good": [900.0, 0.3]}, "checkpoint": {"step": 5, "time": 1.7e9, "path": "/srv/x/model.pt", "bytes": 7}},
    **{"expected": {"val_bpb": 1.0, "like": "d4"}, "started": 1.7e9, "ends": 1.7e9, "previous": {"path": "/p", "count": 1, "checkpoint": 3}},
    **{"training": {"id": "0" * 16, "number": 2, "begun": 17}, "last_lines": ["step 9"], "eta_seconds": 90.0, "loss": 3.0, **SPEED},
    **{"rows_changed": 3, "rows_before": 5, "digest": "0f", "identical": True, "end_blames": [0], "session_age": 30.0, "rank": 1},
}
LOST = {"time": 1.7e9, "host": "evil", "since": 3, "until": 7, "why": "others had more"}
KEPT = keeper("training", 2, "good", "evil", away=[away("good", step=4)], gave_way=[LOST], kept=[{"path": "/a", "checkpoint": 4}])
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
    """What people and programs see of a run."""
    filters = FilterModule().filters()
    texts = [filters["status_table"](results), filters["closing_table"](results, PREDICTED)]
    json.dumps([filters["status_data"](results), filters["live_view"](results)], allow_nan=False)
    rows = [{"host": host, "run": result.get("run") or {"state": None, "step": None}, "age": 3.0} for host, result in results.items()]
    seen = {row["host"]: Observation(row["run"], 100.0, 30.0) for row in rows}
    texts += [live_line(rows, 80), phases_text(rows), regrouped(rows, 0)[1]]
    texts += [str(judge(host, seen, StallLimits(), first)) for host in seen for first in (True, False)]
    return texts[0]


def row_of(host: str, text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [host]).split()


def test_whatever_a_host_says_of_its_run_the_others_keep_their_rows(answer_of):
    alone = row_of("good", shown({"good": {"run": GOOD}, "evil": {"failed": True, "msg": "broken"}}))
    refused = 0
    for run in cases(*RUNS):
        told = answer_of(run_info, {"run": run})
        screen = shown({"good": {"run": GOOD}, "evil": told})
        if told.get("failed"):
            refused += 1
            assert "  evil: evil sent an invalid answer: its " in screen and told["msg"].isprintable()
            assert row_of("good", screen) == alone
        else:
            assert row_of("good", screen)[:2] == alone[:2]
    assert refused > CASES / 3


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["state"])
def test_an_honest_answer_is_believed(answer_of, run):
    told = answer_of(run_info, {"run": run})
    assert told["run"] == json.loads(json.dumps(run))
    shown({"good": {"run": GOOD}, "evil": told})
