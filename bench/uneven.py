# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The speed of unequal hosts together: pairs of 2:1, 3:1 and 10:1, and a trio of 4:2:1.

    sudo python bench/uneven.py                          # all cases, some minutes each
    sudo python bench/uneven.py --cases 3:1 --rows 4     # as many rows a step as the ten-step trial has
    sudo python bench/uneven.py --short                  # a small model and few steps, to try the command

The hosts are processes of this machine: the first has a core of its own, the others share another, each with a limit of a control
group (cpu.max, or cpu.cfs_quota_us of version 1) of its part of it, in periods of 10 ms. Each is measured alone under that
limit, all at the same time, before each step that counts: it trains the whole batch by itself, without a word to the others. The sum of
these speeds is 100 %. The shares of ddp_batch_split=auto are what the plan makes of the speeds as measured first, and what --rebalance
makes of some steps with these. They and the equal split of ddp_batch_split=equal take turns, with a model each, on the same rows; the
efficiency is the median of the steps, each against the speeds just before it, since those drift. As losses of both splits must be
the same within float rounding, the largest difference is printed, too, and one above 1e-3 is an error. Tokens are drawn so that few
are frequent and many rare, as in a text. Prints a line "efficiency NN %" for each case. Needs root and two cores; removes the
control groups that it made.
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

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "trainer"
sys.path.insert(0, str(ROOT / ".ansible" / "collections"))
CASES = {"2:1": (2, 1), "3:1": (3, 1), "10:1": (10, 1), "4:2:1": (4, 2, 1)}
PORT = 29581
PERIOD = 10_000  # microseconds
VOCABULARY = 32768
ROUNDING = 1e-3
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


class Model(NamedTuple):
    """A size to train."""

    depth: int
    head_dim: int
    length: int
    vocabulary: int


MODELS = {"d4": Model(4, 64, 512, VOCABULARY), "short": Model(2, 64, 128, 4096)}
# The steps that count; the equal split makes fewer, since they take long.
CYCLES, EQUAL_STEPS = 5, 3
# Steps from which --rebalance judges; the first one touches memory for the first time.
LOOK = 3


# -- the hosts


@contextlib.contextmanager
def groups(parts: Sequence[float]) -> Iterator[list[Path]]:
    """A control group for each host, which has that part of a core."""
    version_1 = Path("/sys/fs/cgroup/cpu")
    root = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    made: list[Path] = []
    try:
        for rank, part in enumerate(parts):
            group = root / f"nanochat-bench-{os.getpid()}-{rank}"
            group.mkdir()
            made.append(group)
            quota = int(PERIOD * part)
            if root == version_1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        yield made
    except OSError as error:
        raise SystemExit(f"a control group with a limit cannot be made here: {error}; run this as root") from None
    finally:
        for group in made:
            group.rmdir()


def measure(case: str, model: str, rows: int, cycles: int) -> list[Any]:
    """One process for each host; what each says."""
    speeds, cores = CASES[case], sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("unequal hosts need two cores")
    with groups([speed / speeds[0] for speed in speeds]) as places:
        processes = []
        for rank, group in enumerate(places):
            place = {"RANK": rank, "WORLD_SIZE": len(speeds), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
            environ = os.environ | {key: str(value) for key, value in place.items()}
            environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(TRAINER)}
            environ |= {"GLIBC_TUNABLES": MALLOC, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            argv = ["taskset", "-c", str(cores[min(rank, 1)]), sys.executable, __file__, "--worker", "--model", model]
            argv += ["--rows", str(rows), "--cycles", str(cycles)]
            enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            argv = ["sh", "-c", enter, "sh", *argv]
            processes.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True))
        outs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case} failed")
    return [json.loads(out.splitlines()[-1]) for out in outs]


# -- what runs on a host


