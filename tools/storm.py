# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The faults of `./demo.sh --storm`: kills a rank and freezes a node of the demo while it trains.

    python tools/storm.py RUN_FOLDER_OF_NODE2 --steps 600

Affects only processes of this run: the rank by the process id in its heartbeat, the node by the session's mark in the
environment of its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".ansible/collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import processes

PATIENCE_SECONDS = 300
FROZEN_SECONDS = 15


def report(text: str) -> None:
    print(f"\r\033[K  >> storm: {text}", file=sys.stderr, flush=True)


def wait_for_step(folder: Path, step: int, since: float, rank: int = 0) -> int:
    """Wait until a rank that started since then reaches a step; returns its process id, which must differ from `rank`."""
    until = time.time() + PATIENCE_SECONDS
    while time.time() < until:
        for file in folder.glob("heartbeat-rank*.json"):
            with contextlib.suppress(OSError, ValueError):
                beat = json.loads(file.read_text(encoding="utf-8"))
                if beat["time"] > since and int(beat.get("step") or 0) >= step and beat["pid"] != rank:
                    return int(beat["pid"])
        time.sleep(0.2)
    raise SystemExit(f"storm: {folder.parent.parent.name} did not come to step {step} within {PATIENCE_SECONDS} s.")


def send(folder: Path, number: signal.Signals) -> None:
    """A signal to every process of the session: keeper and rank."""
    session = json.loads((folder / "session.json").read_text(encoding="utf-8"))["id"]
    for pid in sorted(pid for pid, process in processes().items() if process.marker == session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def storm(folder: Path, steps: int) -> None:
    """Kill the rank after a quarter of the steps, freeze the node after half."""
    since = time.time()
    rank = wait_for_step(folder, steps // 4, since)
    os.kill(rank, signal.SIGKILL)
    report(f"kill -9 of the rank on node2 at step {steps // 4}")
    wait_for_step(folder, steps // 2, since, rank)
    send(folder, signal.SIGSTOP)
    report(f"node2 freezes at step {steps // 2}, for {FROZEN_SECONDS} s")
    try:
        time.sleep(FROZEN_SECONDS)
    finally:
        send(folder, signal.SIGCONT)
    report("node2 wakes up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="run folder of the node to be hit")
    parser.add_argument("--steps", type=int, required=True, help="steps of the run")
    given = parser.parse_args()
    storm(given.folder, given.steps)


if __name__ == "__main__":
    main()
