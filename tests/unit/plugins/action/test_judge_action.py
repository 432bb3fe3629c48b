# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action that judges: missing evidence is an error, differences are named, and the verdict is kept in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleError

PLAN = {
    "run": "d4",
    "digest": "d1",
    "master": {"host": "desktop"},
    "nodes": [{"host": "desktop", "run_dir": "/d/runs/d4"}, {"host": "laptop", "run_dir": "/l/runs/d4"}],
}


def run_of(state: str, digest: str = "d1") -> dict[str, Any]:
    return {"run": {"state": state, "plan_digest": digest}}


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
    with pytest.raises(AnsibleError, match=r"no evidence.* from laptop"):
        agent("judge_launch", plan=PLAN, evidence=evidence)
    with pytest.raises(AnsibleError, match=r"no evidence.* from laptop"):
        agent("judge_sameness", hosts=HOSTS, master="desktop", data={"desktop": {"digest": "x"}})


HOSTS = ["desktop", "laptop"]
FILES = {host: {"digest": "f"} for host in HOSTS}


def test_a_host_that_reads_other_files_is_named(agent):
    same = {host: {"digest": "x"} for host in HOSTS}
    assert not agent("judge_sameness", hosts=HOSTS, master="desktop", data=same)["failed"]
    told = agent("judge_sameness", hosts=HOSTS, master="desktop", data={**same, "laptop": {"digest": "y"}})
    assert told["failed"] and told["msg"].startswith(
        "laptop reads different files from desktop: y in its run folder, x there."
    )


def venv(torch: str = "2.13.0+cpu", python: str = "3.11", **packages: str) -> dict[str, Any]:
    return {"venv": "/venv", "torch": torch, "python_version": python, "packages": {"torch": torch, **packages}}


DISAGREE = "ranks of different versions would disagree."


@pytest.mark.parametrize(
    ("desktop", "laptop", "message"),
    [
        (venv(), venv("2.13.0"), ""),
        (venv(), venv("2.12.0"), f"laptop has torch 2.12.0, desktop has torch 2.13.0; {DISAGREE}"),
        (venv(), venv(pyarrow="25"), ""),
        (venv(), venv(python="3.12", pyarrow="25"), ""),
        (venv(numpy="2.4.6"), venv(pyarrow="26.0.1", numpy="2.4.6"), ""),
        # Only packages whose versions differ are named.
        (
            venv(numpy="2.4.6"),
            venv(pyarrow="26.0.1", numpy="2.3.0"),
            f"laptop has numpy 2.3.0, desktop has numpy 2.4.6; {DISAGREE}",
        ),
    ],
)
def test_hosts_need_the_same_packages(agent, desktop, laptop, message):
    told = agent("judge_sameness", hosts=HOSTS, files=FILES, venv={"desktop": desktop, "laptop": laptop})
    assert told["failed"] == bool(message) and str(told.get("msg", "")).startswith(message)


def test_hosts_need_the_same_trainer_files(agent):
    files = {**FILES, "laptop": {"digest": "g"}}
    told = agent("judge_sameness", hosts=HOSTS, files=files, venv={host: venv() for host in HOSTS})
    assert told["failed"] and told["msg"].startswith("laptop has different trainer files from desktop")


DIAGNOSED = {
    "run": "d4",
    "master": {"host": "a", "address": "10.0.0.1", "port": 29500},
    "nodes": [
        {"host": "a", "rank": 0, "nic": "eth0", "env": {"MY_TOKEN": "hunter2!"}},
        {"host": "b", "rank": 1, "nic": "eth0"},
    ],
}
DONE = {"evidence": {"run": {"state": "finished", "step": 9, "last_lines": ["login with s3cr3t"]}}}


def test_a_verdict_is_returned_and_all_of_it_kept_without_secrets(agent, tmp_path):
    path = tmp_path / "runs" / "doctor.json"
    told = agent(
        "judge_verdict", plan=DIAGNOSED, evidence={"a": DONE, "b": DONE}, secrets=[{"KEY": "s3cr3t"}], file=str(path)
    )
    assert told["verdict"]["code"] == "not-running" and told["changed"] is False
    assert told["text"].startswith("not-running: No rank runs") and str(path) in told["text"]
    assert path.stat().st_mode & 0o777 == 0o600
    kept = path.read_text()
    assert json.loads(kept)["verdict"] == told["verdict"] and "s3cr3t" not in kept and "hunter2" not in kept


def test_a_verdict_takes_evidence_of_every_host(agent):
    with pytest.raises(AnsibleError, match="no evidence, not even a failed one, from b"):
        agent("judge_verdict", plan=DIAGNOSED, evidence={"a": DONE})


def test_a_folder_in_which_the_verdict_cannot_be_kept_is_told(agent, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(AnsibleError, match="could not be written"):
        agent(
            "judge_verdict",
            plan=DIAGNOSED,
            evidence={"a": DONE, "b": DONE},
            file=str(tmp_path / "runs" / "doctor.json"),
        )


def test_options_of_another_judgement_are_refused(agent):
    with pytest.raises(AnsibleError, match=r"restart\. Supported parameters include: hosts, tolerant"):
        agent("read_questions", hosts=["desktop"], restart=True)
