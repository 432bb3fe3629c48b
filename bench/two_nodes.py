# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of the network: two nodes with a core each, joined by a link of known rate, for each way of --sync.

    sudo python bench/two_nodes.py                       # d4 and d8 at 1 Gbit/s and 100 Mbit/s
    sudo python bench/two_nodes.py --models d4 --rates 1gbit --cycles 20
    sudo python bench/two_nodes.py --models d4 --rates 100mbit --passes 4 --modes exact,int8+head
    sudo python bench/two_nodes.py --models d4 --rates 1gbit,100mbit --as-fast-as 8 --modes exact+head,int8+head,int4+head

The nodes are network namespaces on this machine, joined by two virtual interfaces shaped by tc. The ways alternate step by
step in the same two processes, and so does "alone": both nodes train the same rows at the same time without communicating.
Efficiency is the seconds of a step alone divided by those of a common step, the median over all cycles, so that other work
affects all ways alike. Token frequencies are those of text. int8 and int4 are measured only on request. exact+head, bf16+head
and so on share the head (--head shared) instead of sending its gradient; exact+undo and so on keep copies to take an
interrupted update back (--save-on-loss).
Beside each way is the prediction of the rehearsal's formula, from the link's rate and a step measured like the rehearsal's, in
the same processes before the turns; it assumes --head auto, so ways with another head have none. With --delay the link
is two tun interfaces and a forwarding thread (delay_line.py), because tc delays only if the kernel has netem. --as-fast-as 8
foresees hosts eight times as fast as this machine's core by slowing down time: the link is eight times as slow and --delay
eight times as long as given, and an eighth of all measured seconds is reported. --passes 4 makes four passes a step on each
node, over four times as many rows.
Needs root, iproute2 and two cores; removes only the namespaces that it made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from delay_line import MTU, delayed
from pieces import TRAINER, train_step

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ansible" / "collections"))
ALONE = "alone"
# Every gradient whole (baseline_sync.py).
BASELINE = "ddp"
# Suffix of ways in which each node has a part of the vocabulary (--head shared).
SHARED = "+head"
USUAL = [ALONE, BASELINE, "exact", "bf16", "exact" + SHARED, "bf16" + SHARED]
# Suffix of ways that keep copies to take an interrupted update back (--save-on-loss).
UNDO = "+undo"
MODES = (*USUAL, "int8", "int4", "int8" + SHARED, "int4" + SHARED, "exact" + UNDO, "bf16" + UNDO, "int8" + UNDO)
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 29577
WARM_UP = 1
# Payload share of a packet's bytes on the wire, as a TCP bandwidth test finds.
PAYLOAD = 1448 / 1514
HEADERS = 52  # of a packet without Ethernet, as between tun interfaces
LATENCY_MS = 0.2  # round trip without --delay
UNITS = {"gbit": 1000.0, "mbit": 1.0, "kbit": 0.001}
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


class Model(NamedTuple):
    """A size to measure; rows: per node and step."""

    depth: int
    head_dim: int
    length: int
    rows: int
    cycles: int


VOCABULARY = 32768
# With one row a step takes little more than half as long, as on a faster processor, with less time to hide transfers.
MODELS = {"d4": Model(4, 64, 512, 2, 12), "d8": Model(8, 128, 1024, 2, 5), "d4-1row": Model(4, 64, 512, 1, 12)}


# -- the two nodes


