#!/usr/bin/env python3
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the network costs: two nodes with a core each, joined by a link of a known rate, for each way of --sync.

    sudo python bench/two_nodes.py                       # d4 and d8 at 1 Gbit/s and 100 Mbit/s
    sudo python bench/two_nodes.py --models d4 --rates 1gbit --rounds 3 --write two_nodes.json

The nodes are two network namespaces of this machine, joined by a pair of virtual interfaces that tc shapes. Each way
is measured beside "alone": both nodes train the same rows at the same time, but neither says a word to the other.
Efficiency is the seconds of a step alone by those of a step together. All ways take turns in every round, so that a
busy machine treats them alike; the medians over all rounds are shown. Tokens are drawn so that the few are frequent
and the many rare, as in a text. Needs root, iproute2 and two cores; removes the namespaces that it made, and no others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TRAINER = Path(__file__).resolve().parents[1] / "trainer"
ALONE = "alone"
MODES = (ALONE, "dense", "ddp", "exact", "bf16")
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 29577
WARM_UP = 2
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


class Model(NamedTuple):
    """A size to measure: rows are those of one node in a step."""

    depth: int
    head_dim: int
    length: int
    rows: int
    steps: int


MODELS = {"d4": Model(4, 64, 512, 2, 10), "d8": Model(8, 128, 1024, 2, 4)}


# -- the two nodes


def command(*argv: str) -> str:
    """Run a tool; what it says when it fails is what we say."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them."""
    names = (f"nanochat-bench-{os.getpid()}-a", f"nanochat-bench-{os.getpid()}-b")
    made: list[str] = []
    try:
        for name in names:
            command("ip", "netns", "add", name)
            made.append(name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        command(
            "ip", "-n", names[0], "link", "add", "node0", "type", "veth", "peer", "name", "node1", "netns", names[1]
        )
        for rank, name in enumerate(names):
            command("ip", "-n", name, "address", "add", f"{ADDRESSES[rank]}/24", "dev", f"node{rank}")
            command("ip", "-n", name, "link", "set", f"node{rank}", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def shape(names: Sequence[str], rate: str) -> None:
    """Let no more than the rate leave either node."""
    for rank, name in enumerate(names):
        limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
        command("tc", "-n", name, "qdisc", "replace", "dev", f"node{rank}", "root", "tbf", *limit)


def measure(names: Sequence[str], cores: Sequence[int], model: str, mode: str) -> list[dict[str, Any]]:
    """One process on each node; every step of both."""
    processes = []
    for rank, name in enumerate(names):
        world = 1 if mode == ALONE else 2
        place = {
            "RANK": rank if world > 1 else 0,
            "WORLD_SIZE": world,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": PORT,
        }
        environ = os.environ | {name: str(value) for name, value in place.items()}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"node{rank}", "PYTHONPATH": str(TRAINER)}
        environ |= {"GLIBC_TUNABLES": MALLOC, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        argv = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[rank]), sys.executable, __file__]
        argv += ["--worker", mode, "--models", model]
        processes.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True))
    outs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{model} with --sync {mode} failed")
    return [step for out in outs for step in json.loads(out.splitlines()[-1])]


# -- what runs on a node


