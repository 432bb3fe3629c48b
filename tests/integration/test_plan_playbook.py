# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook plan with real ansible-playbook: what it prints, keeps and refuses, and that it touches nothing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS
from ansible_collections.nanochat.ddp.tests.integration.local import free_port
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage

PLAN = "nanochat.ddp.plan"


@pytest.fixture
def stage(tmp_path):
    """Two nodes on this machine."""
    made = Stage(tmp_path, ["one", "two"], ddp_port=free_port())
    made.environment["ANSIBLE_STDOUT_CALLBACK"] = "default"
    return made


def test_the_plan_for_people_and_as_json_is_the_same_twice_and_touches_nothing(stage, tmp_path):
    kept = tmp_path / "plan.json"
    first = stage.play(PLAN, "-e", f"ddp_plan_file={kept}")
    before = json.loads(kept.read_text())
    document = before["plan"]
    assert [node["host"] for node in document["nodes"]] == ["one", "two"]
    assert f"Run d4 on 2 hosts (plan {document['digest']})" in first
    assert "7,340,162 parameters" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.json", "plan.json"]

    second = stage.play(PLAN, "-e", f"ddp_plan_file={kept}", "-e", "ddp_json=true", "--check", "--diff")
    # The same document for programs, and nothing to write again, unless other processes of this machine gave another finding.
    told = json.JSONDecoder().raw_decode(second[second.index('{\n  "plan"') :])[0]
    assert told["plan"] == document
    assert ("changed=1" in second) == (told["findings"] != before["findings"])


def test_a_second_plan_goes_by_what_the_rehearsal_measured(stage, tmp_path):
    """A busy host keeps no file of it, but this start still uses it; the facts of the hosts stay unchanged."""
    kept = tmp_path / "plan.json"
    stage.play(PLAN, "-e", f"ddp_plan_file={kept}")
    before = json.loads(kept.read_text())["plan"]
    assert before["training"]["sync"] == "exact"
    measured = {
        "tokens_per_second": 2000.0, "pass_seconds": 0.5, "adamw_seconds": 0.02, "muon_seconds": 0.1,
        "link": {"mbit": 3.0, "latency_ms": 0.3}, "model": before["model"], "device_batch": before["training"]["device_batch"],
    }  # fmt: skip
    said = "sync {{ ddp_plan.training.sync }}, probe {{ ddp_probe.measured | default('empty', true) }}"
    tasks: list[dict] = [
        {"import_role": {"name": "nanochat.ddp.plan"}},
        {"set_fact": {"__preflight_step": {"measured": measured, "is_new": True}}},
        {"include_role": {"name": "nanochat.ddp.preflight", "tasks_from": "by_measurements"}},
        {"debug": {"msg": said}},
    ]
    told = stage.play([{"tasks": tasks}])
    assert f"sync {list(WAYS)[-1]}, probe empty" in told, told


def test_a_python_on_a_path_that_does_not_run_is_passed_over(stage, tmp_path):
    """pyenv has such shims for every version that any of its environments has."""
    path = shims(tmp_path)
    del stage.usual["ansible_python_interpreter"]
    assert "Run d4 on 2 hosts" in stage.play(PLAN, PATH=path)
    # Looks and modules on the hosts do, too. Where Ansible is started, the Python of its folder is first: a host lacks it.
    tasks = [{"nanochat.ddp.agent": {"verb": "run_info", "base_dir": str(tmp_path)}}, {"ansible.builtin.ping": {}}]
    path = path.replace(str(Path(sys.executable).parent) + ":", "")
    assert stage.play([{"tasks": tasks}], PATH=path).count("ok=2 ") == 2


def shims(folder: Path) -> str:
    """A PATH that begins with Pythons that do not run."""
    place = folder / "shims"
    place.mkdir()
    for name in ("python", *(f"python3.{minor}" for minor in range(7, 20))):
        (place / name).write_text(f"#!/bin/sh\necho 'pyenv: {name}: command not found' >&2\nexit 127\n")
        (place / name).chmod(0o755)
    return f"{place}:{os.environ['PATH']}"
