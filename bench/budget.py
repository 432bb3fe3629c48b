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
SETTINGS = {
    "ansible_connection": "local",
    "ddp_sequence": 256,
    "ddp_device_batch": 4,
    "ddp_eval_tokens": 65536,
    "ddp_sample_every": -1,
    "ddp_restarts": 3,
    "ddp_min_hosts": 1,
    "ddp_grace": 2,
    "preflight_measure_seconds": 3,
}


class Nodes:
    """Two nodes on this machine, and their playbooks."""

    def __init__(self, folder: Path, venv: Path, port: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        hosts = {f"node{n}": {"ddp_base_dir": str(folder / f"node{n}")} for n in (1, 2)}
        more = {
            "ddp_venv_dir": str(venv),
            "ddp_port": port,
            "ddp_keeper_port": port + 1,
            "ddp_results_dir": str(folder),
        }
        inventory = {"trainers": {"hosts": hosts, "vars": {**SETTINGS, **more}}}
        (folder / "hosts.json").write_text(json.dumps(inventory), encoding="utf-8")

    def start(self, playbook: str, run: str, **settings: object) -> subprocess.Popen[bytes]:
        extra = json.dumps({"ddp_run": run, **settings})
        with (self.folder / f"{run}.log").open("ab") as log:
            argv = ["ansible-playbook", playbook, "-i", str(self.folder / "hosts.json"), "-e", extra]
            return subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    def play(self, playbook: str, run: str, **settings: object) -> None:
        if self.start(playbook, run, **settings).wait():
            raise SystemExit(f"{playbook} failed; see {self.folder / run}.log")

    def run_dir(self, node: int, run: str) -> Path:
        return self.folder / f"node{node}" / "runs" / run

    def events(self, run: str, kind: str, node: int = 1) -> list[dict[str, Any]]:
        return pieces.events(self.run_dir(node, run) / f"metrics-rank{node - 1}.jsonl", kind)


def seconds_of(case: str) -> float:
    return 60.0 * float(case.partition("m")[0])


def lose_second(nodes: Nodes, run: str) -> None:
    """Kill the second node's keeper, so that it restarts nothing, then its rank."""
    session = json.loads((nodes.run_dir(2, run) / "session.json").read_text(encoding="utf-8"))
    beat = json.loads((nodes.run_dir(2, run) / "heartbeat-rank1.json").read_text(encoding="utf-8"))
    for pid in (session["pid"], *children(session["pid"]), beat["pid"]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        own = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []
    return [*own, *(below for one in own for below in children(one))]


def measure(nodes: Nodes, case: str) -> dict[str, Any]:
    """Measure one budget, from the command to its end."""
    budget, how = case.partition("-")[::2]
    run, begun, seconds = f"b{case}", time.time(), seconds_of(case)
    settings = {"ddp_budget": budget, "ddp_fresh": True}
    process = nodes.start("train.yml", run, **settings)
    if how:
        while not nodes.events(run, "step") or time.time() < begun + seconds / 2:
            time.sleep(0.5)
    if how == "lost":
        lose_second(nodes, run)
    if how == "stopped":
        nodes.play("playbooks/stop.yml", run, ddp_budget=budget)
        process.wait()
        time.sleep(20)
        process = nodes.start("train.yml", run, ddp_budget=budget)
    if process.wait():
        raise SystemExit(f"{case} failed; see {nodes.folder / run}.log")
    took, steps = time.time() - begun, nodes.events(run, "step")
    start = nodes.events(run, "start")[0]
    nodes_told = (1,) if how == "lost" else (1, 2)
    return {
        "case": case,
        "depth": start["settings"]["depth"],
        "batch": start["total_batch_size"],
        "steps": steps[-1]["step"] + 1,
        "first_step_after": steps[0]["time"] - begun,
        "training_seconds": steps[-1]["time"] - steps[0]["time"],
        "trainer_late": nodes.events(run, "end")[-1]["time"] - nodes.events(run, "start")[-1]["ends"],
        "took": took,
        "off": took / seconds - 1,
        "last_multiplier": steps[-1]["lr_multiplier"],
        "val_bpb": nodes.events(run, "eval")[-1]["val_bpb"],
        "identical": len({nodes.events(run, "digest", node)[-1]["digest"] for node in nodes_told}) == 1,
        "ranks": len(nodes_told),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=ALL, help=f"of {', '.join(ALL)}, or others of their form")
    parser.add_argument("--folder", type=Path, default=HOME / "bench-budget")
    parser.add_argument("--venv", type=Path, default=HOME / "trainer-venv")
    parser.add_argument("--port", type=int, default=29620)
    parser.add_argument("--write", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args()
    nodes, results = Nodes(given.folder, given.venv, given.port), []
    # Set up trainer and data first, as on hosts that have trained before.
    nodes.play("train.yml", "ready", ddp_iterations=1, ddp_depth=2, ddp_eval_every=-1)
    for case in given.only:
        results.append(one := measure(nodes, case))
        print(
            f"{case}: {one['took']:.1f} s ({one['off']:+.1%}), trainer {one['trainer_late']:+.1f} s; depth {one['depth']}, batch "
            f"{one['batch']}, {one['steps']} steps, lr down to {one['last_multiplier']:.3f}, {one['val_bpb']:.4f} bits per byte, "
            f"weights {'identical' if one['identical'] else 'NOT identical'} on {one['ranks']}", flush=True,
        )  # fmt: skip
    if given.write:
        given.write.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
