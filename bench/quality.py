# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of rounding in quality: the same training with float32 and bf16 products, and with each way on the wire.

    python bench/quality.py
    python bench/quality.py --seeds 0 --steps 300 --ways "fp32, exact" "fp32, int8+head"

Two ranks on this machine train a small model on Python's own library. A seed determines the first weights and the rows of
every step, so two ways with the same seed differ only by rounding. Results are held-out losses in nats per token: their
mean and spread over the seeds, and the difference from float32 and exact, seed by seed. "fp32, exact+head" (--head shared)
differs from that only by the last bit of float32: it shows how far the smallest difference grows. Rounding matters only if
it costs more than that, and more than the spread over seeds.

On a CPU without bf16 instructions, where torch's bf16 products are fifty times slower, they are emulated with float32: operands
and results are rounded to bf16 and sums are float32, as with those instructions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pieces import TRAINER, environment, free_port, prepare, train_step

if TYPE_CHECKING:
    import torch

    from nanochat.parallel.comm import Comm

Json = dict[str, Any]
sys.path.insert(0, str(TRAINER))
# Products and wire; the first is the reference.
WAYS = [
    "fp32, exact", "fp32, exact+head", "bf16, exact", "fp32, bf16+head", "fp32, int8", "fp32, int8+head", "fp32, int4+head",
    "bf16, int8+head",
]  # fmt: skip
SHARED = "+head"
TOKENS = "tokens.pt"
CHARACTERS = 4_000_000  # of text; enough for a short training without repeated rows
HELD_OUT_TOKENS = 2**14


DEPTH, ASPECT, HEAD_DIM, LENGTH, ROWS = 2, 64, 32, 64, 4  # rows: per rank and step


# -- in a rank


def encode(folder: Path) -> None:
    """Tokenize the text, once for all trainings."""
    import torch

    from nanochat.data import dataset, tokenizer

    known = tokenizer.load(folder / "tokenizer")
    of_split: dict[str, Any] = {"vocabulary": known.vocab_size}
    for split in ("train", "val"):
        taken: list[int] = []
        size = 0
        for text in dataset.texts(dataset.split_paths(folder / "data", split)):
            taken += known.encode(text[:CHARACTERS], bos=True)
            size += len(text)
            if size > CHARACTERS:
                break
        of_split[split] = torch.tensor(taken)
    torch.save(of_split, folder / TOKENS)


def read_tokens(folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Training tokens, held-out rows, and vocabulary size."""
    import torch

    kept = torch.load(folder / TOKENS)
    count = min(HELD_OUT_TOKENS, len(kept["val"])) // (LENGTH + 1)
    return kept["train"], kept["val"][: count * (LENGTH + 1)].view(count, LENGTH + 1), kept["vocabulary"]


def rounded_products() -> AbstractContextManager[Any]:
    """Emulate bf16 products with float32 in this context, unless the CPU supports them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from nanochat.kit.common import cpu_flags

    if {"avx512_bf16", "amx_bf16"} & set(cpu_flags()):
        return nullcontext()
    aten = torch.ops.aten
    products = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}

    class Rounded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in products or args[-1].dtype != torch.bfloat16:
                return func(*args, **(kwargs or {}))
            wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
            return func(*wide, **(kwargs or {})).bfloat16()

    return Rounded()


def train(comm: Comm, one: Json, data: tuple[torch.Tensor, torch.Tensor, int]) -> dict[int, float]:
    """One training; returns the held-out losses along the way."""
    import torch

    from nanochat.rules.schedule import StepSchedule, plan_training

    tokens, held_out, vocabulary = data
    steps, mine = one["steps"], slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    batch = comm.world * ROWS * LENGTH
    plan = plan_training(
        scaling_parameters=1, reference_parameters=1, flops_per_token=1, num_iterations=steps, total_batch_size=batch
    )
    sync = build(comm, one, vocabulary, plan.lr_scale)
    generator, losses = torch.Generator().manual_seed(one["seed"]), {}
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH, (comm.world * ROWS,), generator=generator)
        rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])[mine]
        train_step(sync, rows[None], StepSchedule.at(plan, step))
        if (step + 1) % one["every"] == 0 or step + 1 == steps:
            losses[step + 1] = held_out_loss(sync, held_out)
    return losses


