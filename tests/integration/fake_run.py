# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole runs of the events that tests/pins/run_folders.py makes, and a stand-in for a training process that writes them at any speed.

As a program: `python fake_run.py RUN_DIR --rank 0 --world 2 --steps 10 --seconds 0.5 [--fail-at N]`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import boot_id, start_ticks
from ansible_collections.nanochat.ddp.tests.pins import run_folders

HOSTS = ("node1", "node2")


def step_event(step: int, rank: int, at: float, seconds: float = 0.5) -> dict[str, Any]:
    """A step as a trainer writes it, at its end."""
    return next(run_folders.steps(rank, step, step + 1, at - seconds, {"seconds": seconds}))


def start_of(rank: int, steps: int, resumed: int | None = None) -> list[Any]:
    """The start, as run_folders has it described."""
    more = {"kernels": ["norm", "adamw"] if rank == 0 else [], "capability": "AVX2"}
    model = {"config": {"n_layer": 4}, "parameters": {"total": 7_340_162}}
    return ["start", {"step": resumed or 0, "steps": steps, "resumed_from": resumed, "model": model, **more}]


def start_event(rank: int, world: int, steps: int, at: float, resumed: int | None = None) -> dict[str, Any]:
    return next(run_folders.events(rank, world, "d4", {"began": at, "metrics": [start_of(rank, steps, resumed)]}))


def history(
    rank: int, world: int, steps: int, begun: float, seconds: float = 0.5, run: str = "d4"
) -> list[dict[str, Any]]:
    """All events of a run that finished."""
    told = [start_of(rank, steps)]
    for step in range(steps):
        told.append(["steps", step, step + 1, {"seconds": seconds}])
        if rank == 0 and (step + 1) % max(1, steps // 20) == 0:
            told.append(["eval", {"val_bpb": 3.0 - 2.0 * step / steps, "seconds": 1.0}])
        if (step + 1) % max(1, steps // 5) == 0:
            told += [["digest", {"digest": f"{step:016x}", "identical": True}], ["checkpoint"]]
    if rank == 0:
        told.append(["sample", {"prompt": "The capital of <France>", "text": " is Paris & more."}])
    told.append(["end", {"reason": "finished", "val_bpb": 1.0 if rank == 0 else None}])
    return list(run_folders.events(rank, world, run, {"began": begun, "metrics": told}))


def plan_for(run_dirs: list[Path], steps: int, run: str = "d4", hosts: Sequence[str] = HOSTS) -> dict[str, Any]:
    """A plan as far as readers of a run folder use it."""
    nodes = [
        {"host": host, "rank": rank, "run_dir": str(path), "base_dir": str(path.parent.parent), "rows": 2, "threads": 1,
         "address": "127.0.0.1", "nic": "lo", "dtype": "float32", "memory_bytes": 1_500_000_000, "session": f"nanochat-{run}-rank{rank}"}
        for rank, (path, host) in enumerate(zip(run_dirs, hosts, strict=False))
    ]  # fmt: skip
    plan = {
        "format": 1,
        "run": run,
        "world": len(run_dirs),
        "timeout_seconds": 60,
        "master": {"host": hosts[0], "address": "127.0.0.1", "port": 29500},
        "data_ports": {"low": 32768, "high": 60999},
        "model": {"depth": 4, "parameters": {"total": 7_340_162}, "sequence": 512},
        "training": {"iterations": steps, "total_batch": 2048, "tokens": 2048 * steps},
        "data": {"id": "text-1a2b3c4d"},
        "nodes": nodes,
        "findings": [],
    }
    return run_folders.signed(plan)


def write_json(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.replace(path)


def write_history(run_dir: Path, events: list[dict[str, Any]], rank: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in events)
    (run_dir / f"metrics-rank{rank}.jsonl").write_text(text, encoding="utf-8")
    (run_dir / "log").mkdir(exist_ok=True)
    (run_dir / "log" / f"rank{rank}.log").write_text("".join(f"step {n:05d}\n" for n in range(20)), encoding="utf-8")


def session_of(rank: int, started: float, run: str = "d4", **more: Any) -> dict[str, Any]:
    session = {"id": f"{rank}-{started}", "session": f"nanochat-{run}-rank{rank}", "argv": ["python"], "boot_id": boot_id(), "pid": None,
               "pid_start": None, "child_pid": None, "started": started, "ended": None, "exit_code": None, "signal": None}  # fmt: skip
    session.update(more)
    return session


def collected(folder: Path, run: str = "d4", steps: int = 40, hosts: Sequence[str] = HOSTS) -> Path:
    """A finished run as run_files brings it."""
    nodes = [folder / run / host for host in hosts]
    for rank, node in enumerate(nodes):
        write_history(node, history(rank, len(hosts), steps, 1.7e9, 0.5, run), rank)
        write_json(node / "session.json", session_of(rank, 1.7e9, run, ended=1.7e9 + 99, exit_code=0))
        write_json(node / "plan.json", plan_for(nodes, steps, run))
    return folder / run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--fail-at", type=int, default=-1)
    options = parser.parse_args()
    run_dir, rank = options.run_dir, options.rank
    (run_dir / "log").mkdir(parents=True, exist_ok=True)
    begun = time.time()
    session = session_of(rank, begun, run_dir.name, pid=os.getpid(), pid_start=start_ticks(os.getpid()))
    write_json(run_dir / "session.json", session)

    def beat(step: int, phase: str) -> None:
        now = time.time()
        write_json(
            run_dir / f"heartbeat-rank{rank}.json",
            {"time": now, "pid": os.getpid(), "rank": rank, "world": options.world, "step": step, "steps": options.steps,
             "phase": phase, "phase_since": now, "collective": None},
        )  # fmt: skip

    with (
        (run_dir / f"metrics-rank{rank}.jsonl").open("a", encoding="utf-8", buffering=1) as metrics,
        (run_dir / "log" / f"rank{rank}.log").open("a", encoding="utf-8", buffering=1) as log,
    ):
        code = 0
        events = history(rank, options.world, options.steps, begun, options.seconds, run_dir.name)
        for event in events:
            if event["kind"] == "step":
                if event["step"] == options.fail_at:
                    message = "RuntimeError: [enforce fail at alloc_cpu.cpp:114] cannot allocate memory"
                    log.write(f"Traceback (most recent call last):\n{message}\n")
                    failed = {"kind": "end", "step": event["step"], "reason": "error", "error": message}
                    metrics.write(json.dumps({**failed, "time": time.time()}) + "\n")
                    code = 1
                    break
                beat(event["step"], "forward_backward")
                time.sleep(options.seconds)
                log.write(f"step {event['step']:05d}/{options.steps:05d} | loss: {event['loss']:.6f}\n")
            event["time"] = time.time()
            metrics.write(json.dumps(event) + "\n")
    write_json(run_dir / "session.json", {**session, "ended": time.time(), "exit_code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
