# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The judgement's input: results that the role's tasks left on the hosts; tests/pins has what comes of them."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements import preflight
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, laptop

OK = {"ok": True, "torch": "2.13.0", "bandwidth_mbit": 900.0}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({}, {}),
        ({"skipped": True}, {}),
        ({"stdout": 'noise\n{"ok": true}\n', "rc": 0}, {"ok": True}),
        ({"stdout": "", "stderr": "Traceback\nImportError: no torch", "rc": 1}, "ImportError: no torch"),
        ({"stdout": '{"ok": tr', "stderr": "", "rc": -9}, "no output"),
        ({"msg": "async task did not complete"}, "async task did not complete"),
    ],
)
def test_a_program_is_taken_at_its_json_or_its_last_words(result, said):
    expected = said if isinstance(said, dict) else {"ok": False, "phase": "start", "error": said}
    assert preflight.program_answer(result) == expected


def test_a_failed_module_is_an_error_of_its_host():
    assert preflight.host_tries({"failed": True, "msg": "no Python"}, {})["error"] == "no Python"
    assert preflight.host_tries({"skipped": True}, {"skipped": True}) == {}


def options(known, seen, **changes):
    outcome = make_plan(known, tolerant=True)
    return {
        "plan": outcome.plan,
        "evidence": seen,
        "probes": {host["name"]: host["probe"] for host in known},
        "plan_findings": [],
        "before_network": False,
        "rehearsal": True,
        "running": False,
        **changes,
    }


def seen_of(known):
    link = {"address": "x", "ports": [], "bandwidth_mbit": 800.0, "latency_ms": 0.3, "nic": None, "error": ""}
    step = {"pass_seconds": 0.5, "adamw_seconds": 0.01, "muon_seconds": 0.1}
    return {
        host["name"]: {
            "answering": {"responder": {"pid": 1, "ports": [40000], "token": "x"}, "holders": [], "error": ""},
            "links": {"links": [dict(link)]},
            "firewall": {"backend": "none", "commands": [], "rules": []},
            "gloo": {"stdout": '{"ok": true, "bandwidth_mbit": 700.0}', "rc": 0},
            "manifest": {"content": "YWJj"},
            "measured": step,
        }
        for host in known
    }


def test_a_host_that_was_lost_meanwhile_is_told_and_the_rest_is_judged():
    known = hosts()
    seen = seen_of(known)
    del seen["laptop"]
    evidence = preflight.gather(options(known, seen))
    assert evidence.tries["desktop"]["links"] == []
    assert preflight.predicted_by(evidence, seen) is None
    assert [one["host"] for one in preflight.missing(evidence.plan, seen)] == ["laptop"]


@pytest.mark.parametrize(
    ("setting", "compiler", "found"),
    [("auto", True, ["laptop"]), ("auto", False, []), ("zig", False, ["laptop"]), ("torch", True, [])],
)
def test_kernels_that_could_not_be_built_are_one_finding(setting, compiler, found):
    known = hosts({"ddp_kernels": setting}, two={"cpu": {**laptop()["cpu"], "compiler": compiler}})
    seen = seen_of(known)
    seen["laptop"]["measured"] = {"no_kernels_because": "the build was ended by signal 4"}
    unbuilt = preflight.unbuilt(preflight.gather(options(known, seen)), seen)
    assert [one["host"] for one in unbuilt] == found
    assert all(one["seen"] == "the C kernels could not be built: the build was ended by signal 4" for one in unbuilt)


def test_an_impossible_link_is_its_hosts_error():
    links = {"links": [{"address": "x", "ports": [], "bandwidth_mbit": "fast"}]}
    entry = preflight.host_tries({"responder": None, "holders": [], "error": ""}, links)
    assert entry["links"] == [] and str(entry["error"]).startswith("sent an invalid answer: its *.bandwidth_mbit: ")
