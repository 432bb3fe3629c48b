# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A nanochat checkout whose ranks are joined, beside our own trainer: two nodes with a core each and a link of a known rate.

    sudo python bench/joined_checkout.py --base ~/.cache/nanochat-ddp/node1/runs/d4      # the stand-in of the tests
    sudo python bench/joined_checkout.py --base RUN_FOLDER --checkout ~/nanochat --write joined.json --rounds 1
    python bench/joined_checkout.py --show joined.json   # all tables that were written there

The ways take turns, a short run of all steps each, and every round compares them with the plain Gloo way of the same round
(join.py --sync dense: every gradient whole, as a group put into the checkout by hand sends them), so that a busy machine treats
them alike. A step counts from the second one on; each way's seconds are the median of its steps, on the slower node, and its
ratio the median over the rounds. With --write the rounds are added to those that the file has of the same checkout and rate, so
that they can be made one by one. --base is a run folder with data/ and tokenizer/. The stand-in's model is small and fixed, and
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
PLAIN, STAND_IN_NAME = "joined dense", "stand-in"
WAYS = (PLAIN, "joined exact", "joined bf16", "joined int8", "ours exact", "ours bf16", "ours int8")
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
    """The command of a rank for a way."""
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
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as place, namespaces() as names:
        shape(names, arguments.rate)
        checkout = arguments.checkout or stand_in(Path(place))
        flags = FLAGS if arguments.checkout else STAND_IN
        for number in range(arguments.rounds):
            for way in WAYS:
                found[way].append(run(way, names, checkout, arguments.base, flags, arguments.steps))
                print(f"round {number + 1}: {way} {found[way][-1]:.3f} s/step", file=sys.stderr, flush=True)
    return {
        "checkout": arguments.checkout.name if arguments.checkout else STAND_IN_NAME,
        "rate": arguments.rate,
        "seconds": found,
    }


def added(file: Path, fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """A file's results, with these rounds after those of the same checkout and rate."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for one in kept:
        if (one["checkout"], one["rate"]) == (fresh["checkout"], fresh["rate"]):
            for way, seconds in fresh["seconds"].items():
                one["seconds"].setdefault(way, []).extend(seconds)
            return list(kept)
    return [*kept, fresh]


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results for people."""
    lines = ["| checkout | link | way | s/step | speed beside plain Gloo |", "|---|---|---|---|---|"]
    for result in results:
        seconds = result["seconds"]
        for way, each in seconds.items():
            ratio = statistics.median(plain / one for plain, one in zip(seconds[PLAIN], each, strict=True))
            told = f"{statistics.median(each):.3f} | {ratio:.2f}"
            lines.append(f"| {result['checkout']} | {result['rate']} | {way} | {told} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="A joined checkout beside our trainer and beside plain Gloo.")
    parser.add_argument("--base", type=Path, help="a run folder with data/ and tokenizer/")
    parser.add_argument("--checkout", type=Path, help="a nanochat checkout (default: the tests' stand-in)")
    parser.add_argument("--rate", default="1gbit", help="the link's rate as tc writes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--write", type=Path, help="file for the results as JSON, beside those that it holds")
    parser.add_argument("--show", type=Path, help="only print the tables of such a file")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))))
        return
    if arguments.base is None:
        parser.error("--base: name a run folder with data/ and tokenizer/")
    results = [measure(arguments)]
    if arguments.write:
        results = added(arguments.write, results[0])
        arguments.write.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
