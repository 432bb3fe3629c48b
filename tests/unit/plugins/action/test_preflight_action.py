# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The judgement's input: results that the role's tasks left on the hosts; tests/pins has what comes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.measured import program_answer
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import preflight as verbs
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements import preflight
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import desktop, hosts, laptop


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"stdout": 'noise\n{"ok": true}\n', "rc": 0}, {"ok": True}),
        ({"stdout": "", "stderr": "Traceback\nImportError: no torch", "rc": 1}, "ImportError: no torch"),
        ({"stdout": '{"ok": tr', "stderr": "", "rc": -9}, "no output"),
        ({"msg": "task did not complete"}, "task did not complete"),
    ],
)
def test_a_program_is_taken_at_its_json_or_its_last_words(result, said):
    expected = said if isinstance(said, dict) else {"ok": False, "phase": "start", "error": said}
    assert program_answer(result) == expected


def judged(known, change):
    """The judgement of these hosts, once change has changed what their tasks registered."""
    outcome = make_plan(known, tolerant=True)
    link = {"address": "x", "ports": [], "bandwidth_mbit": 800.0, "latency_ms": 0.3, "nic": None, "error": ""}
    step = {"measured": {"pass_seconds": 0.5, "adamw_seconds": 0.01, "muon_seconds": 0.1}, "error": ""}
    names = [host["name"] for host in known]
    hostvars = {
        host["name"]: {
            "ddp_probe": host["probe"],
            "__preflight_answering": {"responder": {"pid": 1}, "is_held": False, "error": ""},
            "ddp_links": {"links": [{**link, "host": peer}]},
            "__preflight_gloo": {"stdout": '{"ok": true, "bandwidth_mbit": 700.0}', "rc": 0},
            "__preflight_step": copy.deepcopy(step),
        }
        for host, peer in zip(known, reversed(names), strict=True)
    }
    change(hostvars)
    task: Any = SimpleNamespace(variables={"hostvars": hostvars}, check=False)
    return preflight.judge_preflight(task, outcome.plan, show="none", rehearsal=True)


def sentences(told):
    return [f"{one['host']}: {one['seen']}" for one in told["findings"]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda hosts: hosts["laptop"].pop("ddp_links"), "laptop: laptop returned nothing about: links"),
        (lambda hosts: hosts["laptop"].update(ddp_links={"msg": "no Python"}), "laptop: no Python"),
        (
            lambda hosts: hosts["laptop"].update(__preflight_answering={"msg": "no Python"}, ddp_links={"msg": "x"}),
            "laptop: no Python",
        ),
    ],
)
def test_a_host_that_failed_meanwhile_is_told_and_the_rest_is_judged(change, sentence):
    assert sentence in sentences(judged(hosts(), change))
    assert sentences(judged(hosts(), lambda known: None)) == []


@pytest.mark.parametrize(
    ("setting", "compiler", "found"),
    [("auto", True, True), ("auto", False, False), ("zig", False, True), ("torch", True, False)],
)
def test_kernels_that_could_not_be_built_are_one_finding(setting, compiler, found):
    known = hosts({"ddp_kernels": setting}, two={"cpu": {**laptop()["cpu"], "compiler": compiler}})
    measured = {"measured": {"no_kernels_because": "the build was ended by signal 4"}, "error": ""}
    told = sentences(judged(known, lambda seen: seen["laptop"].update(__preflight_step=measured)))
    assert told == ["laptop: the C kernels could not be built: the build was ended by signal 4"] * found


class Host:
    """A host that answers the verbs of its side with what a test gives it."""

    def __init__(self, plan: dict[str, Any], answer: Any = None, **known: Any) -> None:
        self.plan, self.answer, self.asked = plan, answer, []
        self.variables = {"hostvars": {"desktop": known, "laptop": known}, **known}

    def ask(self, verb: str, **params: Any) -> Any:
        self.asked.append((verb, params))
        return self.answer

    def __call__(self, verb: Callable[..., Any], **params: Any) -> Any:
        return verb(SimpleNamespace(variables=self.variables, host="desktop", ask=self.ask), plan=self.plan, **params)


def test_a_host_answers_on_the_ports_of_its_part_of_the_plan():
    host = Host(make_plan(hosts({"ddp_restarts": 3})).plan, {"responder": None, "is_held": False, "error": "in use"})
    assert host(verbs.start_responder)["error"] == "in use"
    [(dummy, asked)] = host.asked
    assert (asked["rendezvous_port"], asked["others"], asked["low"], asked["seconds"]) == (29500, [29501], 32768, 110)


def test_links_have_the_name_of_the_peer_and_an_odd_answer_is_refused():
    known = {"__preflight_answering": {"responder": {"ports": [40000], "token": "x", "pid": 1, "started": 2}}}
    link = {"address": "192.168.1.11", "ports": [], "error": ""}
    host = Host(make_plan(hosts()).plan, {"links": [link]}, **known)
    assert host(verbs.peer_check, rates=True)["links"][0]["host"] == "laptop"
    assert host.asked[0][1]["peers"] == [{"address": "192.168.1.11", "ports": [40000], "token": "x"}]
    host.answer = {"links": [{**link, "bandwidth_mbit": "fast"}]}
    told = host(verbs.peer_check, rates=True)
    assert told["failed"] and told["msg"].startswith("desktop sent an invalid answer: its ")


def test_a_step_is_measured_once_and_kept_unless_the_host_is_busy():
    plan = make_plan(hosts()).plan
    host = Host(plan, {"rc": 0, "stdout": '{"tokens_per_second": 130}'}, ddp_probe=desktop())
    step = host(verbs.measure_step, seconds=8)
    [(dummy, asked)] = host.asked
    assert asked["argv"][2:9] == ["scripts.measure_step", "--vocab-size", "4096", "--seconds", "8", "--steps", "1"]
    assert step["measured"]["tokens_per_second"] == 130 and step["is_new"]
    kept = host(verbs.keep_measured, step=step, links={}, gloo={})
    assert kept["changed"] and kept["measured"]["model"] == plan["model"]
    again = Host(plan, None, ddp_probe={**desktop(), "measured": kept["measured"]})
    assert again(verbs.measure_step, seconds=8) == {"measured": kept["measured"], "error": "", "is_new": False}
    busy = Host(plan, None, ddp_probe={**desktop(), "cpu": {**desktop()["cpu"], "load1": 99.0}})
    assert busy(verbs.keep_measured, step=step, links={}, gloo={})["measured"] and not busy.asked
    failed = Host(plan, {"rc": 1, "stdout": '{"error": "depth is wrong"}'}, ddp_probe=desktop())
    assert failed(verbs.measure_step, seconds=8) == {"measured": {}, "error": "depth is wrong", "is_new": True}
    assert failed(verbs.keep_measured, step={"measured": {}}, links={}, gloo={}) == {"measured": {}}