def work(model: Model, mode: str) -> list[dict[str, float]]:
    """Train some steps as scripts.base_train does, without data and disk; what each took."""
    import torch

    from nanochat import numerics
    from nanochat.comm import connect
    from nanochat.common import read_ranks
    from nanochat.fused import TrainingPass
    from nanochat.model import GPT, ModelConfig
    from nanochat.optim import LearningRates, Optimizer
    from nanochat.schedule import StepSchedule
    from nanochat.sync import make_sync

    numerics.setup()
    comm = connect(read_ranks(), "cpu", 300)
    gpt = GPT(ModelConfig.from_depth(model.depth, head_dim=model.head_dim, sequence_len=model.length))
    gpt.init_weights()
    training, optimizer = TrainingPass(gpt), Optimizer(gpt, LearningRates().scaled(0.06))
    tokens = model.rows * model.length
    sync = make_sync(mode, comm, training, optimizer, [tokens] * comm.world)
    odds = 1.0 / (torch.arange(gpt.config.vocab_size) + 2.7)
    generator = torch.Generator().manual_seed(comm.rank)

    def offer() -> torch.Tensor:
        drawn = torch.multinomial(odds, tokens + model.rows, replacement=True, generator=generator)
        rows = drawn.view(model.rows, model.length + 1)
        sync.offer_ids([rows[:, :-1]])
        return rows

    found, rows = [], offer()
    for dummy in range(WARM_UP + model.steps):
        comm.take_counters()
        begun = time.perf_counter()
        token_ids = sync.take_ids()[0]
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss = training.forward_backward(ids, targets, 1 / (tokens * comm.world), sync.on_ready)
        rows = offer()
        sync.step(torch.as_tensor(loss), StepSchedule(0.5, 0.9, 0.01))
        seconds = time.perf_counter() - begun
        waited, sent = comm.take_counters()
        found.append({"seconds": seconds, "waited": waited, "bytes": sent})
    comm.wait(*sync.pending_ids)
    comm.close()
    return found[WARM_UP:]


# -- all of it, and what came out


def rounds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model at every rate in every way, turn by turn."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two nodes need two cores")
    results = []
    with namespaces() as names:
        for model in arguments.models:
            for rate in arguments.rates:
                shape(names, rate)
                found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in arguments.modes}
                for number in range(arguments.rounds):
                    for mode in arguments.modes:
                        print(
                            f"{model} {rate} {mode}: round {number + 1}/{arguments.rounds}", file=sys.stderr, flush=True
                        )
                        found[mode] += measure(names, cores, model, mode)
                results += summary(model, rate, found)
    return results


def summary(model: str, rate: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The medians of each way, and how they compare with a step alone and with a dense exchange."""

    def middle(mode: str, what: str) -> float:
        return statistics.median(step[what] for step in found[mode])

    return [
        {
            "model": model,
            "rate": rate,
            "sync": mode,
            "seconds": middle(mode, "seconds"),
            "waited": middle(mode, "waited"),
            "bytes": middle(mode, "bytes"),
            "efficiency": middle(ALONE, "seconds") / middle(mode, "seconds"),
            "fewer_bytes": middle("dense", "bytes") / middle(mode, "bytes")
            if mode != ALONE and "dense" in found
            else None,
            "steps": len(found[mode]),
        }
        for mode in found
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results for people."""
    lines = ["| model | link | sync | s/step | waited s | MB/step | fewer bytes | efficiency |", "|" + "---|" * 8]
    for one in results:
        fewer = f"{one['fewer_bytes']:.1f}x" if one["fewer_bytes"] else ""
        numbers = f"{one['seconds']:.3f} | {one['waited']:.3f} | {one['bytes'] / 1e6:.1f} | {fewer}"
        lines.append(
            f"| {one['model']} | {one['rate']} | {one['sync']} | {numbers} | {100 * one['efficiency']:.0f} % |"
        )
    return "\n".join(lines)


def several(choices: Sequence[str]) -> Any:
    """A type for argparse: some of these, with commas between."""

    def read(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if choices and part not in choices:
                raise argparse.ArgumentTypeError(f"{part} is none of {', '.join(choices)}")
        return parts

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description="What the network costs, for each way of --sync.")
    parser.add_argument("--models", type=several(list(MODELS)), default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rates", type=several(()), default=["1gbit", "100mbit"], help="link rates as tc writes them")
    parser.add_argument("--modes", type=several(MODES), default=list(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=2, help="how often each way takes its turn")
    parser.add_argument("--write", type=Path, help="file for the results as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(MODELS[arguments.models[0]], arguments.worker)))
        return
    if ALONE not in arguments.modes:
        arguments.modes.insert(0, ALONE)
    results = rounds(arguments)
    print(table(results))
    if arguments.write:
        machine = {"host": socket.gethostname(), "cores": os.cpu_count()}
        arguments.write.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
