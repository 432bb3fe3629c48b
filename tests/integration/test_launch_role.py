# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role launch on two hosts of this machine: nothing is stopped in vain, a start is of all hosts or of none, a stop waits for a save."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.tests.integration.local import until
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="sessions run in tmux")
# A stand-in for a trainer that takes its time to save when it is asked to stop.
TRAINER = """
import json, os, signal, sys, time
run, seconds = sys.argv[1], float(sys.argv[2])
def stop(*dummy):
    time.sleep(seconds)
    open(os.path.join(run, "saved"), "w").write("whole")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
metrics = open(os.path.join(run, "metrics-rank" + sys.argv[3] + ".jsonl"), "a", buffering=1)
metrics.write(json.dumps({"kind": "start", "time": time.time(), "step": 0, "steps": 10**6}) + "\\n")
for step in range(10**6):
    time.sleep(0.05)
    metrics.write(json.dumps({"kind": "step", "time": time.time(), "step": step, "loss": 1.0, "seconds": seconds}) + "\\n")
"""


class Launch(Play):
    """Two hosts with a plan whose trainer is the stand-in."""

    def __init__(self, folder: Path, environment: dict[str, str], seconds: float = 0.1) -> None:
        plan: dict[str, Any] = {
            "run": "d4",
            "digest": "one",
            "timeout_seconds": 10,
            "model": {"depth": 4},
            "training": {"resume": True},
            "data": {"id": "text-1"},
        }
        super().__init__(folder, ("a", "b"), plan, environment)
        (folder / "trainer.py").write_text(TRAINER)
        for rank, (name, node) in enumerate(self.hosts.items()):
            argv = [
                sys.executable,
                "-u",
                str(folder / "trainer.py"),
                node["run_dir"],
                str(seconds),
                str(rank),
                "--resume",
            ]
            node.update(
                rank=rank, session=f"nanochat-{folder.name[-20:].replace('.', '-')}-rank{rank}", argv=argv,
                trainer_dir=node["base_dir"], env={"NAME": name}, env_secret=["WORD"],
            )  # fmt: skip
        self.variables = {"ddp_controller": {"fresh": False}, "ddp_secret_env": {"WORD": "secret"}}

    def folder_of(self, name: str) -> Path:
        return Path(self.hosts[name]["run_dir"])

    def session(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder_of(name) / "session.json").read_text()))
        except OSError:
            return {}

    def lives(self, name: str) -> bool:
        told = self.session(name)
        return bool(told) and told["ended"] is None and processes.alive(told["pid"], told["pid_start"])


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    sockets = tmp_path / "tmux"
    sockets.mkdir()
    made = Launch(tmp_path, {"TMUX_TMPDIR": str(sockets)})
    for node in made.hosts.values():
        Path(node["base_dir"]).mkdir()
    yield made
    for name in made.hosts:
        told = made.session(name)
        for one in processes.processes().values():
            if told and one.marker == told["id"]:
                os.kill(one.pid, 9)
    os.system(f"TMUX_TMPDIR={sockets} tmux kill-server 2>/dev/null")


def steps(launch: Launch, name: str) -> int:
    rank = launch.hosts[name]["rank"]
    try:
        return (launch.folder_of(name) / f"metrics-rank{rank}.jsonl").read_text().count('"step"')
    except OSError:
        return 0


@pytest.fixture
def running(launch: Launch) -> Launch:
    account = launch.run("launch")
    assert counts(account, "failures") == {"a": 0, "b": 0}, messages(account)
    until(lambda: steps(launch, "a") > 5 and steps(launch, "b") > 5)
    return launch


