# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two nodes on this machine for whole plays; they share the unchanged environment of the trainer's tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, free_port

VENV = Path(os.environ.get("TRAINER_VENV") or Path.home() / ".cache/nanochat-ddp/tests-venv")
STAMP = VENV / ".nanochat-ddp.json"
Play = Callable[..., tuple[int, str]]


def command(inventory: Path, playbook: str, *words: str) -> list[str | Path]:
    return [Path(sys.executable).parent / "ansible-playbook", playbook, "-i", inventory, *words]


def environment(folder: Path) -> dict[str, str]:
    """The environment of a playbook; its sessions are kept apart in this folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    return {**env, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "TMUX_TMPDIR": str(folder), "NO_COLOR": "1"}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the metrics of a run folder."""
    lines = [json.loads(line) for path in folder.glob("metrics-rank*.jsonl") for line in path.read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


@contextlib.contextmanager
def two_nodes(folder: Path, **settings: Any) -> Iterator[Play]:
    """Runs a playbook (train.yml) with further words and says how it ended; settings are added to those of a small model."""
    if not STAMP.exists():
        pytest.skip("needs the trainer's environment: ./test.sh trainer makes it")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / f"text/{number}.txt").write_text("".join(f"line {number} {row}\n" for row in range(200)))
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ddp_base_dir": f"{folder}/{{{{ inventory_hostname }}}}",
        "ddp_venv_dir": str(VENV),
        "ddp_python": os.path.realpath(VENV / "bin/python"),
        "ddp_port": free_port(),
        "ddp_data_paths": [f"{folder}/text"],
        "ddp_vocab_size": 300,
        "ddp_iterations": 3,
        "ddp_threads": 1,
        "ddp_results_dir": str(folder / "results"),
        **settings,
    }
    inventory, env = folder / "hosts.yml", environment(folder)
    inventory.write_text(yaml.safe_dump({"trainers": {"hosts": {"one": None, "two": None}, "vars": variables}}))

    def run(*words: str, playbook: str = "train.yml") -> tuple[int, str]:
        argv = command(inventory, playbook, *words)
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout

    try:
        yield run
    finally:
        subprocess.run(["tmux", "kill-server"], env={**os.environ, "TMUX_TMPDIR": str(folder)}, check=False)
