# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two nodes on this machine that train; they share the unchanged environment of the trainer's tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.tests.integration.local import free_port
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage

VENV = Path(os.environ.get("TRAINER_VENV") or Path.home() / ".cache/nanochat-ddp/tests-venv")
STAMP = VENV / ".nanochat-ddp.json"


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the metrics of a run folder."""
    lines = [json.loads(line) for path in folder.glob("metrics-rank*.jsonl") for line in path.read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


@contextlib.contextmanager
def two_nodes(folder: Path, **settings: Any) -> Iterator[Stage]:
    """The nodes `one` and `two`, whose sessions are kept apart; settings are added to those of a small model."""
    if not STAMP.exists():
        pytest.skip("needs the trainer's environment: ./test.sh trainer makes it")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / f"text/{number}.txt").write_text("".join(f"line {number} {row}\n" for row in range(200)))
    small = {
        "ddp_venv_dir": str(VENV),
        "ddp_python": os.path.realpath(VENV / "bin/python"),
        "ddp_port": free_port(),
        "ddp_data_paths": [f"{folder}/text"],
        "ddp_vocab_size": 300,
        "ddp_iterations": 3,
        "ddp_threads": 1,
        "ddp_results_dir": str(folder / "results"),
    }
    stage = Stage(folder, ["one", "two"], **{**small, **settings})
    stage.environment["TMUX_TMPDIR"] = str(folder)
    try:
        yield stage
    finally:
        subprocess.run(["tmux", "kill-server"], env={**os.environ, "TMUX_TMPDIR": str(folder)}, check=False)