def build(comm: Comm, one: Json, vocabulary: int, lr_scale: float) -> Any:
    """Model, optimizer and gradient exchange."""
    from nanochat.model.fused import TrainingPass
    from nanochat.model.gpt import GPT, ModelConfig
    from nanochat.model.gradients import MATMUL_TYPES
    from nanochat.model.optim import ALL_ROWS, LearningRates, Optimizer
    from nanochat.parallel.shared_head import SharedHead
    from nanochat.parallel.sync import make_sync
    from nanochat.parallel.wire import WIRES
    from nanochat.rules.shares import part_bounds

    matmul, wire = one["way"].removesuffix(SHARED).split(", ")
    model = GPT(ModelConfig.from_depth(DEPTH, ASPECT, HEAD_DIM, LENGTH, vocabulary))
    model.init_weights(one["seed"])
    tokens, head = [ROWS * LENGTH] * comm.world, None
    if one["way"].endswith(SHARED):
        bounds = part_bounds(vocabulary, model.config.padded_vocab_size, [1] * comm.world)
        head = SharedHead(comm, model, bounds, [tokens], WIRES[wire].hidden, MATMUL_TYPES[matmul])
    training = TrainingPass(model, matmul, head)
    optimizer = Optimizer(model, LearningRates().scaled(lr_scale), matmul, head.rows if head else ALL_ROWS)
    return make_sync(wire, comm, training, optimizer, tokens)


def held_out_loss(sync: Any, held_out: torch.Tensor) -> float:
    """Loss on held-out rows, always in float32."""
    import torch

    sync.optimizer.catch_up()
    if sync.training.shared_head is not None:
        sync.training.shared_head.gather()
    if sync.comm.rank:
        return 0.0
    with torch.no_grad():
        return float(sync.training.model(held_out[:, :-1].contiguous(), held_out[:, 1:].contiguous()))


def work(folder: Path, one: Json) -> None:
    """One training; rank 0 prints the result."""
    from nanochat.kit.common import read_ranks
    from nanochat.model import numerics
    from nanochat.parallel.comm import connect

    numerics.setup()
    comm = connect(read_ranks(), "cpu", 600)
    with rounded_products() if one["way"].startswith("bf16") else nullcontext():
        losses = train(comm, one, read_tokens(folder))
    if comm.rank == 0:
        print(json.dumps(one | {"losses": losses}), flush=True)
    comm.close()


# -- the whole series and its table


def measure(folder: Path, one: Json) -> Json:
    """One training with two processes."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [sys.executable, __file__, "--worker", str(folder), json.dumps(one)]
    environments = [environment(folder, RANK=rank, LOCAL_RANK=rank, PYTHONPATH=str(TRAINER), **place) for rank in "01"]
    ranks = [subprocess.Popen(argv, env=one, stdout=subprocess.PIPE, text=True) for one in environments]
    outs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed in {one}")
    print(outs[0], end="", file=sys.stderr)
    result: Json = json.loads(outs[0])
    return result


def table(results: Sequence[Json], reference: str) -> str:
    """Final losses, and the mean's difference from the reference along the way."""
    curves: dict[str, dict[int, dict[str, float]]] = {}
    for one in results:
        curves.setdefault(one["way"], {})[one["seed"]] = {str(mark): loss for mark, loss in one["losses"].items()}
    marks = list(curves[reference][results[0]["seed"]])
    shown = [
        mark for number, mark in enumerate(marks, 1) if number % max(1, len(marks) // 4) == 0 and mark != marks[-1]
    ]
    heads = ["products, wire", "loss, mean", "spread over seeds", f"from {reference}: mean", "spread", "largest"]
    heads += [f"mean after {mark}" for mark in shown]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for way, by_seed in curves.items():
        losses = [curve[marks[-1]] for curve in by_seed.values()]
        apart = {m: [curve[m] - curves[reference][seed][m] for seed, curve in by_seed.items()] for m in marks}
        last = apart[marks[-1]]
        signed = [statistics.mean(last), max(last, key=abs), *(statistics.mean(apart[mark]) for mark in shown)]
        cells = [f"{figure:+.4f}" for figure in signed]
        cells.insert(1, f"{spread(last):.4f}")
        lines.append(f"| {' | '.join([way, f'{statistics.mean(losses):.4f}', f'{spread(losses):.4f}', *cells])} |")
    return "\n".join(lines)


def spread(figures: Sequence[float]) -> float:
    return statistics.stdev(figures) if len(figures) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether rounding costs quality.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps from one look at the loss to the next")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="products and wire; the first is compared with")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Path(arguments.worker[0]), json.loads(arguments.worker[1]))
        return
    with tempfile.TemporaryDirectory(prefix="quality-") as temporary:
        folder = Path(temporary)
        prepare(folder)
        encode(folder)
        common = {"steps": arguments.steps, "every": arguments.every}
        wanted = [common | {"seed": seed, "way": way} for seed in arguments.seeds for way in arguments.ways]
        results = [measure(folder, one) for one in wanted]
    print(table(results, arguments.ways[0]))


if __name__ == "__main__":
    main()
