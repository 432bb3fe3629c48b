# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence of doctor_info, from a run folder and a process of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor import gather as evidence_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.gather import doctor_info
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run folder whose rank is a process that sleeps and beats."""
    monkeypatch.setattr(evidence_utils, "SAMPLE_SECONDS", 0.1)
    monkeypatch.setattr(evidence_utils, "ANSWER_SECONDS", 1.0)
    env = {**os.environ, "NANOCHAT_DDP_SESSION": "doctored"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
    # A new program's environment cannot be read at once, and a pid without it is not the session's.
    until = time.monotonic() + 60
    while getattr(processes.process(process.pid), "marker", None) is None:
        assert time.monotonic() < until, process.poll()
        time.sleep(0.01)
    (tmp_path / "session.json").write_text(
        json.dumps({"id": "doctored", "pid": process.pid, "started": time.time() - 60})
    )
    beat = {
        "time": time.time(),
        "pid": process.pid,
        "phase": "sync",
        "phase_since": time.time(),
        "step": 3,
        "oom_kills": 0,
    }
    (tmp_path / "heartbeat-rank1.json").write_text(json.dumps(beat))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "rank1.log").write_text("step 00003/00010\n")
    yield tmp_path
    process.communicate(b"\n")


def pid_of(run_dir: Path) -> int:
    return int(json.loads((run_dir / "heartbeat-rank1.json").read_text())["pid"])


def test_the_process_and_the_machine_are_described(call, run_dir):
    told = call(doctor_info, run_dir=str(run_dir), rank=1, probe_port=1)
    evidence = told["evidence"]
    assert told["changed"] is False
    assert evidence["process"]["pid"] == pid_of(run_dir)
    assert evidence["process"]["state"] in ("S", "R")
    assert evidence["run"]["phase"] == "sync"
    assert evidence["oom_kills_before"] == 0
    assert evidence["system"]["disk_free"] > 0 and "lo" in evidence["system"]["nics"]


def test_field_19_a_request_that_nobody_answers_is_taken_back(call, run_dir):
    evidence = call(doctor_info, run_dir=str(run_dir), rank=1, probe_port=1)["evidence"]
    assert evidence["stacks"] == {}
    assert not list(run_dir.glob("dump-*"))


def test_field_19_the_trainers_answer_is_taken(call, run_dir):
    def answers():
        request = run_dir / "dump-request-rank1"
        while not request.exists():
            time.sleep(0.01)
        (run_dir / "dump-rank1.json").write_text(json.dumps({"stacks": {"MainThread": ["comm.py:1 in wait"]}}))
        request.unlink()

    thread = threading.Thread(target=answers)
    thread.start()
    evidence = call(doctor_info, run_dir=str(run_dir), rank=1, probe_port=1)["evidence"]
    thread.join()
    assert evidence["stacks"]["MainThread"] == ["comm.py:1 in wait"]


def test_whether_packets_come_back_is_tried_with_every_peer(call, run_dir):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        peers = [{"host": "near", "address": "127.0.0.1"}, {"host": "closed", "address": "127.0.0.2"}]
        links = call(doctor_info, run_dir=str(run_dir), rank=1, peers=peers, probe_port=port)["evidence"]["links"]
    assert links == {"near": "open", "closed": "refused"}