def test_a_play_whose_run_another_play_started_anew_fails(running: Launch) -> None:
    running.variables["ddp_controller"] = {"fresh": False, "watch": False}
    for name in "ab":
        (running.folder_of(name) / "plan.json").write_text(json.dumps({**running.plan, "digest": "theirs"}))
    assert messages(running.run("watch")) == []
    account = running.run("watch", "-e", '{"__launch_decided": {}}')
    assert counts(account, "failures") == {"a": 1, "b": 1}
    said = "a: the run d4 goes by another plan now (theirs; this play's is one): another train.yml"
    assert said in messages(account)[0]


def test_a_start_that_cannot_be_made_stops_nothing(running: Launch) -> None:
    ids = {name: running.session(name)["id"] for name in "ab"}
    running.plan["digest"] = "two"
    program = running.hosts["b"]["argv"][0]
    for spoil, words in (
        (lambda: running.hosts["b"].update(argv=["/no/python"]), "/no/python does not exist"),
        (lambda: running.variables.update(ddp_secret_env={"A": "b\0"}), "NUL byte"),
        (lambda: running.plan.update(model={"depth": 8}), "ddp_depth was 4 and is 8 now"),
        (lambda: running.hosts["b"].update(trainer_dir="/no/folder"), "/no/folder does not exist"),
    ):
        before = json.dumps([running.hosts, running.variables, running.plan])
        if words.startswith("ddp_depth"):
            checkpoint = running.folder_of("b") / "base_checkpoints" / "d4" / "meta_000010.json"
            checkpoint.parent.mkdir(parents=True)
            checkpoint.write_text("{}")
        spoil()
        account = running.run("launch")
        assert any(words in text for text in messages(account)), messages(account)
        assert all(running.lives(name) and running.session(name)["id"] == ids[name] for name in "ab"), words
        hosts, running.variables, plan = json.loads(before)
        running.hosts.update(hosts)
        running.plan.clear()
        running.plan.update(plan)
    assert running.hosts["b"]["argv"][0] == program


def test_where_the_newest_run_differs_none_is_stopped_by_a_guess(launch: Launch) -> None:
    for name, run in (("a", "trial"), ("b", "precious")):
        folder = Path(launch.hosts[name]["base_dir"]) / "runs" / run
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
    account = launch.run("launch:stop", "-e", '{"ddp_plan": {}}')
    assert any("(precious, trial), so say which one is meant: -e ddp_run=NAME" in text for text in messages(account))
    assert results(account, "Stop the session") == {}
    account = launch.run("launch:stop", "-e", '{"ddp_plan": {}, "ddp_run": "trial"}')
    assert not any(counts(account, "failures").values()), messages(account)


def test_secrets_are_written_as_the_plan_has_read_them(launch: Launch) -> None:
    launch.variables["ddp_secret_env"] = '{"WORD": true, "NOTHING": null}'
    account = launch.run("launch")
    assert counts(account, "failures") == {"a": 0, "b": 0}, messages(account)
    assert "WORD='true'" in (launch.folder_of("a") / "env").read_text()


def test_where_one_host_cannot_start_the_others_are_stopped_again(launch: Launch) -> None:
    # Its record cannot be written, which shows only in the start itself.
    blocked = launch.folder_of("b") / ".session" / "launch.json"
    blocked.mkdir(parents=True)
    account = launch.run("launch")
    said = " ".join(messages(account))
    assert "b: session" in said and "the other hosts were stopped again" in said, said
    assert "a: stopped again, since b could not start" in said
    assert not launch.lives("a") and not launch.lives("b")
    assert results(account, "Start the session")["a"]["changed"]


def test_field_44_a_stop_waits_as_long_as_a_save_takes(launch: Launch) -> None:
    for node in launch.hosts.values():
        node["argv"][4] = "6"
    launch.run("launch")
    until(lambda: steps(launch, "a") > 3 and steps(launch, "b") > 3)
    account = launch.run("launch:stop")
    assert counts(account, "failures") == {"a": 0, "b": 0}, messages(account)
    for name in "ab":
        assert (launch.folder_of(name) / "saved").read_text() == "whole"
        assert launch.session(name)["exit_code"] == 0
