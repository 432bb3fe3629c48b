# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keepers as processes on this machine, around a stand-in for the trainer that only counts."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import keeper_states as states
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import KEEPER_MEMORY
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import keeper, membership
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import KeeperSetup, write_keeper, write_plan
from ansible_collections.nanochat.ddp.tests.integration.local import free_port

ROOT = Path(__file__).resolve().parents[5]
PATIENCE = 120
SECRET = "s" * 40
CHANGED = ("--rank-rows", "--head", "--tracker")
# Continues to count from its metrics, and ends like a trainer when asked to.
TRAINER = """
import json, os, signal, sys, time
if __name__ != "__main__":
    raise ImportError  # it is loaded first, to be forked
rank, asked = int(os.environ["RANK"]), []
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
meets = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")]
say(kind="start", step=step, argv=sys.argv, meets=meets)
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


# The parts of a plan that a keeper reads, besides the nodes.
PLAN: dict[str, Any] = {
    "world": 2, "timeout_seconds": 60, "master": {"host": "desktop", "address": "127.0.0.1", "port": 29500},
    "trainer": {"script": "scripts.base_train"}, "training": {"rows": [4, 4], "device_batch": 2, "iterations": 100000},
    "keeper": {"min_hosts": 1, "grace_seconds": 1, "restarts": 3},
}  # fmt: skip


def write_trainer(folder: Path) -> dict[str, str]:
    """Put the stand-in and a Python where a plan's command looks for them; returns that part of a node."""
    for place in ("fake/scripts", "venv/bin"):
        (folder / place).mkdir(parents=True)
    (folder / "fake/scripts/__init__.py").touch()
    (folder / "fake/scripts/base_train.py").write_text(TRAINER)
    (folder / "fake/scripts/preloaded.py").symlink_to(ROOT / "trainer/scripts/preloaded.py")
    (folder / "venv/bin/python").symlink_to(sys.executable)
    return {"venv_dir": str(folder / "venv"), "trainer_dir": str(folder / "fake")}


class Hosts:
    """Two hosts in folders, each with a keeper."""

    def __init__(self, folder):
        self.folder, self.running = folder, {}
        same = {**write_trainer(folder), "address": "127.0.0.1", "rows": 4, "flags": {"depth": 4, "tracker": "mlflow"}}
        nodes = [
            {**same, "host": host, "rank": rank, "keeper_port": free_port(), "checkpoint_bytes": 1000}
            for rank, host in enumerate(("desktop", "laptop"))
        ]
        self.plan = {**copy.deepcopy(PLAN), "nodes": nodes}

    def start(self, host, again=False, below=()):
        """Start a keeper, as a child of this process or below another program."""
        run_dir = str(self.folder / host)
        if not again:
            write_plan(run_dir, self.plan)
            program = host_code.program(keeper.__name__, "main", run_dir)
            write_keeper(run_dir, KeeperSetup(host, SECRET, program))
        with (self.folder / f"{host}.log").open("ab") as log:
            self.running[host] = subprocess.Popen(
                [*below, sys.executable, "-B", f"{run_dir}/.keeper/keeper.py"], cwd=run_dir, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(self.folder / "fake"), "NANOCHAT_DDP_SESSION": f"{self.folder}-{host}",
                     "NANOCHAT_MACHINE": str(self.folder / "machine")},
            )  # fmt: skip

    def be_guest(self, host):
        """A guest on a laptop in a folder, plugged in."""
        (node,) = (node for node in self.plan["nodes"] if node["host"] == host)  # type: ignore[attr-defined]
        node["guest"] = {"hours": None, "away_if": None}
        self.battery = self.folder / "machine/sys/class/power_supply/BAT0"
        self.battery.mkdir(parents=True)
        self.plug(True)

    def plug(self, is_in):
        (self.battery / "status").write_text("Charging" if is_in else "Discharging")

    def events(self, host, kind):
        # Of all ranks that it has had, the last one last.
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
            return (state["state"], state["members"]) == (states.TRAINING, list(members))

        self.wait(f"{host} to train with {members}", trains)
        steps = len(self.events(host, "step"))
        self.wait(f"{host} to make steps", lambda: len(self.events(host, "step")) > steps)

    def train_together(self, min_hosts=1):
        """Start both hosts, and wait until they train."""
        self.plan["keeper"]["min_hosts"] = min_hosts
        for host in ("desktop", "laptop"):
            self.start(host)
        self.wait_for_training("laptop", "desktop", "laptop")

    def stop(self, host):
        """As a user stops the session."""
        (self.folder / host / ".session").mkdir()
        (self.folder / host / ".session/stop").touch()

    def trainer(self, host):
        """The pid of the stand-in."""
        return below(self.running[host].pid)[-1]

    def close(self):
        for process in self.running.values():
            for pid in [*below(process.pid), process.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid):
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def below(pid):
    """All descendants: a keeper has the preloaded trainer, and what that has forked."""
    return [one for child in children(pid) for one in (child, *below(child))]


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    made.close()