def train(model: Model, rows: int, cycles: int) -> dict[str, Any]:
    """This host's speed alone, and the seconds and losses of both splits."""
    import torch

    from nanochat.kit.common import Ranks, read_ranks
    from nanochat.model import numerics
    from nanochat.parallel.comm import connect
    from nanochat.rules.shares import spread

    numerics.setup()
    comm = connect(read_ranks(), "cpu", 600)
    generator = torch.Generator().manual_seed(7)
    batches = [draw(model, rows, generator) for dummy in range(1 + cycles)]
    alone = Way(connect(Ranks(0, 0, 1), "cpu", 600), model, [rows])
    first = alone.seconds(batches[0])
    speeds = [speed_alone(comm, alone, batches[0], first)]
    planned = shares(model, rows, comm.exchange("the speeds", speeds[0], patient=True))
    each, head = rebalanced(comm, Way(comm, model, *planned), planned, batches[:LOOK])
    ways = {"equal": Way(comm, model, spread(rows, comm.world)), "auto": Way(comm, model, each, head)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, batch in enumerate(batches):
        if number:
            speeds.append(speed_alone(comm, alone, batch, first))
        for name, way in ways.items():
            if name == "auto" or number < EQUAL_STEPS:
                comm.exchange("the start of a step", name, patient=True)
                seconds[name].append(way.seconds(batch))
    comm.close()
    # The first steps touch memory for the first time.
    steps_of = {name: taken[1:] for name, taken in seconds.items()}
    told = {"planned": planned, "rows": each, "head": head, "seconds": steps_of, "speeds": speeds[1:]}
    return {"losses": {name: way.losses for name, way in ways.items()}, **told}


def speed_alone(comm: Any, alone: Way, batch: Any, first: float) -> float:
    """Tokens a second of steps that this host makes alone, for as long as the slowest of all needs for one."""
    longest = max(comm.exchange("the first step alone", first, patient=True))
    begun, steps = time.perf_counter(), 0
    while steps < 1 or time.perf_counter() - begun < longest:
        alone.seconds(batch)
        steps += 1
    seconds = time.perf_counter() - begun
    comm.exchange("the end of the measurement alone", None, patient=True)
    return steps * batch[:, 1:].numel() / seconds


def rebalanced(comm: Any, way: Way, planned: tuple[list[int], list[int]], batches: Sequence[Any]) -> Any:
    """The shares that --rebalance comes to after some steps with those that the plan has."""
    from nanochat.parallel.balance import LOOK_SECONDS, LOOKS, WARM_UP, Shares
    from nanochat.run.machinery import new_balancer

    busy = []
    for batch in batches:
        waited, taken = comm.wait_seconds, way.seconds(batch)
        busy.append(comm.exchange("how long each was busy", taken - (comm.wait_seconds - waited), patient=True))
    balancer = new_balancer(way.model, Shares(*planned))
    usual = [statistics.median(one) for one in zip(*busy[1:], strict=True)]
    # As if these steps came again and again.
    for dummy in range(WARM_UP + LOOKS * (2 + int(LOOK_SECONDS / max(usual)))):
        if found := balancer.hear(usual):
            return found
    return planned


def draw(model: Model, rows: int, generator: Any) -> Any:
    import torch

    odds = 1.0 / (torch.arange(model.vocabulary) + 2.7)
    return torch.multinomial(odds, rows * (model.length + 1), True, generator=generator).view(rows, model.length + 1)


def shares(model: Model, rows: int, speeds: Sequence[float]) -> tuple[list[int], list[int]]:
    """Rows and parts of the head as the plan has them for these speeds, where the batch was set."""
    from ansible_collections.nanochat.ddp.plugins.module_utils._plan.batch import Wanted, plan_batch
    from ansible_collections.nanochat.ddp.plugins.module_utils._rules.shares import head_weights

    wanted = Wanted(model.length, rows * model.length, rows, True, False)
    return plan_batch(wanted, speeds).rows, head_weights(speeds)


class Way:
    """A model, and all that trains it with given shares."""

    def __init__(self, comm: Any, model: Model, rows: Sequence[int], head: Sequence[int] = ()) -> None:
        import torch

        from nanochat.kit.settings import parse
        from nanochat.model.gpt import GPT, ModelConfig
        from nanochat.parallel.shared_head import fit_head
        from nanochat.rules.schedule import plan_training
        from nanochat.rules.shares import passes_of
        from nanochat.run.machinery import first_shares, make_machinery

        torch.manual_seed(1)
        config = ModelConfig.from_depth(
            model.depth, head_dim=model.head_dim, sequence_len=model.length, vocab_size=model.vocabulary
        )
        gpt = GPT(config)
        gpt.init_weights()
        flags = [f"--max-seq-len={model.length}", f"--device-batch-size={max(rows)}"]
        flags += [f"--head-shares={','.join(map(str, head))}"] if head else []
        settings = fit_head(parse(flags), config, [one * model.length for one in rows], "cpu")
        plan = plan_training(
            scaling_parameters=10**7, reference_parameters=10**8, flops_per_token=10**7, num_iterations=1000,
            total_batch_size=sum(rows) * model.length,
        )  # fmt: skip
        self.comm, self.rows, self.model = comm, list(rows), gpt
        self.losses: list[float] = []
        self.machinery = make_machinery(settings, comm, gpt, plan, first_shares(settings, self.rows), "fp32")
        self.passes = passes_of(rows, max(rows), together=True)[comm.rank]

    def seconds(self, batch: Any) -> float:
        """How long a step over these rows takes."""
        begun = time.perf_counter()
        self.losses.append(self.step(batch))
        return time.perf_counter() - begun

    def step(self, batch: Any) -> float:
        """One step over these rows, of which this host takes its own; returns the loss."""
        import torch

        from nanochat.rules.schedule import StepSchedule

        training, optimizer, sync = self.machinery
        start = sum(self.rows[: self.comm.rank])
        mine = batch[start : start + self.rows[self.comm.rank]]
        parts = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in mine.split(self.passes) if len(one)]
        sync.offer_ids([ids for ids, dummy in parts])
        token_ids = sync.take_ids()[0]
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        scale, loss = 1 / batch[:, 1:].numel(), torch.zeros(())
        for number, (ids, targets) in enumerate(parts, start=1):
            loss += training.forward_backward(ids, targets, scale, sync.on_ready if number == len(parts) else None)
        for dummy in range(len(parts), len(self.passes)):
            training.join_pass(scale)
        return float(sync.step(loss, StepSchedule(0.5, 0.9, 0.01)))


