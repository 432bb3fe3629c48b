# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What local steps cost in quality: the same model on the same tokens, synchronised in every step and every so many.

    python bench/local_steps.py
    python bench/local_steps.py --ways exact exact/10 bf16/10 --steps 240 --write local_steps.json

A way is what --sync takes, and after a slash the --local-steps. Two ranks on this machine train on Python's own library,
each way from the same weights, for the same number of steps of the same number of tokens. Seconds tell nothing here, for
the loopback is no slow link: bench/two_nodes.py measures those. "alone" is one rank that trains on its half of the rows:
what a way with local steps has to beat, or the other host is of no use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pieces import free_port

TRAINER = Path(__file__).resolve().parents[1] / "trainer"
ALONE = "alone"
WAYS = ("exact", "exact/10", "bf16/10", "exact/50", ALONE)
VOCABULARY, LENGTH, ROWS = 4096, 128, 4
MODEL = ["--depth", "4", "--aspect-ratio", "32", "--head-dim", "32", "--max-seq-len", str(LENGTH)]


def prepare(folder: Path) -> None:
    """Shards and tokenizer out of Python's own library."""
    library = sysconfig.get_paths()["stdlib"]
    call("scripts.make_shards", "--from", library, "--out", str(folder / "data"), "--shards", "3", "--suffix", ".py")
    call("scripts.tok_train", "--vocab-size", str(VOCABULARY), folder=folder)


def environment(folder: Path, **more: str) -> dict[str, str]:
    paths = {"NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_DATA_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def call(module: str, *argv: str, folder: Path | None = None) -> None:
    environ = environment(folder) if folder else None
    subprocess.run([sys.executable, "-m", module, *argv], cwd=TRAINER, env=environ, check=True, stdout=sys.stderr)


def train(way: str, steps: int, folder: Path) -> dict[str, Any]:
    """One way; what its last evaluation and its losses came to."""
    world = 1 if way == ALONE else 2
    sync, dummy, every = ("exact" if way == ALONE else way).partition("/")
    name = way.replace("/", "-")
    flags = [
        *MODEL, "--device-batch-size", str(ROWS), "--total-batch-size", str(world * ROWS * LENGTH),
        "--num-iterations", str(steps), "--eval-every", str(max(1, steps // 3)), "--eval-tokens", "65536",
        "--sample-every", "-1", "--core-metric-every", "-1", "--run-dir", str(folder / name), "--model-tag", name,
        "--sync", sync, "--local-steps", every or "0",
    ]  # fmt: skip
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.base_train", *flags],
            cwd=TRAINER,
            env=environment(folder, RANK=str(rank), LOCAL_RANK=str(rank), **place),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{way} failed")
    return told(way, folder / name / "metrics-rank0.jsonl")


def told(way: str, metrics: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    made = [event for event in events if event["kind"] == "step"]
    return {
        "way": way,
        "steps": len(made),
        "val_bpb": {event["step"]: event["val_bpb"] for event in events if event["kind"] == "eval"},
        "megabytes_a_step": sum(event["bytes_sent"] for event in made) / len(made) / 1e6,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    steps = list(results[0]["val_bpb"])
    heads = ["way", *(f"bpb after {step}" for step in steps), "MB a step and rank"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in results:
        found = [f"{bpb:.4f}" for bpb in one["val_bpb"].values()]
        lines.append(f"| {one['way']} | {' | '.join(found)} | {one['megabytes_a_step']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What local steps cost in quality.")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="--sync, or --sync/--local-steps, or alone")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--write", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="local-steps-") as folder:
        prepare(Path(folder))
        results = []
        for way in arguments.ways:
            print(f"{way} ...", file=sys.stderr, flush=True)
            results.append(train(way, arguments.steps, Path(folder)))
    print(table(results))
    if arguments.write:
        arguments.write.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
