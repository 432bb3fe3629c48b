# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for a training process: writes the files of a run folder (docs/architecture.md), at any speed.

As a program: `python fake_run.py RUN_DIR --rank 0 --world 2 --steps 10 --seconds 0.5 [--fail-at N]`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import boot_id, start_ticks


def step_event(step: int, rank: int, at: float, seconds: float = 0.5, batch: int = 2048) -> dict[str, Any]:
    """A step as a trainer writes it; the figures follow from the step so that a reader can be checked."""
    wait = seconds * (0.05 if rank == 0 else 0.30)
    return {
        "kind": "step",
        "time": at,
        "step": step,
        "loss": 10.4 * math.exp(-step / 800) + 3 + 0.05 * math.sin(step),
        "loss_smooth": 10.4 * math.exp(-step / 800) + 3,
        "seconds": seconds,
        "tokens_per_second": batch / seconds,
        "forward_backward_seconds": seconds * 0.6,
        "wait_seconds": wait,
        "optimizer_seconds": seconds * 0.08,
        "rows": 2,
        "data_seconds": seconds * 0.01,
        "bytes_sent": 24_000_000 + step,
        "memory_bytes": 1_200_000_000 + 1000 * step,
        "lr_multiplier": 1.0,
        "epoch": 1,
    }


def start_event(
    rank: int, world: int, steps: int, at: float, run: str = "d4", resumed: int | None = None
) -> dict[str, Any]:
    return {
        "kind": "start",
        "time": at,
        "step": resumed or 0,
        "rank": rank,
        "world": world,
        "run": run,
        "model": {"config": {"n_layer": 4}, "parameters": {"total": 36_700_200}},
        "settings": {"num_iterations": steps, "total_batch_size": 2048},
        "dtype": "float32",
        "dtype_reason": "chosen for the CPU",
        "matmul": "fp32",
        "kernels": ["norm", "adamw"] if rank == 0 else [],
        "capability": "AVX2",
        "resumed_from": resumed,
        "attempt_id": f"attempt-{int(at)}",
    }


def history(
    rank: int, world: int, steps: int, begun: float, seconds: float = 0.5, run: str = "d4"
) -> list[dict[str, Any]]:
    """All events of a run that finished."""
    events = [start_event(rank, world, steps, begun, run)]
    at = begun
    for step in range(steps):
        at += seconds
        events.append(step_event(step, rank, at, seconds))
        if rank == 0 and (step + 1) % max(1, steps // 20) == 0:
            events.append(
                {"kind": "eval", "time": at, "step": step, "val_bpb": 3.0 - 2.0 * step / steps, "seconds": 1.0}
            )
        if (step + 1) % max(1, steps // 5) == 0:
            events.append({"kind": "digest", "time": at, "step": step, "digest": f"{step:016x}", "identical": True})
            path = f"base_checkpoints/{run}/model_{step + 1:06d}.pt"
            events.append(
                {"kind": "checkpoint", "time": at, "step": step, "path": path, "bytes": 150_000_000, "seconds": 0.4}
            )
        if rank == 0 and step + 1 == steps:
            events.append(
                {
                    "kind": "sample",
                    "time": at,
                    "step": step,
                    "prompt": "The capital of <France>",
                    "text": " is Paris & more.",
                }
            )
    first, last = step_event(0, rank, 0, seconds), step_event(steps - 1, rank, 0, seconds)
    events.append(
        {
            "kind": "end",
            "time": at,
            "step": steps - 1,
            "reason": "finished",
            "error": None,
            "seconds": seconds * steps,
            "steps": steps,
            "identical": True,
            "val_bpb": 1.0 if rank == 0 else None,
            "first_loss": first["loss"],
            "last_loss": last["loss"],
            "tokens_per_second": first["tokens_per_second"],
            "wait_seconds": first["wait_seconds"] * steps,
        }
    )
    return events


def plan_for(run_dirs: list[Path], steps: int, run: str = "d4") -> dict[str, Any]:
    """A plan as far as readers of a run folder use it."""
    nodes = [
        {"host": f"node{rank + 1}", "rank": rank, "run_dir": str(path), "base_dir": str(path.parent.parent), "rows": 2, "threads": 1,
         "address": "127.0.0.1", "nic": "lo", "dtype": "float32", "memory_bytes": 1_500_000_000, "session": f"nanochat-{run}-rank{rank}"}
        for rank, path in enumerate(run_dirs)
    ]  # fmt: skip
    return {
        "format": 1,
        "run": run,
        "digest": "0123456789abcdef",
        "world": len(run_dirs),
        "timeout_seconds": 60,
        "master": {"host": "node1", "address": "127.0.0.1", "port": 29500},
        "model": {"depth": 4, "parameters": {"total": 36_700_200}, "sequence": 512},
        "training": {"iterations": steps, "total_batch": 2048, "tokens": 2048 * steps},
        "data": {"id": "text-1a2b3c4d"},
        "nodes": nodes,
        "findings": [],
    }


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


def collected(folder: Path, run: str = "d4", steps: int = 40, hosts: tuple[str, ...] = ("node1", "node2")) -> Path:
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
