# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A look at a run over a real connection, by bare code that costs the host little."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import signed
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import ansible, one_line

STEPS = 5000


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base folder with a run of many steps."""
    begun = time.time() - STEPS / 2
    run = tmp_path / "runs" / "d4"
    fake_run.write_history(run, fake_run.history(0, 1, STEPS, begun), 0)
    fake_run.write_json(run / "session.json", fake_run.session_of(0, begun, ended=time.time(), exit_code=0))
    return tmp_path


def ask(base: Path, *words: str, python: str = sys.executable, **more: Any) -> dict[str, Any]:
    """run_info by the command line, as the one host of an inventory."""
    arguments = json.dumps({"verb": "run_info", "base_dir": str(base), "lines": 2, **more})
    argv = ["all", "-i", "host,", "-c", "local", "-m", "nanochat.ddp.agent", "-a", arguments, *words]
    argv += ["-e", f"ansible_python_interpreter={python}"]
    shown = {"ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    done = ansible("ansible", *argv, HOME=str(base), **shown)
    answer: dict[str, Any] = json.loads(done.stdout.partition("=> ")[2])
    return answer


def test_paths_are_those_of_the_host(base: Path) -> None:
    told = ask(base, base_dir="~")["run"]
    assert (told["run"], told["last_lines"]) == ("d4", ["step 00018", "step 00019"])


def test_the_deployed_plan_is_told_as_it_was_written_or_not_at_all(base: Path) -> None:
    path = base / "runs" / "d4" / "plan.json"
    plan = signed({"format": 1, "run": "d4", "nodes": [{"host": "here", "share": 0.5}]})
    fake_run.write_json(path, plan)
    assert ask(base, plan=True)["plan"] == plan
    assert "plan" not in ask(base)
    for spoilt in ('{"format": 1, "nod', "[]", json.dumps({**plan, "nodes": []})):
        path.write_text(spoilt)
        assert ask(base, plan=True)["plan"] == {}
    path.unlink()
    assert ask(base, plan=True)["plan"] == {} == ask(base / "elsewhere", plan=True)["plan"]


@pytest.mark.parametrize(
    "name, words, told",
    [
        ("join", ["-e", "target=host"], "runs/d4/plan.json is missing or damaged; start it with ddp_restarts by train.yml"),
        ("doctor", [], "No host that answers has a run with its plan (plan.json, undamaged) below its base folder"),
        ("chat", ["-e", "prompt=Hello"], "runs/d4/plan.json is missing or damaged, and it says how the trainer is started; train.yml"),
    ],
)  # fmt: skip
def test_a_damaged_plan_is_named_by_what_needs_it(base: Path, name: str, words: list[str], told: str) -> None:
    (base / "runs" / "d4" / "plan.json").write_text('{"format": 1, "nod')
    (base / "runs/d4/base_checkpoints/d4").mkdir(parents=True)
    (base / "runs/d4/base_checkpoints/d4/meta_000040.json").write_text("{}")
    argv = [f"nanochat.ddp.{name}", "-i", "host,", "-c", "local", *words]
    argv += ["-e", f"ansible_python_interpreter={sys.executable}", "-e", f"ddp_base_dir={base}", "-e", "target=all"]
    done = ansible("ansible-playbook", *argv, HOME=str(base), ANSIBLE_STDOUT_CALLBACK="default")
    assert done.returncode != 0
    assert told in one_line(done.stdout), done.stdout


def test_a_host_without_python_is_told_of(base: Path) -> None:
    assert "/no/such/python" in json.dumps(ask(base, python="/no/such/python"))
