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
from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import carrier
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import watch as watching
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import Call
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import run_of

HOUR = 3600.0
NODES = [{"host": name, "rank": rank, "run_dir": "/runs/d4"} for rank, name in enumerate(["node1", "node2"])]


class Machine:
    """The controller's clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.awake, self.slept = 1000.0, 1.7e9
        clocks = SimpleNamespace(time=lambda: self.awake + self.slept, monotonic=lambda: self.awake, sleep=self.work)
        for module in (watching, carrier):
            monkeypatch.setattr(module, "time", clocks)

    def work(self, seconds: float) -> None:
        self.awake += seconds

    def sleep(self) -> None:
        self.slept += HOUR


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(carrier, "program", lambda *dummy: "")
    monkeypatch.setattr(carrier, "python_of", lambda action, variables: ["python3"])
    return Machine(monkeypatch)


class Connection:
    """A connection that may break, and how often it was made again."""

    has_pipelining = True

    def __init__(self) -> None:
        self.dropped = 0

    def close(self) -> None:
        self.dropped += 1

    def reset(self) -> None:
        pass


def made(arguments: dict[str, Any], execute: Any) -> Any:
    """The action of a task whose host is asked by `execute`."""
    task = SimpleNamespace(args=arguments, check_mode=False, delegate_to=None, environment=None)
    action = ActionModule(task, Connection(), None, None, None, None)
    action._low_level_execute_command = lambda *dummy, **more: {"stdout": carrier.MARK + json.dumps(execute())}
    return action


@pytest.fixture
def watch(machine, monkeypatch, tmp_path):
    """`watch(host, execute)`: one poll of a host and its verdict."""
    plan = {"nodes": NODES, "timeout_seconds": 300.0}
    options = {"plan": plan, "is_ours": False, "first_step": False, "patience": 1}

    def poll(host: str, execute: Any) -> dict[str, Any]:
        call = Call(made({}, execute), {"inventory_hostname": host})
        return watching.Watch(call, options, watching.Ledger(tmp_path / "watch")).poll_and_judge()

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


VERBS = [
    ({"verb": "run_info", "run_dir": "/runs/d4"}, training(3)),
    ({"verb": "run_folder", "path": "/runs/d4", "plan": {}}, {"changed": True}),
    (
        {"verb": "run_files", "run_dir": "/runs/d4", "dest": "DEST", "found": {"node1": training(3)}},
        {"run": "d4", "run_dir": "/runs/d4", "files": []},
    ),
]


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(("arguments", "answer"), VERBS, ids=lambda one: one.get("verb", ""))
def test_a_step_whose_connection_broke_meanwhile_asks_once_more(machine, tmp_path, arguments, answer, sleeps):
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
    action = made(given, execute)
    if sleeps:
        result = action.run(task_vars={"inventory_hostname": "node1"})
        assert not result.get("failed"), result
        assert (len(asked), action._connection.dropped) == (2, 1)
    else:
        with pytest.raises(AnsibleConnectionFailure):
            action.run(task_vars={"inventory_hostname": "node1"})
        assert len(asked) == 1
