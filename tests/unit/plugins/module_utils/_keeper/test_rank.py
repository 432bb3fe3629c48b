# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank as its keeper sees it: its command, its time to end, and how it ended; test_keeper.py starts some from a preloaded trainer."""

from __future__ import annotations

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
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership, rank
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, until
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts

PATIENCE = 120
RANK = "import os, time\nopen(os.environ['SEEN'], 'w').close()\ntime.sleep(600)\n"


def a_rank(folder: Path, **plan: Any) -> rank.LocalRank:
    nodes = [
        {"host": "desktop", "rank": 0, "checkpoint_bytes": 1000, "venv_dir": sys.prefix, "trainer_dir": str(folder)}
    ]
    return rank.LocalRank({"timeout_seconds": 60, "nodes": nodes, **plan}, "desktop", str(folder))  # type: ignore[typeddict-item]


def write_events(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "metrics-rank0.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": time.time(), **event}) + "\n" for event in events)


def test_what_a_part_made_that_lost_is_put_aside_into_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "base_checkpoints/d4"
    folder.mkdir(parents=True)
    files = ("model_{:06d}.pt", "meta_{:06d}.json", "optim_{:06d}_rank0.pt", "ckpt_{:06d}_rank0.json")
    for generation in (2, 5):
        for step in (30, 40):
            for name in files:
                (folder / name.format(step)).write_text(str(generation))
        place = a_rank(tmp_path).set_apart(generation, since=30)
        assert place.startswith(f"apart/generation-{generation}-")
        assert sorted(path.name for path in folder.iterdir()) == sorted(name.format(30) for name in files)
        assert sorted(path.name for path in (tmp_path / place).iterdir()) == sorted(name.format(40) for name in files)
    (first,) = tmp_path.glob("apart/generation-2-*/model_000040.pt")
    assert first.read_text() == "2"
    assert a_rank(tmp_path).set_apart(2, since=30) == ""


def test_the_step_of_a_split_is_known_however_long_ago_it_was(tmp_path: Path) -> None:
    one = a_rank(tmp_path)
    write_events(tmp_path, {"kind": "start", "resumed_from": 10})
    one.started_at = time.time()
    assert (one.steps(), one.resumed_from) == (0, None)
    for events in ([{"kind": "start", "resumed_from": 500}], [{"kind": "step", "step": n} for n in range(3000)]):
        write_events(tmp_path, *events)
        one.steps()
    assert (one.steps(), one.resumed_from) == (3000, 500)


def test_a_slow_step_has_its_time_to_end_and_less_once_a_peer_is_lost(tmp_path: Path) -> None:
    write_events(tmp_path, {"kind": "start"}, {"kind": "step", "step": 3, "seconds": 400.0})
    one = a_rank(tmp_path)
    one.process = subprocess.Popen([sys.executable, "-c", "pass"])
    one.end(membership.FINISH_STEP)
    before = one.ends_at - time.monotonic()
    one.end(membership.SAVE, why="laptop is not heard")
    assert before > 1600 and 800 < one.ends_at - time.monotonic() < before - 700
    assert (tmp_path / "hang-up-rank0").read_text() == "laptop is not heard"
    (tmp_path / "hang-up-rank0").unlink()
    for order in (membership.SAVE, membership.FINISH_STEP):
        one.end(order)
    assert not (tmp_path / "hang-up-rank0").exists()
    one.process.wait()


def test_a_rank_that_failed_after_its_last_word_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_rank(tmp_path)
    monkeypatch.setattr(rank, "command", lambda *told: ([sys.executable, "-c", "raise SystemExit(3)"], {}))
    one.start(membership.Generation(1, ("desktop",)))
    write_events(tmp_path, {"kind": "end", "reason": "stopped", "time": time.time() + 1})
    assert one.process is not None
    one.process.wait()
    assert one.ended() == states.FAILED


def test_a_clock_that_is_set_back_confuses_no_start_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real = a_rank(tmp_path), time.time
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    monkeypatch.setattr(rank, "command", lambda *told: ([sys.executable, "-c", wait], {}))
    write_events(tmp_path, {"kind": "end", "reason": "failed", "time": real() + 7200})
    (tmp_path / "heartbeat-rank0.json").write_text(json.dumps({"phase": "end", "time": real() + 7200}))
    one.start(membership.Generation(2, ("desktop",)))
    assert one.ended() is None and not one.exits_at
    monkeypatch.setattr(rank.time, "time", lambda: real() - 3600)
    assert one.ended() is None and not one.exits_at
    write_events(tmp_path, {"kind": "end", "reason": "stopped"})
    (tmp_path / "go").touch()
    assert one.process is not None
    one.process.wait()
    assert one.ended() == states.STOPPED


def test_a_rank_that_was_stopped_is_killed_but_not_by_a_keeper_that_was_stopped_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processes.SESSION_VARIABLE, tmp_path.name)
    one, clock = a_rank(tmp_path), SimpleNamespace(now=1000.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    beat = {"time": time.time(), "pid": process.pid}
    monkeypatch.setattr(rank.time, "monotonic", lambda: clock.now)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    for passed in (100.0, 2.0, 0.5, 3.0):
        clock.now += passed
        one._kill_if_stopped(beat)
    assert process.poll() is None
    for dummy in range(5):
        clock.now += 1.0
        one._kill_if_stopped(beat)
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_the_command_of_a_generation_is_the_planned_one_with_its_members():
    plan = make_plan(hosts({"ddp_restarts": 3, "ddp_min_hosts": 1, "ddp_head": "shared"})).plan
    for node in plan["nodes"]:
        node["flags"]["head-shares"] = [3, 1]
    before = copy.deepcopy(plan)
    planned, rows = plan["nodes"][1]["argv"], sum(plan["training"]["rows"])
    both, variables = rank.command(plan, "laptop", membership.Generation(2, ("desktop", "laptop")))
    assert both == [*planned, "--head-shares=3,1", "--rank-rows=2,2"]
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("1", "2")
    alone, variables = rank.command(plan, "laptop", membership.Generation(3, ("laptop",)))
    changed = {f"--rank-rows={rows}", "--head-shares=1", "--tracker=none"}
    assert set(alone) - set(planned) == changed - set(planned) and {"--save-on-loss", *changed} < set(alone)
    kept = [word for word in planned if not word.startswith(("--rank-rows", "--tracker", "--head-shares"))]
    assert [word for word in alone if word in kept] == kept
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("0", "1")
    assert (variables["MASTER_ADDR"], variables["TORCHELASTIC_RUN_ID"]) == ("192.168.1.11", "generation-3")
    assert plan == before


def test_a_rank_whose_preloaded_trainer_was_killed_or_hangs_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/preloaded.py").symlink_to(ROOT / "trainer/scripts/preloaded.py")
    (tmp_path / "scripts/rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    home = rank.PreloadedTrainer(sys.executable, ["no.such.module"])
    try:
        assert home.start(["-m", "scripts.rank"], {"SEEN": str(tmp_path / "seen")})
        until((tmp_path / "seen").exists, PATIENCE)
        pid = home._process.pid
        one = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        home._process.send_signal(signal.SIGSTOP)
        os.kill(one, signal.SIGKILL)
        assert home.wait() == rank.LOST
        assert home.runner() is None and not home.start(["-m", "scripts.rank"], {})
    finally:
        home._process.kill()
        home._process.wait()
