# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A nanochat checkout whose ranks are joined, beside our own trainer: two nodes with a core each and a link of a known rate.

    sudo python bench/joined_checkout.py --base ~/.cache/nanochat-ddp/node1/runs/d4      # the stand-in of the tests
    sudo python bench/joined_checkout.py --base RUN_FOLDER --checkout ~/nanochat --write joined.json

The ways take turns, a short run of all steps each, and every round compares them with the plain Gloo way of the same round
(join.py --sync dense: every gradient whole, as a group put into the checkout by hand sends them), so that a busy machine treats
them alike. A step counts from the second one on; each way's seconds are the median of its steps, on the slower node, and its
ratio the median over the rounds. --base is a run folder with data/ and tokenizer/. The stand-in's model is small and fixed, and
ours is given the nearest shape; a real checkout takes the flags that ours takes. Needs root, iproute2 and two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from two_nodes import ADDRESSES, MALLOC, PORT, namespaces, shape

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "trainer"
PLAIN = "joined dense"
OWN = ("exact", "bf16")
JOINED = ("dense", "exact", "bf16")
FLAGS = {
    "device-type": "cpu", "depth": 4, "aspect-ratio": 64, "head-dim": 64, "max-seq-len": 512, "device-batch-size": 2,
    "total-batch-size": 2048, "eval-every": -1, "core-metric-every": -1, "sample-every": -1, "window-pattern": "SSSL",
}  # fmt: skip
# What the stand-in's model is, and ours beside it.
STAND_IN = {
    **FLAGS, "depth": 3, "aspect-ratio": 21, "head-dim": 32, "max-seq-len": 64, "total-batch-size": 256, "window-pattern": "L",
}  # fmt: skip


def stand_in(folder: Path) -> Path:
    """The checkout that the tests use."""
    checkout = Path(shutil.copytree(ROOT / "tests" / "stand_in", folder / "stand_in"))
    shutil.copy(ROOT / "bench" / "baseline_model.py", checkout / "nanochat")
    return checkout


def argv_of(way: str, base: Path, flags: dict[str, Any], steps: int) -> list[str]:
    """What a rank of a way is started with."""
    kind, sync = way.split()
    words = [f"--{name}={value}" for name, value in {**flags, "num-iterations": steps, "model-tag": "bench"}.items()]
    if kind == "ours":
        return ["-m", "scripts.base_train", *words, f"--sync={sync}", f"--run-dir={base}"]
    return [str(TRAINER / "scripts" / "join.py"), f"--sync={sync}", f"--run-dir={base}", "scripts.base_train", *words]


def run(way: str, names: Sequence[str], checkout: Path, data: Path, flags: dict[str, Any], steps: int) -> float:
    """One short run of both ranks; the median seconds of its steps, on the slower of them."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        processes = []
        for rank, name in enumerate(names):
            base = Path(place) / str(rank)
            base.mkdir()
            for link in ("tokenizer", "data"):
                (base / link).symlink_to((data / link).resolve())
            (base / "base_data_climbmix").symlink_to("data")
            told = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
            environ = os.environ | {key: str(value) for key, value in told.items()}
            environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"node{rank}", "GLIBC_TUNABLES": MALLOC}
            environ |= {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DTYPE": "float32", "CUDA_VISIBLE_DEVICES": ""}
            environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            argv = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[rank % len(cores)]), sys.executable]
            argv += argv_of(way, base, flags, steps)
            where = TRAINER if way.startswith("ours") else checkout
            processes.append(
                subprocess.Popen(
                    argv, env=environ, cwd=where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
            )
        errors = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"{way} failed: {' | '.join(error[-600:] for error in errors)}")
        return max(seconds_of(Path(place) / str(rank) / f"metrics-rank{rank}.jsonl") for rank in range(2))


def seconds_of(metrics: Path) -> float:
    """The median of the steps but for the first."""
    events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return statistics.median([event["seconds"] for event in events if event["kind"] == "step"][1:])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way in every round."""
    ways = [*(f"joined {sync}" for sync in JOINED), *(f"ours {sync}" for sync in OWN)]
    found: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as place, namespaces() as names:
        shape(names, arguments.rate)
        checkout = arguments.checkout or stand_in(Path(place))
        flags = FLAGS if arguments.checkout else STAND_IN
        for number in range(arguments.rounds):
            for way in ways:
                found[way].append(run(way, names, checkout, arguments.base, flags, arguments.steps))
                print(f"round {number + 1}: {way} {found[way][-1]:.3f} s/step", file=sys.stderr, flush=True)
    return {"checkout": str(arguments.checkout or "stand-in"), "rate": arguments.rate, "seconds": found}


def table(result: dict[str, Any]) -> str:
    """The results for people."""
    seconds = result["seconds"]
    lines = ["| checkout | link | way | s/step | speed beside plain Gloo |", "|---|---|---|---|---|"]
    for way, each in seconds.items():
        ratio = statistics.median(plain / one for plain, one in zip(seconds[PLAIN], each, strict=True))
        name = Path(result["checkout"]).name
        lines.append(f"| {name} | {result['rate']} | {way} | {statistics.median(each):.3f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="A joined checkout beside our trainer and beside plain Gloo.")
    parser.add_argument("--base", type=Path, required=True, help="a run folder with data/ and tokenizer/")
    parser.add_argument("--checkout", type=Path, help="a nanochat checkout (default: the tests' stand-in)")
    parser.add_argument("--rate", default="1gbit", help="the link's rate as tc writes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--write", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.write:
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