def command(*argv: str) -> str:
    """Run a tool; if it fails, exit with its message."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


@contextlib.contextmanager
def link(names: Sequence[str], delay: float) -> Iterator[None]:
    """A link between two namespaces, with this one-way delay in seconds; its ends are node0 and node1."""
    ends = [f"bench{os.getpid()}-{rank}" for rank in range(len(names))]
    with contextlib.ExitStack() as stack:
        if delay:
            stack.enter_context(delayed(ends, delay))
        else:
            command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for rank, name in enumerate(names):
            command("ip", "link", "set", ends[rank], "netns", name, "name", f"node{rank}")
            command("ip", "-n", name, "address", "add", f"{ADDRESSES[rank]}/24", "dev", f"node{rank}")
            command("ip", "-n", name, "link", "set", f"node{rank}", "up", *(["mtu", str(MTU)] if delay else []))
        yield


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces."""
    names = (f"nanochat-bench-{os.getpid()}-a", f"nanochat-bench-{os.getpid()}-b")
    made: list[str] = []
    try:
        for name in names:
            command("ip", "netns", "add", name)
            made.append(name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def shape(names: Sequence[str], rate: str, times: float) -> None:
    """Limit the sending rate of both nodes, with a queue of as many bytes on a link slowed down that many times."""
    for rank, name in enumerate(names):
        slowed = f"{megabits(rate) / times:g}mbit"
        # Two milliseconds' bytes, so that what idle time saves up is little beside a step's; and at least a packet of TCP,
        # since splitting packets took 40 % of a core during transfers.
        burst = f"{max(68.0, 0.25 * megabits(rate)):g}kb"
        limit = ["rate", slowed, "burst", burst, "latency", f"{50 * times:g}ms"]
        command("tc", "-n", name, "qdisc", "replace", "dev", f"node{rank}", "root", "tbf", *limit)


def megabits(rate: str) -> float:
    """Parse a rate in tc's notation."""
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit]


def measure(names: Sequence[str], cores: Sequence[int], arguments: argparse.Namespace, model: str) -> list[Any]:
    """Run a process on each node; returns each one's rehearsal and steps."""
    processes = []
    for rank, name in enumerate(names):
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
        environ = os.environ | {key: str(value) for key, value in place.items()}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"node{rank}", "PYTHONPATH": str(TRAINER)}
        environ |= {"GLIBC_TUNABLES": MALLOC, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        argv = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[rank]), sys.executable, __file__, "--worker"]
        argv += ["--models", model, "--modes", ",".join(arguments.modes), "--cycles", str(arguments.cycles)]
        argv += ["--passes", str(arguments.passes)]
        processes.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True))
    outs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{model} failed")
    return [json.loads(out.splitlines()[-1]) for out in outs]


# -- on a node


def rehearse(model: Model) -> dict[str, Any]:
    """Measure a step like the rehearsal."""
    from nanochat.kit.settings import parse
    from scripts.measure_step import measure

    flags = {"depth": model.depth, "head-dim": model.head_dim, "max-seq-len": model.length, "num-iterations": 1}
    flags |= {"device-batch-size": model.rows, "total-batch-size": model.rows * model.length}
    return measure(parse([f"--{name}={value}" for name, value in flags.items()]), VOCABULARY, 20.0, 3)


