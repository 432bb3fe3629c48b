# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keepers as processes on this machine, around a stand-in for torchrun that only counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import keeper, membership, rank
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import Keeper, write_keeper, write_plan

PATIENCE = 120
SECRET = "s" * 40
CHANGED = ("--nnodes", "--node-rank", "--rank-rows", "--head", "--tracker")
# Counts on from what it finds, and ends as a trainer does that is asked to.
TORCHRUN = """
import json, os, signal, sys, time
rank, asked = int(next(word[-1] for word in sys.argv if word.startswith("--node-rank="))), []
place = os.environ["NANOCHAT_PLACES"].split(",")[rank]
signal.signal(signal.SIGTERM, lambda *dummy: asked.append(1))
def say(**event):
    with open("metrics-rank%s.jsonl" % place, "a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\\n")
def done():
    try:
        return json.loads(open("metrics-rank%s.jsonl" % place).read().splitlines()[-1])["step"]
    except (OSError, IndexError):
        return -1
step = done()
say(kind="start", step=step, argv=sys.argv)
if os.path.exists("sick"):
    os._exit(9)
while step < 100000:
    time.sleep(0.1)
    step += 1
    say(kind="step", step=step)
    if os.path.exists("spoil"):
        say(kind="end", step=step, reason="error", cause="bad-data", error="the shard is damaged")
        sys.exit(1)
    if os.path.exists("hang-up-rank" + place):
        sys.exit(2)
    if asked:
        say(kind="end", step=step, reason="stopped")
        sys.exit(0)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hosts:
    """Two hosts in folders, each with a keeper."""

    def __init__(self, folder, min_hosts):
        self.folder, self.running = folder, {}
        (folder / "fake/torch/distributed").mkdir(parents=True)
        for name in ("torch/__init__.py", "torch/distributed/__init__.py"):
            (folder / "fake" / name).touch()
        (folder / "fake/torch/distributed/run.py").write_text(TORCHRUN)
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=9", "--master-addr=127.0.0.1"]
        argv += ["--max-restarts=0", "-m", "scripts.base_train", "--", "--depth=4", "--tracker=mlflow"]
        nodes = [
            {"host": host, "rank": number, "address": "127.0.0.1", "rows": 4, "keeper_port": free_port(), "argv": argv}
            for number, host in enumerate(("desktop", "laptop"))
        ]
        self.plan = {
            "timeout_seconds": 60,
            "training": {"rows": [4, 4], "device_batch": 2},
            "keeper": {"min_hosts": min_hosts, "grace_seconds": 1, "restarts": 3},
            "nodes": [{**node, "checkpoint_bytes": 1000} for node in nodes],
        }

    def start(self, host, again=False):
        run_dir = str(self.folder / host)
        if not again:
            write_plan(run_dir, self.plan)
            program = host_code.program(keeper.__name__, "main", run_dir)
            write_keeper(run_dir, Keeper(host, SECRET, program))
        with (self.folder / f"{host}.log").open("ab") as log:
            self.running[host] = subprocess.Popen(
                [sys.executable, "-B", f"{run_dir}/.keeper/keeper.py"], cwd=run_dir, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(self.folder / "fake"), "NANOCHAT_DDP_SESSION": f"{self.folder}-{host}"},
            )  # fmt: skip

    def events(self, host, kind):
        # Whichever rank it has been, the last one last.
        paths = sorted((self.folder / host).glob("metrics-rank*.jsonl"), key=lambda path: path.stat().st_mtime)
        lines = [line for path in paths for line in path.read_text().splitlines() if line.endswith("}")]
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def state(self, host):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / host / "members.json").read_text())
        return {"state": None, "members": []}

    def wait(self, what, condition):
        until = time.monotonic() + PATIENCE
        while not condition():
            logs = {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.log")}
            assert time.monotonic() < until, (what, logs)
            time.sleep(0.1)

    def wait_for_training(self, host, *members):
        def trains():
            state = self.state(host)
            return (state["state"], state["members"]) == (membership.TRAINING, list(members))

        self.wait(f"{host} to train with {members}", trains)
        steps = len(self.events(host, "step"))
        self.wait(f"{host} to make steps", lambda: len(self.events(host, "step")) > steps)

    def trainer(self, host):
        """The pid of the stand-in."""
        return children(self.running[host].pid)[0]

    def close(self):
        for process in self.running.values():
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid):
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


@pytest.fixture
def hosts(tmp_path, request):
    made = Hosts(tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_rank_that_is_killed_is_started_again_with_all(hosts):
    for host in ("desktop", "laptop"):
        hosts.start(host)
    hosts.wait_for_training("laptop", "desktop", "laptop")
    os.kill(hosts.trainer("laptop"), signal.SIGKILL)
    hosts.wait("a second start on both", lambda: all(len(hosts.events(h, "start")) == 2 for h in ("desktop", "laptop")))
    hosts.wait_for_training("desktop", "desktop", "laptop")
    argv = hosts.events("laptop", "start")[1]["argv"]
    assert argv[1:4] == ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"]
    assert "--rank-rows=4,4" in argv
    # A stop that one host is asked for ends both, and nothing starts again.
    (hosts.folder / "desktop/.session").mkdir()
    (hosts.folder / "desktop/.session/stop").touch()
    (hosts.folder / "laptop/.session").mkdir()
    (hosts.folder / "laptop/.session/stop").touch()
    assert [process.wait(PATIENCE) for process in hosts.running.values()] == [0, 0]
    assert [hosts.state(host)["state"] for host in ("desktop", "laptop")] == [membership.STOPPED] * 2


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_an_error_that_would_come_again_ends_the_run_on_all_hosts(hosts):
    for host in ("desktop", "laptop"):
        hosts.start(host)
    hosts.wait_for_training("laptop", "desktop", "laptop")
    (hosts.folder / "laptop/spoil").touch()
    assert [process.wait(PATIENCE) for process in hosts.running.values()] == [1, 1]
    assert [hosts.state(host)["state"] for host in ("desktop", "laptop")] == [membership.FAILED] * 2
    assert hosts.state("laptop")["why"] == "the shard is damaged"
    assert len(hosts.events("desktop", "start")) == 1


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_field_35_a_host_that_is_lost_is_done_without_and_let_in_again(hosts):
    for host in ("desktop", "laptop"):
        hosts.start(host)
    hosts.wait_for_training("laptop", "desktop", "laptop")
    # The master goes.
    os.kill(hosts.trainer("desktop"), signal.SIGKILL)
    hosts.running["desktop"].kill()
    hosts.running["desktop"].wait()
    hosts.wait_for_training("laptop", "laptop")
    argv = hosts.events("laptop", "start")[-1]["argv"]
    assert [word for word in argv if word.startswith(CHANGED)] == [
        "--nnodes=1",
        "--node-rank=0",
        "--rank-rows=8",
        "--tracker=none",
    ]
    hosts.start("desktop", again=True)
    hosts.wait_for_training("desktop", "desktop", "laptop")
    assert hosts.events("laptop", "end")[-1]["reason"] == "stopped"
    # Taken out by hand, the laptop ends and the desktop goes on.
    (hosts.folder / "laptop/.keeper/leave").touch()
    hosts.wait_for_training("desktop", "desktop")
    assert hosts.running["laptop"].wait(PATIENCE) == 0
    assert hosts.state("laptop")["state"] == membership.LEFT


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_a_host_whose_rank_dies_time_and_again_gives_up_alone(hosts):
    for host in ("desktop", "laptop"):
        hosts.start(host)
    hosts.wait_for_training("laptop", "desktop", "laptop")
    (hosts.folder / "laptop/sick").touch()
    os.kill(hosts.trainer("laptop"), signal.SIGKILL)
    assert hosts.running["laptop"].wait(PATIENCE) == 1
    assert hosts.state("laptop")["why"].startswith("the rank of laptop died")
    hosts.wait_for_training("desktop", "desktop")
    assert hosts.running["desktop"].poll() is None


def test_what_a_part_made_that_lost_is_put_aside(tmp_path):
    folder = tmp_path / "base_checkpoints/d4"
    folder.mkdir(parents=True)
    for step in (30, 40):
        for name in (
            f"model_{step:06d}.pt",
            f"meta_{step:06d}.json",
            f"optim_{step:06d}_rank0.pt",
            f"ckpt_{step:06d}_rank0.json",
        ):
            (folder / name).touch()
    (tmp_path / "metrics-rank0.jsonl").write_text('{"kind": "start", "step": 30, "resumed_from": 30}\n')
    plan = {"nodes": [{"host": "desktop", "rank": 0}]}
    moved = rank.Rank(plan, "desktop", str(tmp_path)).set_apart(2)
    assert len(moved) == 4 and all("000040" in name for name in moved)
    assert sorted(path.name for path in folder.iterdir()) == [
        "ckpt_000030_rank0.json", "meta_000030.json", "model_000030.pt", "optim_000030_rank0.pt",
    ]  # fmt: skip
    assert sorted(moved) == sorted(path.name for path in (tmp_path / "apart/generation-2").iterdir())


def test_the_rows_of_a_step_are_dealt_again_among_those_present():
    node = {
        "argv": ["python", "-m", "torch.distributed.run", "--nnodes=3", "--", "--rank-rows=4,2,2"],
        "address": "10.0.0.1",
    }
    plan = {
        "training": {"rows": [4, 2, 2], "device_batch": 2},
        "nodes": [{**node, "host": host, "rows": rows} for host, rows in (("a", 4), ("b", 2), ("c", 2))],
    }
    for members, rows in ((("a", "b", "c"), "4,2,2"), (("a", "c"), "6,2"), (("b", "c"), "4,4"), (("b",), "8")):
        argv = rank.command(plan, members[-1], membership.Generation(3, members))
        assert [word for word in argv if word.startswith("--rank-rows")] == [f"--rank-rows={rows}"]


GOOD_STATE = {
    "launch": "x", "promised": 3, "started": 2, "last": [2, ["a", "b"]], "deaths": [[1.0, 5, ["a"]]], "left": [], "failed": [],
}  # fmt: skip
SPOILT_STATES = [
    {},
    {"launch": "x"}, {**GOOD_STATE, "last": 5}, {**GOOD_STATE, "deaths": [1]}, {**GOOD_STATE, "deaths": 3},
    {**GOOD_STATE, "promised": "soon"}, {**GOOD_STATE, "promised": None}, {**GOOD_STATE, "last": [[], 1]},
    {**GOOD_STATE, "deaths": [["a", {}, []]]}, {**GOOD_STATE, "left": 3}, {**GOOD_STATE, "launch": "y"},
]  # fmt: skip


def remembered(folder: Path, state: object) -> membership.Own:
    """What a keeper that returns takes from its file."""
    (folder / keeper.STATE).write_text(json.dumps(state))
    stub: Any = SimpleNamespace(host="a", folder=str(folder), launch="x", rank=SimpleNamespace(steps=lambda: 7))
    return keeper.Keeper._remembered(stub)


def test_what_was_promised_is_kept(tmp_path: Path) -> None:
    own = remembered(tmp_path, GOOD_STATE)
    assert (own.word.promised, own.word.started, own.last) == (3, 2, membership.Generation(2, ("a", "b")))


@pytest.mark.parametrize("state", SPOILT_STATES)
def test_a_keeper_whose_file_somebody_has_spoilt_begins_nothing_alone(tmp_path: Path, state: dict[str, object]) -> None:
    own = remembered(tmp_path, state)
    same_start = state.get("launch", "x") == "x"
    assert (own.word.promised > 1.7e9, own.word.returned, own.word.steps) == (same_start, same_start, 7)
