# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A tracker that listens to the network, behind a real firewall: the peers and the chosen clients reach it, nobody else does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.tests.integration.lan import WALL, Lan, can_make_namespaces
from ansible_collections.nanochat.ddp.tests.integration.test_tracker_mlflow import mlflow_venv, trainer_python

__all__ = ["mlflow_venv", "trainer_python"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not can_make_namespaces(), reason="making network namespaces takes root"),
    pytest.mark.skipif(not shutil.which("tmux") or not shutil.which("nft"), reason="tmux or nft is not installed"),
]

PORT = 5000
MASTER, PEER, STRANGER, CLIENT = range(4)
ASK = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(f"http://10.9.0.1:{sys.argv[1]}/health", timeout=1).status)
"""


@pytest.fixture
def lan(make_lan: Callable[..., Lan]) -> Lan:
    return make_lan(4)


def play(lan: Lan, venv: Path, *words: str) -> str:
    training = {"tracker": "mlflow", "tracker_bind": "0.0.0.0", "tracker_port": PORT}
    plan = {"run": "d4", "timeout_seconds": 60, "master": {"host": "h0"}, "manage_firewall": True, "training": training}
    node = {
        "base_dir": str(lan.folder / "h0"),
        "run_dir": str(lan.folder / "h0/runs/d4"),
        "peers": ["10.9.0.2"],
        "address": "10.9.0.1",
    }
    book = lan.folder / "play.json"
    book.write_text(json.dumps([{"hosts": "trainers", "gather_facts": False, "roles": ["nanochat.ddp.tracker"]}]))
    settings: dict[str, Any] = {
        "ddp_plan": plan,
        "ddp_node": node,
        "tracker_venv_dir": str(venv),
        "tracker_clients": ["10.9.0.4"],
    }
    done = lan.playbook(str(book), *words, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reaches(lan: Lan, number: int) -> bool:
    argv = lan.inside(number, sys.executable, "-c", ASK, str(PORT))
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def test_the_peers_and_chosen_clients_reach_it_and_nobody_else(lan: Lan, mlflow_venv: Path) -> None:
    lan.run(MASTER, "nft", "-f", "-", text=WALL)
    before = lan.run(MASTER, "nft", "list", "ruleset")
    told = play(lan, mlflow_venv)
    assert [number for number in (MASTER, PEER, STRANGER, CLIENT) if reaches(lan, number)] == [MASTER, PEER, CLIENT]
    assert "has no password" not in told
    assert "changed=0" in play(lan, mlflow_venv)
    play(lan, mlflow_venv, "-e", "tracker_state=stopped")
    assert lan.run(MASTER, "nft", "list", "ruleset") == before


def test_without_a_firewall_it_says_who_reaches_it(lan: Lan, mlflow_venv: Path) -> None:
    told = " ".join(play(lan, mlflow_venv, "--check").split())
    assert "no firewall is active there, so anyone who reaches 0.0.0.0 port 5000 can change what it holds" in told
