# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller sleeps for an hour in the middle of a task: its monotonic clock stops, the time of day does not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action import (
    env_file,
    run_files,
    run_folder,
    run_info,
    run_watch,
    tmux_session,
)
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _company, _look
from ansible_collections.nanochat.ddp.plugins.plugin_utils._company import Ledger
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import run_of

HOUR = 3600.0
NODES = [{"host": name, "rank": rank, "run_dir": "/runs/d4"} for rank, name in enumerate(["node1", "node2"])]


class Machine:
    """The controller's clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.awake, self.slept = 1000.0, 1.7e9
        clocks = SimpleNamespace(time=lambda: self.awake + self.slept, monotonic=lambda: self.awake, sleep=self.work)
        for module in (run_watch, _company, _look):
            monkeypatch.setattr(module, "time", clocks)

    def work(self, seconds: float) -> None:
        self.awake += seconds

    def sleep(self) -> None:
        self.slept += HOUR


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(_look, "program", lambda code, params: "")
    monkeypatch.setattr(_look, "python_of", lambda action, variables: ["python3"])
    return Machine(monkeypatch)


class Connection:
    """A connection that may break, and how often it was made again."""

    has_pipelining = True
    _shell = SimpleNamespace(tmpdir="/tmp/x")

    def __init__(self) -> None:
        self.dropped = 0

    def close(self) -> None:
        self.dropped += 1

    def reset(self) -> None:
        pass


def made(module: Any, arguments: dict[str, Any], execute: Any) -> Any:
    """The action of a module whose host is asked by `execute`."""
    task = SimpleNamespace(args=arguments, check_mode=False, delegate_to=None, diff=False)
    action = module.ActionModule(task, Connection(), None, None, None, None)
    action._low_level_execute_command = lambda *dummy, **more: {"stdout": _look.MARK + json.dumps(execute())}
    action.get_shell_option = lambda name, default=None: default
    action._execute_module = lambda *dummy, **more: execute()
    return action


@pytest.fixture
def watch(machine, monkeypatch, tmp_path):
    """`watch(host, execute)`: one poll of a host and its verdict."""
    monkeypatch.setattr(run_watch, "ledger_of", lambda action, name: Ledger(tmp_path / name))

    def poll(host: str, execute: Any) -> dict[str, Any]:
        action = made(run_watch, {"nodes": NODES, "timeout": 300.0}, execute)
        return dict(action._poll_and_judge(host, {"inventory_hostname": host}))

    return poll


def training(step: int) -> dict[str, Any]:
    return {"run": run_of(None, step=step, run_dir="/runs/d4", trainer="ours")}


def broken() -> None:
    raise AnsibleConnectionFailure("Connection reset by peer")


@pytest.mark.parametrize("broken_polls", [1, 5])
def test_the_watch_goes_on_after_it(machine, watch, broken_polls):
    def break_off() -> None:
        machine.sleep()
        broken()

    for step in range(3):
        assert [watch(host, lambda step=step: training(step))["over"] for host in ("node1", "node2")] == [False, False]
        machine.work(5)
    # The network is not back at once.
    for attempt in range(broken_polls):
        seen = [watch(host, broken if attempt else break_off) for host in ("node1", "node2")]
        assert [(one["over"], one["reachable"], one["verdict"]) for one in seen] == [(False, False, None)] * 2
    again = [watch(host, lambda: training(4000)) for host in ("node1", "node2")]
    assert [(one["over"], one["reachable"]) for one in again] == [(False, True)] * 2


def test_an_hour_of_silence_while_it_is_awake_is_the_hosts(machine, watch):
    def both(second: Any) -> list[dict[str, Any]]:
        return [watch("node1", lambda: training(3)), watch("node2", second)]

    both(lambda: training(3))
    assert not both(broken)[1]["over"]
    machine.work(HOUR)
    told = both(broken)[1]
    assert (told["over"], told["verdict"]) == (True, "lost")


ACTIONS = [
    (run_info, {"run_dir": "/runs/d4"}, training(3)),
    (run_folder, {"path": "/runs/d4", "plan": {}}, {"changed": True}),
    (env_file, {"path": "/runs/d4/env", "env": {}}, {"changed": True}),
    (tmux_session, {"name": "d4", "state": "stopped", "state_dir": "/runs/d4"}, {"changed": True}),
    (run_files, {"run_dir": "/runs/d4", "dest": "DEST"}, {"run": "d4", "pieces": [], "whole": []}),
]


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(
    ("module", "arguments", "answer"), ACTIONS, ids=lambda one: getattr(one, "__name__", "").rpartition(".")[2]
)
def test_a_step_whose_connection_broke_meanwhile_asks_once_more(machine, tmp_path, module, arguments, answer, sleeps):
    asked = []

    def execute() -> Any:
        asked.append(1)
        if len(asked) == 1:
            machine.work(30)
            if sleeps:
                machine.sleep()
            broken()
        return answer

    given = {name: str(tmp_path) if value == "DEST" else value for name, value in arguments.items()}
    action = made(module, given, execute)
    if sleeps:
        result = action.run(task_vars={"inventory_hostname": "node1"})
        assert not result.get("failed"), result
        assert (len(asked), action._connection.dropped) == (2, 1)
    else:
        with pytest.raises(AnsibleConnectionFailure):
            action.run(task_vars={"inventory_hostname": "node1"})
        assert len(asked) == 1
