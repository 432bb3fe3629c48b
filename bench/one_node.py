# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One node: seconds a step of the trainer, in float32 and with bf16 products, with and without C kernels, against eager torch.

    python bench/one_node.py [--quick] [--sizes d4 d8] [--variants V ...] [--rounds N] [--threads N] [--write one_node.json]

Each variant is a process with the same weights, tokens and schedule. They alternate step by step, so that other work on the
machine slows all alike; a ratio is the median over rounds of two neighbouring steps.
"floor" is the time of a step's matrix products alone, with the same shapes, types and order, repeated in the same process
after each step; "share" is floor / step, the median over rounds: the rest is everything else that a step does.
"first step" is the time from having imported torch to the end of the first step, including building the model.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READY = time.perf_counter()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainer")]

from baseline_model import BaselineGPT, BaselineOptimizer  # noqa: E402

from nanochat.kit.common import cpu_flags  # noqa: E402
from nanochat.model import kernels, numerics  # noqa: E402
from nanochat.model.fused import TrainingPass, kernel_shape  # noqa: E402
from nanochat.model.gpt import GPT  # noqa: E402
from nanochat.model.gradients import unique_ids  # noqa: E402
from nanochat.model.optim import LearningRates, Optimizer  # noqa: E402
from nanochat.rules.model_size import ModelConfig  # noqa: E402
from nanochat.rules.schedule import StepSchedule  # noqa: E402

SIZES = {"d4": ModelConfig.from_depth(4, 64, 64, 512), "d8": ModelConfig.from_depth(8, 64, 128, 1024)}
ROUNDS = {"d4": 15, "d8": 5}
QUICK_ROUNDS = 5
HEADER = "size variant     median s   best s    tok/s  x the first  floor s  share  first step s   last loss"
VARIANTS = (
    "baseline",
    "fp32",
    "fp32+C",
    "bf16",
    "bf16+C",
)  # torch is fifty times slower with bf16 on a CPU without bf16 instructions
ROWS, ACCUMULATION = 2, 2
RATES = LearningRates().scaled(0.0625)
SCHEDULE = StepSchedule(0.5, 0.9, 0.01)
MicroBatches = list[tuple[Tensor, Tensor]]
Step = Callable[[MicroBatches], float]
# On a busy machine, NANOCHAT_CPU_TIME=1 with --threads 1 counts CPU time, which other work disturbs less.
clock = time.process_time if os.environ.get("NANOCHAT_CPU_TIME") else time.perf_counter


def micro_batches(config: ModelConfig, step: int) -> MicroBatches:
    """Tokens with the frequencies of words: the n-th with probability proportional to 1/n."""
    generator = torch.Generator().manual_seed(step)
    chances = 1 / torch.arange(1, config.vocab_size + 1)
    batches = []
    for dummy in range(ACCUMULATION):
        ids = torch.multinomial(chances, ROWS * (config.sequence_len + 1), True, generator=generator)
        rows = ids.view(ROWS, -1)
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


class Products(TorchDispatchMode):
    """Records the matrix products made within this context, to repeat them."""

    NAMES = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._tensors: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.NAMES:
            own = [self._like(arg, number) for number, arg in enumerate(args)]
            named = {name: self._like(arg, name) for name, arg in (kwargs or {}).items()}
            self.calls.append(lambda: func(*own, **named))
        return func(*args, **(kwargs or {}))

    def _like(self, arg: Any, place: int | str) -> Any:
        """A stand-in tensor of the same shape, type and layout, shared by all of the same kind; other values are returned unchanged."""
        if not isinstance(arg, Tensor):
            return arg
        key = (place, arg.shape, arg.stride(), arg.dtype)
        if key not in self._tensors:
            like = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype)
            self._tensors[key] = like.normal_(std=0.01)
        return self._tensors[key]

    @torch.no_grad()
    def seconds(self) -> float:
        """Seconds that all of them take."""
        start = clock()
        for call in self.calls:
            call()
        return clock() - start


def baseline_step(config: ModelConfig) -> Step:
    with torch.device("meta"):
        model = BaselineGPT(config)
    weights = GPT(config)
    weights.init_weights()
    model.load_state_dict(weights.state_dict(), assign=True)
    optimizer = BaselineOptimizer(model, RATES.embedding, RATES.unembedding, RATES.matrix, RATES.scalar)

    def step(batches: MicroBatches) -> float:
        model.zero_grad()
        total = 0.0
        for ids, targets in batches:
            loss = model(ids, targets) / len(batches)
            loss.backward()
            total += float(loss.detach())
        optimizer.follow(SCHEDULE.lr_multiplier, SCHEDULE.muon_momentum, SCHEDULE.muon_weight_decay)
        optimizer.step()
        return total

    return step


