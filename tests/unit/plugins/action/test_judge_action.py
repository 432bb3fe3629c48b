# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgements of a launch and of the doctor: missing evidence is an error, differences are named, and the verdict is kept in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import decode
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.evidence import RankEvidence
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY

PLAN = {
    "run": "d4",
    "digest": "d1",
    "master": {"host": "desktop"},
    "nodes": [{"host": "desktop", "run_dir": "/d/runs/d4"}, {"host": "laptop", "run_dir": "/l/runs/d4"}],
}


def run_of(state: str, digest: str = "d1") -> dict[str, Any]:
    return {"run": {"state": state, "plan_digest": digest, "stop_seconds": None}}


def test_a_run_under_the_same_plan_is_kept_and_any_other_started(agent):
    both = {"desktop": run_of("running"), "laptop": run_of("running")}
    assert agent("judge_launch", plan=PLAN, evidence=both)["decision"] == "keep"
    assert agent("judge_launch", plan=PLAN, evidence=both, restart=True)["decision"] == "start"
    other = {**both, "laptop": run_of("running", "d2")}
    told = agent("judge_launch", plan=PLAN, evidence=other)
    assert (told["decision"], told["changed"]) == ("start", False) and "plan is new" in told["reason"]


@pytest.mark.parametrize(
    ("states", "options", "decision"),
    [
        (("finished", "finished"), {}, "keep"),
        (("finished", "finished"), {"fresh": True}, "start"),
        (("finished", "finished"), {"restart": True}, "keep"),
        (("finished", "away"), {}, "keep"),
        (("finished", "stopped"), {"restart": True}, "start"),
        (("running", "running"), {"fresh": True}, "start"),
        (("running", "crashed"), {}, "start"),
        (("finished", "running"), {}, "start"),
        (("absent", "absent"), {}, "start"),
        (("stopped", "stopped"), {}, "start"),
    ],
)
def test_only_what_runs_or_has_finished_on_every_host_is_left_alone(agent, states, options, decision):
    evidence = {host: run_of(state) for host, state in zip(("desktop", "laptop"), states, strict=True)}
    told = agent("judge_launch", plan=PLAN, evidence=evidence, **options)
    assert told["decision"] == decision
    assert ("ddp_fresh=true" in told["reason"]) == (decision == "keep")


@pytest.mark.parametrize("evidence", [{"desktop": run_of("running")}, {"desktop": run_of("running"), "laptop": {}}])
def test_a_host_without_evidence_is_never_taken_for_one_where_nothing_was_found(agent, evidence):
    with pytest.raises(AnsibleError, match="no evidence about the run from laptop"):
        agent("judge_launch", plan=PLAN, evidence=evidence)


DIAGNOSED = {
    "run": "d4",
    "master": {"host": "a", "address": "10.0.0.1", "port": 29500},
    "nodes": [
        {"host": "a", "rank": 0, "nic": "eth0", "env": {"MY_TOKEN": "hunter2!"}},
        {"host": "b", "rank": 1, "nic": "eth0"},
    ],
}
MACHINE = {"cpus": 1, "load1": 0.0, "memory_available": 0}
# One secret is a part of another, and one is a word.
SECRETS = {"SHORT": "s3cr", "WANDB_API_KEY": "s3cr3t", "FLAG": "yes"}
OVER = {"state": "finished", "step": 9, "last_lines": ["login with s3cr3t, s3cr and yes failed"]}
FOUND = {"rank": 0, "run": {**EMPTY, **OVER}, "links": {}, "system": MACHINE, "others": [], "kernel": []}
DONE = {"evidence": decode(RankEvidence, FOUND)}


def test_a_verdict_is_returned_and_all_of_it_kept_without_secrets(agent, tmp_path):
    known = {"hostvars": {"a": {"ddp_secret_env": SECRETS}, "b": {}}, "groups": {"all": ["a"]}}
    told = agent("judge_verdict", known, plan=DIAGNOSED, evidence={"a": DONE, "b": DONE}, results_dir=str(tmp_path))
    path = tmp_path / "d4" / "doctor.json"
    assert told["verdict"]["code"] == "not-running" and told["changed"] is False
    assert "rank 1 (b) cannot be reached: it is not in this inventory" in told["lines"][0]
    assert told["lines"][-1] == f"  full evidence: {path}"
    assert path.stat().st_mode & 0o777 == 0o600
    kept = json.loads(path.read_text())
    assert kept["verdict"] == told["verdict"] and "hunter2" not in str(kept)
    assert kept["hosts"]["a"]["run"]["last_lines"] == ["login with ***, *** and yes failed"]
    assert all(set(node) == {"host", "rank", "nic"} for node in kept["plan"]["nodes"])
    silent = {"failed": True, "msg": "Timed out after 25 second(s).", "timedout": {"period": 25}}
    known["groups"]["all"] = ["a", "b"]
    agent("judge_verdict", known, plan=DIAGNOSED, evidence={"a": DONE, "b": silent}, results_dir=str(tmp_path))
    assert json.loads(path.read_text())["hosts"]["b"] == "did not answer within 25 s"