def work(model: Model, modes: Sequence[str], cycles: int, passes: int) -> dict[str, list[dict[str, float]]]:
    """Train like scripts.base_train, without data and disk, alternating between ways; returns the cost of every step."""
    import torch
    from baseline_sync import WholeSync

    from nanochat.kit.common import read_ranks
    from nanochat.kit.connections import start_pacing
    from nanochat.model import numerics
    from nanochat.model.fused import TrainingPass
    from nanochat.model.gpt import GPT
    from nanochat.model.gradients import HEAD
    from nanochat.model.optim import DenseAdamW, LearningRates, Optimizer, Undo
    from nanochat.parallel.comm import connect
    from nanochat.parallel.shared_head import SharedHead
    from nanochat.parallel.sync import NO_NOTICE, Notice, Sync, make_sync
    from nanochat.parallel.wire import WIRES
    from nanochat.rules.model_size import ModelConfig
    from nanochat.rules.shares import part_bounds

    numerics.setup()
    comm = connect(read_ranks(), "cpu", 300)
    start_pacing()
    gpt = GPT(
        ModelConfig.from_depth(model.depth, head_dim=model.head_dim, sequence_len=model.length, vocab_size=VOCABULARY)
    )
    gpt.init_weights()
    training, optimizer = TrainingPass(gpt), Optimizer(gpt, LearningRates().scaled(0.06))
    tokens = passes * model.rows * model.length
    odds = 1.0 / (torch.arange(gpt.config.vocab_size) + 2.7)
    generator = torch.Generator().manual_seed(comm.rank)

    class Alone(Sync):
        """Trains beside the other rank without communicating."""

        def offer_ids(self, ids: Sequence[torch.Tensor], notice: Notice = NO_NOTICE) -> None:
            self.mine = torch.cat([part.flatten() for part in ids])

        def take_ids(self) -> tuple[torch.Tensor, bool]:
            return torch.unique(self.mine), False

    def sync_of(mode: str) -> Sync:
        if mode == ALONE:
            return Alone(comm, training, optimizer, [tokens])
        if mode == BASELINE:
            return WholeSync(comm, training, optimizer, [tokens] * comm.world)
        shared = mode.endswith(SHARED)
        mode = mode.removesuffix(SHARED).removesuffix(UNDO)
        passing = TrainingPass(gpt, shared_head=shared_head(mode)) if shared else training
        return make_sync(mode, comm, passing, optimizer, [tokens] * comm.world)

    def shared_head(mode: str) -> SharedHead:
        bounds = part_bounds(gpt.config.vocab_size, gpt.config.padded_vocab_size, [1] * comm.world)
        return SharedHead(comm, gpt, bounds, [[tokens // passes] * comm.world] * passes, WIRES[mode].hidden)

    def head_state(sync: Sync) -> DenseAdamW:
        """State of the whole head, or of this rank's part."""
        shared = sync.head
        return DenseAdamW(gpt.lm_head.weight.detach(), whole.group, shared.rows) if shared else whole

    def draw() -> torch.Tensor:
        """Rows by pass."""
        count = passes * model.rows * (model.length + 1)
        drawn = torch.multinomial(odds, count, replacement=True, generator=generator)
        return drawn.view(passes, model.rows, model.length + 1)

    ways, whole = {mode: sync_of(mode) for mode in modes}, optimizer.dense[HEAD]
    states = {mode: head_state(sync) for mode, sync in ways.items()}
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    undo = Undo()
    for dummy in range(WARM_UP + cycles):
        for mode, sync in ways.items():
            rows = draw()
            optimizer.dense[HEAD] = states[mode]
            optimizer.undo = undo if mode.endswith(UNDO) else None
            comm.exchange("the start of a step", mode)
            found[mode].append(one_step(sync, rows))
    comm.close()
    return {mode: steps[WARM_UP:] for mode, steps in found.items()}


def one_step(sync: Any, rows: Any) -> dict[str, float]:
    """One step over these rows by pass; returns seconds, seconds waited for the other rank, CPU seconds and bytes sent."""
    from nanochat.rules.schedule import StepSchedule

    sync.comm.take_counters()
    begun, worked = time.perf_counter(), time.process_time()
    train_step(sync, rows, StepSchedule(0.5, 0.9, 0.01))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - worked
    waited, sent = sync.comm.take_counters()
    return {"seconds": seconds, "cpu": cpu, "waited": waited, "bytes": sent}


# -- the whole series and its table


def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every model at every rate."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two nodes need two cores")
    results = []
    delay, times = arguments.delay / 1000, arguments.as_fast_as
    with namespaces() as names, link(names, delay * times):
        for model in arguments.models:
            for rate in arguments.rates:
                label = label_of(rate, arguments.delay, times, arguments.passes)
                print(f"{model} at {label} ...", file=sys.stderr, flush=True)
                shape(names, rate, times)
                told = [sped_up(one, times) for one in measure(names, cores, arguments, model)]
                found = summary(model, label, [steps for dummy, steps in told])
                speeds = [speed for speed, dummy in told]
                add_expected(found, MODELS[model], rate, delay, speeds, times, arguments.passes)
                results += found
                print(table(found), file=sys.stderr, flush=True)
    return results


def label_of(rate: str, delay: float, times: float, passes: int) -> str:
    """The link of the foreseen hosts, and the passes of a step."""
    told = [rate] + [f"{delay:g} ms"] * bool(delay) + [f"hosts {times:g} times as fast"] * (times != 1)
    return ", ".join(told + [f"{passes} passes"] * (passes != 1))


def sped_up(told: Any, times: float) -> Any:
    """Everything that a node measured in seconds, on a host that many times as fast."""
    if isinstance(told, list):
        return [sped_up(one, times) for one in told]
    if not isinstance(told, dict):
        return told
    timed = ("seconds", "cpu", "waited")
    return {
        key: value / times if key.endswith(timed) and isinstance(value, (int, float)) else sped_up(value, times)
        for key, value in told.items()
    }


def summary(model: str, rate: str, ranks: Sequence[dict[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """Medians of each way over cycles (of the slower rank), compared with a step alone."""

    def cycles(mode: str, what: str) -> list[float]:
        return [max(steps[what] for steps in both) for both in zip(*(rank[mode] for rank in ranks), strict=True)]

    rows = []
    for mode in ranks[0]:
        ratios = [a / b for a, b in zip(cycles(ALONE, "seconds"), cycles(mode, "seconds"), strict=True)]
        row = {what: statistics.median(cycles(mode, what)) for what in ("seconds", "cpu", "waited", "bytes")}
        row |= {"model": model, "rate": rate, "sync": mode, "cycles": len(ratios)}
        row["efficiency"] = statistics.median(ratios)
        rows.append(row)
    return rows


def add_expected(
    rows: Sequence[dict[str, Any]],
    model: Model,
    rate: str,
    delay: float,
    speeds: Sequence[dict[str, Any]],
    times: float = 1.0,
    passes: int = 1,
) -> None:
    """Add the rehearsal's prediction for each way, and the choice of auto."""
    from ansible_collections.nanochat.ddp.plugins.module_utils._plan import step_model
    from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_memory import describe
    from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import ModelConfig

    shape = ModelConfig.from_depth(model.depth, 64, model.head_dim, model.length, VOCABULARY)
    hosts, rows_of_node = ("one", "two"), passes * model.rows
    batch = 2 * rows_of_node * model.length, model.rows
    job = step_model.StepJob(hosts, (rows_of_node,) * 2, describe(shape, 64), *batch, sync_open=True).with_sync(
        "exact", "auto"
    )
    each = step_model.speeds_of(hosts, dict(zip(hosts, speeds, strict=True)))
    payload = (MTU - HEADERS) / MTU if delay else PAYLOAD
    link = step_model.Link(megabits(rate) * payload, LATENCY_MS / times + 2000 * delay)
    taken = step_model.choose_sync(job, each, link)
    for row in rows:
        kind = str(row["sync"]).removesuffix(SHARED).removesuffix(UNDO)
        if kind in step_model.WAYS and (job.under(kind).head == "shared") == row["sync"].endswith(SHARED):
            row["expected"] = step_model.predict(job.under(kind), each, link).seconds
            row["auto"] = kind == taken


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    heads = ["model", "link", "sync", "s/step", "CPU s", "waited s", "MB/step", "efficiency", "expected s", "off by"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in results:
        numbers = f"{one['seconds']:.3f} | {one['cpu']:.3f} | {one['waited']:.3f} | {one['bytes'] / 1e6:.1f}"
        expected = one.get("expected")
        beside = f"{expected:.3f} | {100 * (expected / one['seconds'] - 1):+.0f} %" if expected else " | "
        name = one["sync"] + (" (auto)" if one.get("auto") else "")
        lines.append(
            f"| {one['model']} | {one['rate']} | {name} | {numbers} | {100 * one['efficiency']:.0f} % | {beside} |"
        )
    return "\n".join(lines)


def several(choices: Sequence[str]) -> Any:
    """An argparse type: a comma-separated list of known values, or of any."""

    def read(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if choices and part not in choices:
                raise argparse.ArgumentTypeError(f"{part} is none of {', '.join(choices)}")
        return parts

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description="What the network costs, for each way of --sync.")
    parser.add_argument("--models", type=several(list(MODELS)), default=["d4", "d8"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rates", type=several(()), default=["1gbit", "100mbit"], help="link rates as tc writes them")
    parser.add_argument("--modes", type=several(MODES), default=USUAL, help=f"of {', '.join(MODES)}")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds that the link takes one way")
    parser.add_argument("--as-fast-as", type=float, default=1.0, help="foresee hosts this many times as fast as a core")
    parser.add_argument("--passes", type=int, default=1, help="passes of a step, each of the model's rows")
    parser.add_argument("--cycles", type=int, default=0, help="steps of each way (default: 12 for d4, 5 for d8)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if ALONE not in arguments.modes:
        arguments.modes.insert(0, ALONE)
    if arguments.worker:
        model = MODELS[arguments.models[0]]
        found = [rehearse(model), work(model, arguments.modes, arguments.cycles or model.cycles, arguments.passes)]
        print(json.dumps(found))
    else:
        print(table(measure_all(arguments)))


if __name__ == "__main__":
    main()
