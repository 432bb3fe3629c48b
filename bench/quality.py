# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether rounding costs quality: the same training with float32 and with bf16 products, and with each way on the wire.

    python bench/quality.py [--seeds 0 1 2] [--steps 1000] [--every 250] [--ways "fp32, int8" ...] [--write quality.json]

Two ranks on this machine train a small model on Python's own library. A seed settles the first weights and the rows of
every step, and each way trains on the same ones, so that two ways differ by rounding alone. Told is the loss on rows
that nobody trained on, in nats a token: its mean and spread over the seeds, and how far a way is from float32 and exact
seed by seed. What rounding costs is worth worrying about only where it exceeds what the seed alone does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_steps import environment, prepare

if TYPE_CHECKING:
    import torch

    from nanochat.comm import Comm

TRAINER = Path(__file__).resolve().parents[1] / "trainer"
# Products and wire.
WAYS = ["fp32, exact", "bf16, exact", "fp32, bf16", "fp32, int8", "fp32, int4"]
DEPTH, ASPECT, HEAD_DIM, LENGTH, ROWS = 2, 64, 32, 64, 4
CHARACTERS = 4_000_000  # of text; enough that no step of a short training sees the same rows again
HELD_OUT_ROWS = 256


# -- what runs in a rank


def read_tokens(folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens to train on, rows that are held out, and the size of the vocabulary."""
    import torch

    from nanochat import dataset, tokenizer

    known = tokenizer.load(folder / "tokenizer")

    def of(split: str) -> torch.Tensor:
        taken: list[int] = []
        size = 0
        for text in dataset.texts(dataset.split_paths(folder / "data", split)):
            taken += known.encode(text[:CHARACTERS], bos=True)
            size += len(text)
            if size > CHARACTERS:
                break
        return torch.tensor(taken)

    held_out = of("val")
    count = min(HELD_OUT_ROWS, len(held_out) // (LENGTH + 1))
    return of("train"), held_out[: count * (LENGTH + 1)].view(count, LENGTH + 1), known.vocab_size


def train(
    comm: Comm, seed: int, way: str, steps: int, every: int, data: tuple[torch.Tensor, torch.Tensor, int]
) -> dict[int, float]:
    """One training; the loss on the held out rows after every so many steps."""
    import torch

    from nanochat.fused import TrainingPass
    from nanochat.model import GPT, ModelConfig
    from nanochat.optim import LearningRates, Optimizer
    from nanochat.schedule import StepSchedule, plan_training
    from nanochat.sync import make_sync

    tokens, held_out, vocabulary = data
    matmul, wire = way.split(", ")
    model = GPT(ModelConfig.from_depth(DEPTH, ASPECT, HEAD_DIM, LENGTH, vocabulary))
    model.init_weights(seed)
    counts = model.parameter_counts()
    scaling = counts["transformer_matrices"] + counts["lm_head"]
    batch = comm.world * ROWS * LENGTH
    plan = plan_training(
        scaling_parameters=scaling, reference_parameters=scaling, flops_per_token=model.flops_per_token(),
        num_iterations=steps, total_batch_size=batch,
    )  # fmt: skip
    training, optimizer = TrainingPass(model, matmul), Optimizer(model, LearningRates().scaled(plan.lr_scale), matmul)
    sync = make_sync(wire, comm, training, optimizer, [ROWS * LENGTH] * comm.world)
    generator, losses = torch.Generator().manual_seed(seed), {}
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH, (comm.world * ROWS,), generator=generator)
        rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
        mine = rows[comm.rank * ROWS : (comm.rank + 1) * ROWS]
        ids, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        sync.offer_ids([ids])
        token_ids = sync.take_ids()[0]
        optimizer.prepare(token_ids)
        training.start_step(token_ids)
        sync.start_step(token_ids)
        sync.step(training.forward_backward(ids, targets, 1 / batch, sync.on_ready), StepSchedule.at(plan, step))
        if (step + 1) % every == 0 or step + 1 == steps:
            optimizer.catch_up()
            with torch.no_grad():
                losses[step + 1] = float(model(held_out[:, :-1].contiguous(), held_out[:, 1:].contiguous()))
    return losses


def work(folder: Path, ways: Sequence[str], seeds: Sequence[int], steps: int, every: int) -> None:
    """Every way with every seed; rank 0 tells what came out."""
    from nanochat import numerics
    from nanochat.comm import connect
    from nanochat.common import read_ranks

    numerics.setup()
    comm = connect(read_ranks(), "cpu", 300)
    data = read_tokens(folder)
    for seed in seeds:
        for way in ways:
            losses = train(comm, seed, way, steps, every, data)
            if comm.rank == 0:
                print(json.dumps({"seed": seed, "way": way, "losses": losses}), flush=True)
    comm.close()


# -- all of it, and what came out


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    argv = [sys.executable, __file__, "--worker", str(folder), "--ways", *arguments.ways]
    argv += ["--steps", str(arguments.steps), "--every", str(arguments.every), "--seeds", *map(str, arguments.seeds)]
    ranks = [
        subprocess.Popen(
            argv,
            env=environment(folder, RANK=str(rank), LOCAL_RANK=str(rank), PYTHONPATH=str(TRAINER), **place),
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(2)
    ]
    assert ranks[0].stdout is not None
    results = []
    for line in ranks[0].stdout:
        print(line, end="", file=sys.stderr, flush=True)
        results.append(json.loads(line))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit("a rank failed")
    return results


def table(results: Sequence[dict[str, Any]], reference: str) -> str:
    """The results for people: the losses at the end, and how far the mean was from the reference's on the way there."""
    curves: dict[str, dict[int, dict[str, float]]] = {}
    for one in results:
        curves.setdefault(one["way"], {})[one["seed"]] = one["losses"]
    marks = list(results[0]["losses"])
    heads = ["products, wire", "loss, mean", "spread over seeds", f"from {reference}: mean", "largest"]
    heads += [f"mean after {mark}" for mark in marks[:-1]]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for way, by_seed in curves.items():
        losses = [curve[marks[-1]] for curve in by_seed.values()]
        apart = [[curve[mark] - curves[reference][seed][mark] for mark in marks] for seed, curve in by_seed.items()]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        on_the_way = [statistics.mean(column) for column in zip(*apart, strict=True)]
        last = [row[-1] for row in apart]
        signed = [f"{figure:+.4f}" for figure in (on_the_way[-1], max(last, key=abs), *on_the_way[:-1])]
        lines.append(f"| {' | '.join([way, f'{statistics.mean(losses):.4f}', f'{spread:.4f}', *signed])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether rounding costs quality.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=250, help="steps from one look at the loss to the next")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="products and wire, the first is compared with")
    parser.add_argument("--write", type=Path, help="file for the results as JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.ways, arguments.seeds, arguments.steps, arguments.every)
        return
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        prepare(Path(folder))
        results = measure(Path(folder), arguments)
    print(table(results, arguments.ways[0]))
    if arguments.write:
        size = {"steps": arguments.steps, "machine": {"host": socket.gethostname(), "cores": os.cpu_count()}}
        arguments.write.write_text(json.dumps(size | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
