# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests whether a training with a budget ends on time.

    python bench/budget.py                              # 3 and 5 minutes undisturbed, 5 with a node lost, 10 with a stop
    python bench/budget.py --only 3m                    # one of them
    python bench/budget.py --only 5m-lost 10m-stopped

Two nodes on this machine train on Python's own library, by ansible-playbook, including set-up and collecting. "lost": midway the second
node's keeper and rank are killed for good. "stopped": midway the run is stopped, and restarted 20 s later. Needs ansible-playbook on
the PATH and the trainer's environment made by ./demo.sh (or --venv).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pieces

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("NANOCHAT_DDP_HOME") or Path.home() / ".cache" / "nanochat-ddp")
ALL = ("3m", "5m", "5m-lost", "10m-stopped")
PORT = 29620
SETTINGS = {
    "ansible_connection": "local",
    "ddp_sequence": 256,
    "ddp_device_batch": 4,
    "ddp_eval_tokens": 65536,
    "ddp_sample_every": -1,
    "ddp_restarts": 3,
    "ddp_min_hosts": 1,
    "ddp_grace": 2,
    "ddp_port": PORT,
    "ddp_keeper_port": PORT + 1,
    "preflight_measure_seconds": 3,
}


class Nodes:
    """Two nodes on this machine, and their playbooks."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        hosts = {f"node{number}": {"ddp_base_dir": f"{folder}/node{number}"} for number in (1, 2)}
        variables = {**SETTINGS, "ddp_venv_dir": str(venv), "ddp_results_dir": str(folder)}
        (folder / "hosts.json").write_text(json.dumps({"trainers": {"hosts": hosts, "vars": variables}}))

    def start(self, playbook: str, run: str, **settings: object) -> subprocess.Popen[bytes]:
        argv = [
            "ansible-playbook",
            playbook,
            "-i",
            str(self.folder / "hosts.json"),
            "-e",
            json.dumps({"ddp_run": run, **settings}),
        ]
        with (self.folder / f"{run}.log").open("ab") as log:
            return subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    def wait(self, process: subprocess.Popen[bytes], run: str) -> None:
        if process.wait():
            raise SystemExit(f"{run} failed; see {self.folder / run}.log")

    def file(self, node: int, run: str, name: str) -> Path:
        return self.folder / f"node{node}" / "runs" / run / name

    def events(self, run: str, kind: str, node: int = 1) -> list[dict[str, Any]]:
        return pieces.events(self.file(node, run, f"metrics-rank{node - 1}.jsonl"), kind)

    def lose_second(self, run: str) -> None:
        """Kill the second node's session and keeper, so that nothing restarts its rank, then the rank."""
        session, beat = (
            json.loads(self.file(2, run, name).read_text()) for name in ("session.json", "heartbeat-rank1.json")
        )
        for pid in (session["pid"], session["child_pid"], beat["pid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def measure(nodes: Nodes, case: str) -> str:
    """Measure one budget, from the command to its end."""
    budget, how = case.partition("-")[::2]
    run, begun, seconds = f"b{case}", time.time(), 60.0 * float(budget.removesuffix("m"))
    process = nodes.start("train.yml", run, ddp_budget=budget, ddp_fresh=True)
    while how and (not nodes.events(run, "step") or time.time() < begun + seconds / 2):
        time.sleep(0.5)
    if how == "lost":
        nodes.lose_second(run)
    if how == "stopped":
        nodes.wait(nodes.start("playbooks/stop.yml", run, ddp_budget=budget), run)
        process.wait()
        time.sleep(20)
        process = nodes.start("train.yml", run, ddp_budget=budget)
    nodes.wait(process, run)
    took, steps, start = time.time() - begun, nodes.events(run, "step"), nodes.events(run, "start")[-1]
    late = nodes.events(run, "end")[-1]["time"] - start["ends"]
    there = (1,) if how == "lost" else (1, 2)
    same = len({nodes.events(run, "digest", node)[-1]["digest"] for node in there}) == 1
    return (
        f"{case}: {took:.1f} s ({took / seconds - 1:+.1%}), trainer {late:+.1f} s; depth {start['settings']['depth']}, batch "
        f"{start['total_batch_size']}, {steps[-1]['step'] + 1} steps, lr down to {steps[-1]['lr_multiplier']:.3f}, "
        f"{nodes.events(run, 'eval')[-1]['val_bpb']:.4f} bits per byte, weights {'identical' if same else 'NOT identical'} on {len(there)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=ALL, help=f"of {', '.join(ALL)}, or others of their form")
    parser.add_argument("--folder", type=Path, default=HOME / "bench-budget")
    parser.add_argument("--venv", type=Path, default=HOME / "trainer-venv")
    given = parser.parse_args()
    nodes = Nodes(given.folder, given.venv)
    # Set up trainer and data first, as on hosts that have trained before.
    nodes.wait(nodes.start("train.yml", "ready", ddp_iterations=1, ddp_depth=2, ddp_eval_every=-1), "ready")
    for case in given.only:
        print(measure(nodes, case), flush=True)


if __name__ == "__main__":
    main()