def our_step(config: ModelConfig, variant: str) -> Step:
    matmul, dummy, own = variant.partition("+")
    numerics.setup()
    found = kernels.setup("auto" if own else "torch", kernel_shape(config, ROWS, matmul))
    if own:
        print(f"{variant}: {found.summary()}", file=sys.stderr)
    model = GPT(config)
    model.init_weights()
    training, optimizer = TrainingPass(model, matmul), Optimizer(model, RATES, matmul)

    def step(batches: MicroBatches) -> float:
        token_ids = unique_ids([ids for ids, dummy in batches])
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        scale = 1 / sum(targets.numel() for dummy, targets in batches)
        total = sum(float(training.forward_backward(ids, targets, scale)) for ids, targets in batches)
        optimizer.step(training.gradients, token_ids, SCHEDULE)
        return total

    return step


def work(size: str, variant: str, threads: int) -> None:
    """A variant's process: for each line read it makes a step, and prints its seconds and loss."""
    torch.set_num_threads(threads)
    config = SIZES[size]
    step = baseline_step(config) if variant == "baseline" else our_step(config, variant)
    products = Products()
    for number, dummy in enumerate(sys.stdin):
        batches = micro_batches(config, number)
        # The first call is not timed; from the second on, all buffers exist.
        with products if number == 1 and variant != "baseline" else contextlib.nullcontext():
            start = clock()
            loss = step(batches)
            end = clock()
        told = {
            "seconds": end - start,
            "since_ready": time.perf_counter() - READY,
            "loss": loss,
            "floor": products.seconds(),
        }
        print(json.dumps(told), flush=True)


class Worker:
    """One variant's process; its first two steps are made at once."""

    def __init__(self, size: str, variant: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", size, variant, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.steps: list[dict[str, float]] = [self.step()]
        self.step()

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(size: str, rounds: int, threads: int, wanted: list[str]) -> dict[str, Any]:
    native = {"avx512_bf16", "amx_bf16"} & set(cpu_flags())
    variants = [variant for variant in wanted if not variant.startswith("bf16") or native]
    workers = {variant: Worker(size, variant, threads) for variant in variants}
    for dummy in range(rounds):
        for worker in workers.values():
            worker.steps.append(worker.step())
    for worker in workers.values():
        worker.close()
    tokens = ROWS * ACCUMULATION * SIZES[size].sequence_len
    seconds = {variant: [step["seconds"] for step in worker.steps[1:]] for variant, worker in workers.items()}
    return {variant: figures(worker.steps, seconds, variant, tokens) for variant, worker in workers.items()}


def figures(
    steps: list[dict[str, float]], seconds: dict[str, list[float]], variant: str, tokens: int
) -> dict[str, float]:
    ratios = [base / own for base, own in zip(next(iter(seconds.values())), seconds[variant], strict=True)]
    median = statistics.median(seconds[variant])
    floors = [step["floor"] for step in steps[1:]]
    shares = [floor / step for floor, step in zip(floors, seconds[variant], strict=True)]
    return {
        "floor_seconds": statistics.median(floors),
        "share": statistics.median(shares),
        "median_seconds": median,
        "best_seconds": min(seconds[variant]),
        "tokens_per_second": tokens / median,
        "times_first": statistics.median(ratios),
        "first_step_seconds": steps[0]["since_ready"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
    }


def lines(size: str, variants: dict[str, dict[str, float]]) -> str:
    """The table rows of one size."""
    rows = []
    for variant, f in variants.items():
        speed = f"{f['median_seconds']:9.3f}{f['best_seconds']:9.3f}{f['tokens_per_second']:9.0f}"
        floor = f"{f['floor_seconds']:9.3f}{100 * f['share']:6.0f}%" if f["floor_seconds"] > 0.001 else " " * 16
        rest = f"{f['times_first']:12.2f}{floor}{f['first_step_seconds']:14.2f}{f['last_loss']:12.5f}"
        rows.append(f"{size:5}{variant:11}{speed}{rest}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds a step on one node, against plain eager torch.")
    parser.add_argument("--quick", action="store_true", help="few rounds, of the small model only")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="the models to measure")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="what to compare with the first"
    )
    parser.add_argument("--rounds", type=int, help="steps of each variant after its first")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", type=Path, help="a JSON file for the figures")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        size, variant = args.worker
        work(size, variant, args.threads)
        return
    sizes = args.sizes or (["d4"] if args.quick else list(SIZES))
    rounds = {size: args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS[size]) for size in sizes}
    print(HEADER)
    result = {}
    for size in sizes:
        result[size] = measure(size, rounds[size], args.threads, args.variants)
        print(lines(size, result[size]), flush=True)
    if args.write:
        args.write.write_text(json.dumps({"threads": args.threads, "results": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
