# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The judgement's input: results that the role's tasks left on the hosts; tests/pins has what comes of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.predict import program_answer
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import preflight as verbs
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import desktop, hosts


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
    host = Host(make_plan(hosts({"ddp_restarts": 3})).plan, {"failed": True, "msg": "in use"})
    assert host(verbs.start_responder)["msg"] == "in use"
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