# -- what came out


def summary(case: str, rows: int, length: int, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one case."""
    speeds = [statistics.median(one["speeds"]) for one in told]
    sums = [sum(each) for each in zip(*(one["speeds"] for one in told), strict=True)]

    def efficiency(name: str) -> float:
        steps = [max(each) for each in zip(*(one["seconds"][name] for one in told), strict=True)]
        return statistics.median(rows * length / step / alone for step, alone in zip(steps, sums, strict=False))

    losses = told[0]["losses"]
    return {
        "case": case,
        "rows": rows,
        "speeds": [round(speed) for speed in speeds],
        "equal": efficiency("equal"),
        "auto": efficiency("auto"),
        "planned": told[0]["planned"],
        "auto_rows": told[0]["rows"],
        "auto_head": told[0]["head"],
        "difference": max(abs(a - b) for a, b in zip(losses["equal"], losses["auto"], strict=False)),
    }


def line(found: dict[str, Any]) -> str:
    rows, head, speeds = (" + ".join(map(str, found[key])) for key in ("auto_rows", "auto_head", "speeds"))
    return (
        f"{found['case']}: efficiency {100 * found['auto']:.0f} % (equal split {100 * found['equal']:.0f} %); rows {rows}, "
        f"head {head} of a thousand; alone {speeds} tok/s; losses differ by {found['difference']:.1e} at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", type=int, default=12, help="rows of a step, of all hosts")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="steps of auto that count")
    parser.add_argument("--short", action="store_true", help="a small model: to try the command, not to measure")
    parser.add_argument("--write", type=Path, help="file for the results, a JSON object a line")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    name = arguments.model or ("short" if arguments.short else "d4")
    model = MODELS[name]
    if arguments.worker:
        print(json.dumps(train(model, arguments.rows, arguments.cycles)))
        return
    for case in arguments.cases:
        found = summary(case, arguments.rows, model.length, measure(case, name, arguments.rows, arguments.cycles))
        print(line(found), flush=True)
        if arguments.write:
            with arguments.write.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        if found["difference"] > ROUNDING:
            raise SystemExit(f"{case}: the losses of the two splits differ by more than float rounding")


if __name__ == "__main__":
    main()
