# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ddp_sync auto from a rehearsal to a run: what was measured is kept, decides the next plan, and a run keeps its way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import subject

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("TRAINER_VENV") or Path.home() / ".cache/nanochat-ddp/tests-venv")
MODEL = {
    "ddp_depth": 2, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 64, "ddp_vocab_size": 300,
    "ddp_device_batch": 2, "ddp_total_batch": 256, "ddp_iterations": 4, "ddp_eval_every": -1, "ddp_save_every": 2,
}  # fmt: skip

STEP = {"tokens_per_second": 1000.0, "pass_seconds": 0.05, "adamw_seconds": 0.01, "muon_seconds": 0.01}


@pytest.fixture
def play(tmp_path):
    """Two nodes on this machine that share the environment of the tests, as it is."""
    stamp = VENV / ".nanochat-ddp.json"
    if not stamp.exists():
        pytest.skip("needs the trainer's environment")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number}.txt").write_text("".join(f"line {number} {row}\n" for row in range(200)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ddp_base_dir": f"{tmp_path}/{{{{ inventory_hostname }}}}",
        "ddp_venv_dir": str(VENV),
        "ddp_python": os.path.realpath(VENV / "bin/python"),
        "ddp_port": port,
        "trainer_requirements": json.loads(stamp.read_text())["requirements"],
        "ddp_data_paths": [f"{tmp_path}/text"],
        "ddp_threads": 1,
        "ddp_results_dir": str(tmp_path / "results"),
        **MODEL,
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"trainers": {"hosts": {"one": None, "two": None}, "vars": variables}}))

    def run(*words: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        env.update(ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), TMUX_TMPDIR=str(tmp_path), NO_COLOR="1")
        command = [Path(sys.executable).parent / "ansible-playbook", "train.yml", "-i", inventory, *words]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    subprocess.run(["tmux", "kill-server"], env={**os.environ, "TMUX_TMPDIR": str(tmp_path)}, check=False)


def way_of(folder: Path) -> str:
    return str(json.loads((folder / "plan.json").read_text())["training"]["sync"])


def test_a_rehearsal_decides_and_a_run_keeps_its_way(play, tmp_path):
    told = play()
    assert "ddp_sync auto takes " in told
    way = way_of(tmp_path / "one/runs/d2")
    plan = json.loads((tmp_path / "one/runs/d2/plan.json").read_text())
    known = subject(plan["model"], plan["training"]["device_batch"], plan["training"]["matmul"])
    for host in ("one", "two"):
        file = tmp_path / host / "measured.json"
        # Of a machine that is busy nothing is kept.
        kept = json.loads(file.read_text()) if file.exists() else {**STEP, "link": {"mbit": 1.0}, "subject": known}
        assert kept["link"]["mbit"] > 0 and kept["subject"] == known
        # As over a link that carries next to nothing.
        file.write_text(json.dumps({**kept, "link": {"mbit": 0.5, "latency_ms": 1.0}}))
    play("--tags", "launch", "-e", "ddp_run=slow")
    rounded = way_of(tmp_path / "one/runs/slow")
    assert rounded != "exact"
    start = json.loads((tmp_path / "one/runs/slow/metrics-rank0.jsonl").read_text().splitlines()[0])
    assert start["settings"]["sync"] == rounded
    play("--tags", "launch", "-e", "ddp_iterations=6")
    assert way_of(tmp_path / "one/runs/d2") == way
