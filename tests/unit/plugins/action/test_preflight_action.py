# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the judgement reads of the results that the role's tasks left on the hosts."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.action import preflight
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts

OK = {"ok": True, "torch": "2.13.0", "bandwidth_mbit": 900.0}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({}, {}),
        ({"skipped": True}, {}),
        ({"stdout": 'noise\n{"ok": true}\n', "rc": 0}, {"ok": True}),
        ({"stdout": "", "stderr": "Traceback\nImportError: no torch", "rc": 1}, "ImportError: no torch"),
        ({"stdout": '{"ok": tr', "stderr": "", "rc": -9}, "it said nothing"),
        ({"msg": "async task did not complete"}, "async task did not complete"),
    ],
)
def test_a_program_is_taken_at_its_json_or_its_last_words(result, said):
    expected = said if isinstance(said, dict) else {"ok": False, "phase": "start", "error": said}
    assert preflight.spoken(result) == expected


def test_a_failed_module_is_an_error_of_its_host():
    assert preflight.tried({"failed": True, "msg": "no Python"}, {})["error"] == "no Python"
    assert preflight.tried({"skipped": True}, {"skipped": True}) == {}


def options(known, **changes):
    outcome = make_plan(known, ["torch==2.13.0"], tolerant=True)
    return {
        "plan": outcome.plan,
        "plan_findings": [],
        "before_network": False,
        "rehearsal": True,
        "running": False,
        **changes,
    }


def hostvars_of(known):
    link = {"address": "x", "ports": [], "bandwidth_mbit": 800.0, "latency_ms": 0.3, "nic": None}
    step = {"pass_seconds": 0.5, "adamw_seconds": 0.01, "muon_seconds": 0.1}
    return {
        host["name"]: {
            "ddp_probe": host["probe"],
            "__preflight_answering": {"responder": {"pid": 1}, "holders": [], "error": ""},
            "__preflight_links": {"links": [dict(link)]},
            "__preflight_firewall": {"backend": "none", "commands": [], "rules": []},
            "__preflight_gloo": {"stdout": '{"ok": true, "bandwidth_mbit": 700.0}', "rc": 0},
            "__preflight_manifest": {"content": "YWJj"},
            "__preflight_measured": step,
        }
        for host in known
    }


def test_everything_that_the_hosts_left_is_gathered_and_predicted_from():
    known = hosts()
    evidence = preflight.gather(options(known), hostvars_of(known))
    assert [link["host"] for link in evidence.tries["desktop"]["links"]] == ["laptop"]
    assert evidence.manifests["desktop"] == evidence.manifests["laptop"] != ""
    assert evidence.gloo["laptop"]["ok"]
    predicted = preflight.predicted_by(evidence, hostvars_of(known))
    assert predicted["link_mbit"] == 800.0
    assert set(predicted["wait_seconds"]) == {"desktop", "laptop"}


def test_a_host_that_left_nothing_is_no_obstacle_to_judging_the_rest():
    known = hosts()
    seen = hostvars_of(known)
    del seen["laptop"]
    evidence = preflight.gather(options(known), seen)
    assert evidence.probes["laptop"] == {}
    assert evidence.tries["desktop"]["links"] == []
    assert preflight.predicted_by(evidence, seen) is None


def test_a_step_that_could_not_be_measured_is_told():
    known = hosts()
    seen = hostvars_of(known)
    seen["laptop"]["__preflight_step"] = {"rc": 1, "stdout": '{"error": "depth is wrong"}'}
    [one] = preflight.unmeasured(preflight.gather(options(known), seen), seen)
    assert (one["code"], one["host"], one["seen"]) == ("step-not-measured", "laptop", "depth is wrong")
