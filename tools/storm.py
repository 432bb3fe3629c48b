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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".ansible/collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import processes

PATIENCE_SECONDS = 300
FROZEN_SECONDS = 15


def read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}


def say(text: str) -> None:
    print(f"\r\033[K  >> storm: {text}", file=sys.stderr, flush=True)


class Node:
    """One node of the demo, seen from its run folder."""

    def __init__(self, folder: Path, begun: float) -> None:
        self.folder, self.begun = folder, begun

    def heartbeat(self) -> dict[str, Any]:
        """The rank's last heartbeat of this start of the run; empty before the first."""
        beat = next((read(file) for file in self.folder.glob("heartbeat-rank*.json")), {})
        return beat if beat.get("time", 0.0) > self.begun else {}

    def wait_for_step(self, step: int, rank: int = 0) -> int:
        """Wait until the rank reaches a step; returns its process id, which must differ from `rank` if given."""
        until = time.time() + PATIENCE_SECONDS
        while time.time() < until:
            beat = self.heartbeat()
            if int(beat.get("step") or 0) >= step and beat.get("pid") != rank:
                return int(beat["pid"])
            time.sleep(0.2)
        raise SystemExit(
            f"storm: {self.folder.parent.parent.name} did not come to step {step} within {PATIENCE_SECONDS} s."
        )

    def processes(self) -> list[int]:
        """Every process of the session: keeper and rank."""
        session = str(read(self.folder / "session.json").get("id"))
        return sorted(pid for pid, process in processes().items() if process.marker == session)

    def send(self, number: signal.Signals) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def storm(node: Node, steps: int) -> None:
    """Kill the rank after a quarter of the steps, freeze the node after half."""
    rank = node.wait_for_step(steps // 4)
    os.kill(rank, signal.SIGKILL)
    say(f"kill -9 of the rank on node2 at step {steps // 4}")
    node.wait_for_step(steps // 2, rank)
    node.send(signal.SIGSTOP)
    say(f"node2 freezes at step {steps // 2}, for {FROZEN_SECONDS} s")
    try:
        time.sleep(FROZEN_SECONDS)
    finally:
        node.send(signal.SIGCONT)
    say("node2 wakes up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="run folder of the node to be hit")
    parser.add_argument("--steps", type=int, required=True, help="steps of the run")
    given = parser.parse_args()
    storm(Node(given.folder, time.time()), given.steps)


if __name__ == "__main__":
    main()