def test_an_error_that_would_come_again_ends_the_run_on_all_hosts(hosts):
    hosts.train_together(min_hosts=2)
    (hosts.folder / "laptop/spoil").touch()
    assert [process.wait(PATIENCE) for process in hosts.running.values()] == [1, 1]
    assert [hosts.state(host)["state"] for host in ("desktop", "laptop")] == [states.FAILED] * 2
    assert hosts.state("laptop")["why"] == "the shard is damaged"
    assert len(hosts.events("desktop", "start")) == 1


def test_a_keeper_whose_session_was_killed_ends_and_its_rank_with_it(hosts):
    hosts.start("desktop")
    hosts.start("laptop", below=[sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"])
    hosts.wait_for_training("laptop", "desktop", "laptop")
    keeper_pid = children(hosts.running["laptop"].pid)[0]
    rank = below(keeper_pid)[-1]
    hosts.running["laptop"].kill()
    hosts.wait("the keeper to end", lambda: not any(processes.alive(pid, None) for pid in (keeper_pid, rank)))
    state = hosts.state("laptop")
    assert (state["state"], state["why"]) == (states.AWAY, "the session of laptop was killed")
    hosts.wait_for_training("desktop", "desktop")


def test_a_keeper_that_cannot_write_promises_nothing_and_goes_on_when_it_can(hosts):
    hosts.train_together(min_hosts=2)
    folder, away = hosts.folder / "laptop/.keeper", hosts.folder / "laptop/away"
    promised = json.loads((folder / KEEPER_MEMORY).read_text())["promised"]
    folder.rename(away)
    os.kill(hosts.trainer("laptop"), signal.SIGKILL)
    log = hosts.folder / "laptop.log"
    hosts.wait("a word about it", lambda: "keeper: cannot write" in log.read_text())
    assert hosts.running["laptop"].poll() is None
    assert json.loads((away / KEEPER_MEMORY).read_text())["promised"] == promised
    away.rename(folder)
    hosts.wait("a second start", lambda: len(hosts.events("laptop", "start")) == 2)
    assert log.read_text().count("keeper: cannot write") == 1
    assert json.loads((folder / KEEPER_MEMORY).read_text())["promised"] > promised


@pytest.mark.long
def test_field_35_a_host_that_is_lost_is_done_without_and_let_in_again(hosts):
    hosts.train_together()
    # The master goes.
    os.kill(hosts.trainer("desktop"), signal.SIGKILL)
    hosts.running["desktop"].kill()
    hosts.running["desktop"].wait()
    hosts.wait_for_training("laptop", "laptop")
    start = hosts.events("laptop", "start")[-1]
    assert {word for word in start["argv"] if word.startswith(CHANGED)} == {"--rank-rows=8", "--tracker=none"}
    assert start["meets"][:2] == ["0", "1"]
    hosts.start("desktop", again=True)
    hosts.wait_for_training("desktop", "desktop", "laptop")
    assert hosts.events("laptop", "end")[-1]["reason"] == "stopped"
    # Taken out by hand, the laptop ends and the desktop goes on.
    (hosts.folder / "laptop/.keeper/leave").touch()
    hosts.wait_for_training("desktop", "desktop")
    assert hosts.running["laptop"].wait(PATIENCE) == 0
    assert hosts.state("laptop")["state"] == states.LEFT


@pytest.mark.long
def test_a_guest_leaves_within_seconds_saves_and_comes_back(hosts):
    hosts.be_guest("laptop")
    hosts.train_together()
    begun = time.monotonic()
    hosts.plug(False)
    hosts.wait("the laptop to leave", lambda: hosts.state("laptop")["state"] == states.RESTING)
    # Two seconds, and the time in which a busy machine ends a process.
    assert time.monotonic() - begun < 8
    assert hosts.events("laptop", "end")[-1]["reason"] == "stopped"
    assert hosts.state("laptop")["why"] == "on battery; back when plugged in"
    hosts.wait_for_training("desktop", "desktop")
    # By hand, though it is still on battery; then by itself.
    (hosts.folder / "laptop/.keeper/join").touch()
    hosts.wait_for_training("laptop", "desktop", "laptop")
    told = [json.loads(line) for line in (hosts.folder / "laptop/members.jsonl").read_text().splitlines()]
    starts = [one["why"] for one in told if one["what"] == states.TRAINING]
    assert not any("battery" in why for why in starts), starts
    hosts.plug(True)
    hosts.wait("a reading", lambda: not (hosts.folder / "laptop/.keeper/join").exists())
    (hosts.folder / "laptop/.keeper/leave").touch()
    assert hosts.running["laptop"].wait(PATIENCE) == 0
    hosts.wait_for_training("desktop", "desktop")


GOOD_STATE = {
    "launch": "x", "promised": 3, "last": [2, ["a", "b"]], "deaths": [[1.0, 5, ["a"]]], "left": [], "failed": [],
}  # fmt: skip
SPOILT_STATES = [
    {},
    {"launch": "x"}, {**GOOD_STATE, "last": 5}, {**GOOD_STATE, "deaths": [1]}, {**GOOD_STATE, "deaths": 3},
    {**GOOD_STATE, "promised": "soon"}, {**GOOD_STATE, "promised": None}, {**GOOD_STATE, "last": [[], 1]},
    {**GOOD_STATE, "deaths": [["a", {}, []]]}, {**GOOD_STATE, "left": 3}, {**GOOD_STATE, "launch": "y"},
]  # fmt: skip


def remembered(folder: Path, state: object) -> membership.OwnState:
    """The state that a returning keeper reads from its file."""
    (folder / KEEPER_MEMORY).write_text(json.dumps(state))
    stub: Any = SimpleNamespace(
        host="a", folder=str(folder), launch="x", boot="1", rank=SimpleNamespace(steps=lambda: 7)
    )
    return keeper.Keeper._remembered(stub)


@pytest.mark.parametrize("state", SPOILT_STATES)
def test_a_keeper_whose_file_somebody_has_spoilt_begins_nothing_alone(tmp_path: Path, state: dict[str, object]) -> None:
    own = remembered(tmp_path, GOOD_STATE)
    assert (own.public.promised, own.public.started, own.public.last) == (3, 2, membership.Generation(2, ("a", "b")))
    own = remembered(tmp_path, state)
    same_start = state.get("launch", "x") == "x"
    assert (own.public.promised > 1.7e9, own.public.returned, own.public.steps) == (same_start, same_start, 7)


def test_a_rank_starts_by_itself_where_its_preloaded_trainer_was_killed_and_a_new_one_is_made(hosts):
    hosts.train_together(min_hosts=2)
    for pid in below(hosts.running["laptop"].pid):
        os.kill(pid, signal.SIGKILL)
    hosts.wait("another generation", lambda: hosts.state("laptop")["generation"] > 1)
    hosts.wait_for_training("laptop", "desktop", "laptop")
    hosts.wait("another preloaded trainer", lambda: len(below(hosts.running["laptop"].pid)) == 2)


CANNOT_START = [
    ("gone", "{python} cannot be started: No such file or directory", False),
    ("killed", "it ended with code -9 before it had begun", True),
    ("open", "every user may write to {python} and so change what {user} runs: chmod go-w {python}", False),
]


@pytest.mark.parametrize(("how", "told", "first"), CANNOT_START)
def test_a_host_whose_rank_cannot_start_costs_the_others_seconds(hosts, how, told, first):
    """Its Python is gone, is killed while it loads (as by a lack of memory), or belongs to all, each time before anything is recorded."""
    ill, well = ("desktop", "laptop") if first else ("laptop", "desktop")
    python, ran = hosts.folder / "ill/bin/python", hosts.folder / "ran"
    python.parent.mkdir(parents=True)
    if how != "gone":
        python.write_text(f"#!{sys.executable}\nimport os\nopen({str(ran)!r}, 'w')\nos.kill(os.getpid(), 9)\n")
        python.chmod(0o777 if how == "open" else 0o755)
    hosts.plan["nodes"][0 if first else 1]["venv_dir"] = str(hosts.folder / "ill")
    begun = time.monotonic()
    for host in (ill, well):
        hosts.start(host)
    hosts.wait_for_training(well, well)
    took = time.monotonic() - begun
    assert hosts.running[ill].wait(PATIENCE) == 1
    told = told.format(python=python, user=processes.user_name(os.getuid()))
    assert hosts.state(ill)["why"] == f"the rank of {ill} died 3 times at step 0 ({told})"
    assert ran.exists() == (how == "killed")
    # A few for each of three attempts, on a machine with other work.
    assert took < 60 and hosts.running[well].poll() is None
    assert hosts.state(well)["generation"] < 12
