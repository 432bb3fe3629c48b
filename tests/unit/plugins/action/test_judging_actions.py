# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The actions that judge: missing evidence is an error, and what differs is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action import data_agreement, launch_decision, trainer_agreement

PLAN = {
    "digest": "d1",
    "master": {"host": "desktop"},
    "nodes": [{"host": "desktop", "run_dir": "/d/runs/d4"}, {"host": "laptop", "run_dir": "/l/runs/d4"}],
}


@pytest.fixture
def judge(monkeypatch):
    """An action with these options, without Ansible around it."""

    def run(action: Any, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
        module = action.ActionModule.__new__(action.ActionModule)
        module._task = SimpleNamespace(args=options, check_mode=False)
        spec = module.OPTIONS
        defaults = {name: one.get("default") for name, one in spec.items()}
        monkeypatch.setattr(
            module, "validate_argument_spec", lambda dummy: (None, {**defaults, **options}), raising=False
        )
        return dict(module.run(None, {}))

    return run


def run_of(state: str, digest: str = "d1") -> dict[str, Any]:
    return {"run": {"state": state, "plan_digest": digest}}


def test_a_run_under_the_same_plan_is_kept_and_any_other_started(judge):
    both = {"desktop": run_of("running"), "laptop": run_of("running")}
    assert judge(launch_decision, plan=PLAN, evidence=both)["decision"] == "keep"
    assert judge(launch_decision, plan=PLAN, evidence=both, restart=True)["decision"] == "start"
    other = {**both, "laptop": run_of("running", "d2")}
    told = judge(launch_decision, plan=PLAN, evidence=other)
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
def test_only_what_runs_or_has_finished_on_every_host_is_left_alone(judge, states, options, decision):
    evidence = {host: run_of(state) for host, state in zip(("desktop", "laptop"), states, strict=True)}
    told = judge(launch_decision, plan=PLAN, evidence=evidence, **options)
    assert told["decision"] == decision
    assert ("ddp_fresh=true" in told["reason"]) == (decision == "keep")


@pytest.mark.parametrize("evidence", [{"desktop": run_of("running")}, {"desktop": run_of("running"), "laptop": {}}])
def test_a_host_without_evidence_is_never_taken_for_one_where_nothing_was_found(judge, evidence):
    with pytest.raises(AnsibleError, match=r"no evidence.* of laptop"):
        judge(launch_decision, plan=PLAN, evidence=evidence)
    with pytest.raises(AnsibleError, match=r"no evidence.* of laptop"):
        judge(data_agreement, hosts=["desktop", "laptop"], master="desktop", evidence={"desktop": {"digest": "x"}})


def test_a_host_that_reads_other_files_is_named(judge):
    same = {"desktop": {"digest": "x"}, "laptop": {"digest": "x"}}
    assert not judge(data_agreement, hosts=["desktop", "laptop"], master="desktop", evidence=same)["failed"]
    told = judge(
        data_agreement, hosts=["desktop", "laptop"], master="desktop", evidence={**same, "laptop": {"digest": "y"}}
    )
    assert told["failed"] and told["msg"].startswith(
        "laptop reads other files than desktop: y in its run folder, x there."
    )


def venv(torch: str = "2.13.0+cpu", python: str = "3.11", **packages: str) -> dict[str, Any]:
    return {"venv": "/venv", "torch": torch, "python_version": python, "packages": {"torch": torch, **packages}}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (venv("2.13.0"), ""),
        (
            venv("2.12.0"),
            "laptop has torch 2.12.0, desktop has torch 2.13.0; ranks of different versions would disagree.",
        ),
        (venv(pyarrow="25"), ""),
        (venv(python="3.12", pyarrow="25"), ""),
    ],
)
def test_hosts_need_the_same_packages(judge, other, message):
    hosts = ["desktop", "laptop"]
    files = {host: {"digest": "f"} for host in hosts}
    told = judge(trainer_agreement, hosts=hosts, files=files, venvs={"desktop": venv(), "laptop": other})
    assert told["failed"] == bool(message) and str(told.get("msg", "")).startswith(message)


def test_only_packages_of_which_versions_differ_are_told(judge):
    hosts = ["desktop", "laptop"]
    words = {"hosts": hosts, "files": {host: {"digest": "f"} for host in hosts}}
    more = judge(
        trainer_agreement,
        **words,
        venvs={"desktop": venv(numpy="2.4.6"), "laptop": venv(pyarrow="26.0.1", numpy="2.4.6")},
    )
    assert not more["failed"]
    told = judge(
        trainer_agreement,
        **words,
        venvs={"desktop": venv(numpy="2.4.6"), "laptop": venv(pyarrow="26.0.1", numpy="2.3.0")},
    )
    assert told["msg"].startswith("laptop has numpy 2.3.0, desktop has numpy 2.4.6; ranks of different versions")


def test_hosts_need_the_same_trainer_files(judge):
    hosts = ["desktop", "laptop"]
    files = {"desktop": {"digest": "f"}, "laptop": {"digest": "g"}}
    told = judge(trainer_agreement, hosts=hosts, files=files, venvs={host: venv() for host in hosts})
    assert told["failed"] and told["msg"].startswith("laptop has other trainer files than desktop")
