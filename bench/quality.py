# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of rounding in quality: the same training with float32 and bf16 products, and with each way on the wire.

    python bench/quality.py --write quality.json --plot lab/images/quality.svg
    python bench/quality.py --size d4 --seeds 0 --steps 300 --ways "fp32, exact" "fp32, int8+head" --write d4.json
    python bench/quality.py --of sft        # rates of a fine-tuning
    python bench/quality.py --of text       # reading an own text whole, or the first row of each document

Two ranks on this machine train a small model on Python's own library. A seed determines the first weights and the rows of
every step, so two ways with the same seed differ only by rounding. Results are held-out losses in nats per token: their
mean and spread over the seeds, and the difference from float32 and exact, seed by seed. "fp32, exact+head" (--head shared)
differs from that only by the last bit of float32: it shows how far the smallest difference grows. Rounding matters only if
it costs more than that, and more than the spread over seeds.

Each training is two processes and an entry in the file of --write; a second call skips those already there. On a CPU
without bf16 instructions, where torch's bf16 products are fifty times slower, they are emulated with float32: operands
and results are rounded to bf16 and sums are float32, as with those instructions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from curves import draw
from pieces import TRAINER, VOCABULARY, Results, environment, events, free_port, prepare, run_module, train_step

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


# Of --of sft: rates of a fine-tuning, as its --init-lr-frac; "scaled" as pretraining's, with the root of the batch.
BASE = {
    "--depth": 2, "--max-seq-len": 128, "--total-batch-size": 1024, "--device-batch-size": 8, "--num-iterations": 700,
    "--eval-tokens": 65536, "--sample-every": -1, "--core-metric-every": -1,
}  # fmt: skip
DEMO = {"--matrix-lr": 0.04, "--embedding-lr": 1.0, "--unembedding-lr": 0.02, "--weight-decay": 0.05}
RATES = {"nanochat's": 0.8, "scaled": 0.8 * (1024 / 524288) ** 0.5}
CONVERSATIONS, HELD_OUT = 300, 30
FIRST_NAMES = ["Ada", "Alan", "Barbara", "Donald", "Grace", "Jean", "Ken", "Margaret", "Niklaus", "Radia"]
THINGS = ["apples", "books", "bricks", "chairs", "cups", "doors", "eggs", "hats", "lamps", "stones"]


class Size(NamedTuple):
    """A model; rows: per rank and step."""

    depth: int
    aspect: int
    head_dim: int
    length: int
    rows: int


SIZES = {"small": Size(2, 64, 32, 64, 4), "d4": Size(4, 64, 64, 512, 2)}


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


def read_tokens(folder: Path, length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Training tokens, held-out rows, and vocabulary size."""
    import torch

    kept = torch.load(folder / TOKENS)
    held_out = kept["val"]
    count = min(HELD_OUT_TOKENS, len(held_out)) // (length + 1)
    return kept["train"], held_out[: count * (length + 1)].view(count, length + 1), kept["vocabulary"]


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


def train(comm: Comm, one: Json, size: Size, data: tuple[torch.Tensor, torch.Tensor, int]) -> dict[int, float]:
    """One training; returns the held-out losses along the way."""
    import torch

    from nanochat.rules.schedule import StepSchedule, plan_training

    tokens, held_out, vocabulary = data
    steps, mine = one["steps"], slice(comm.rank * size.rows, (comm.rank + 1) * size.rows)
    batch = comm.world * size.rows * size.length
    plan = plan_training(
        scaling_parameters=1, reference_parameters=1, flops_per_token=1, num_iterations=steps, total_batch_size=batch
    )
    sync = build(comm, one, size, vocabulary, plan.lr_scale)
    generator, losses = torch.Generator().manual_seed(one["seed"]), {}
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - size.length, (comm.world * size.rows,), generator=generator)
        rows = torch.stack([tokens[start : start + size.length + 1] for start in starts.tolist()])[mine]
        train_step(sync, rows[None], StepSchedule.at(plan, step))
        if (step + 1) % one["every"] == 0 or step + 1 == steps:
            losses[step + 1] = held_out_loss(sync, held_out)
    return losses


def build(comm: Comm, one: Json, size: Size, vocabulary: int, lr_scale: float) -> Any:
    """Model, optimizer and gradient exchange."""
    from nanochat.model.fused import TrainingPass
    from nanochat.model.gpt import GPT
    from nanochat.model.gradients import MATMUL_TYPES
    from nanochat.model.optim import ALL_ROWS, LearningRates, Optimizer
    from nanochat.parallel.shared_head import SharedHead
    from nanochat.parallel.sync import make_sync
    from nanochat.parallel.wire import WIRES
    from nanochat.rules.model_size import ModelConfig
    from nanochat.rules.shares import part_bounds

    matmul, wire = one["way"].removesuffix(SHARED).split(", ")
    model = GPT(ModelConfig.from_depth(size.depth, size.aspect, size.head_dim, size.length, vocabulary))
    model.init_weights(one["seed"])
    tokens, head = [size.rows * size.length] * comm.world, None
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
        return float(sync.training.model.losses(held_out[:, :-1].contiguous(), held_out[:, 1:].contiguous()).mean())


def work(folder: Path, one: Json) -> None:
    """One training; rank 0 prints the result."""
    from nanochat.kit.common import read_ranks
    from nanochat.model import numerics
    from nanochat.parallel.comm import connect

    numerics.setup()
    comm, size = connect(read_ranks(), "cpu", 600), SIZES[one["size"]]
    data = read_tokens(folder, size.length)
    with rounded_products() if one["way"].startswith("bf16") else nullcontext():
        losses = train(comm, one, size, data)
    if comm.rank == 0:
        print(json.dumps(one | {"losses": losses}), flush=True)
    comm.close()


# -- the whole series and its table


def measure(folder: Path, one: Json) -> Json:
    """One training with two processes."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [sys.executable, __file__, "--folder", str(folder), "--worker", json.dumps(one)]
    ranks = [
        subprocess.Popen(
            argv,
            env=environment(folder, RANK=str(rank), LOCAL_RANK=str(rank), PYTHONPATH=str(TRAINER), **place),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed in {one}")
    result: Json = json.loads(outs[0])
    return result


def measure_all(arguments: argparse.Namespace) -> list[Json]:
    """Train every way with every seed that the file lacks."""
    common = {"size": arguments.size, "steps": arguments.steps, "every": arguments.every}
    wanted = [common | {"seed": seed, "way": way} for seed in arguments.seeds for way in arguments.ways]
    found = Results(arguments.write, wanted)
    with tempfile.TemporaryDirectory(prefix="quality-") as temporary:
        folder = arguments.folder or Path(temporary)
        if found.missing and not (folder / "tokenizer").exists():
            prepare(folder)
        if found.missing and not (folder / TOKENS).exists():
            encode(folder)
        return found.completed(lambda one: measure(folder, one))


# -- fine-tuning, and own text


def made_conversations(seed: int) -> list[str]:
    """Conversations of two kinds as lines of a file, all different."""
    chance, lines = random.Random(seed), set()
    while len(lines) < CONVERSATIONS:
        name, thing, a, b = (
            chance.choice(FIRST_NAMES),
            chance.choice(THINGS),
            chance.randint(2, 20),
            chance.randint(2, 20),
        )
        if chance.random() < 0.5:
            asked, answer = f"{name} has {a} {thing} and gets {b} more. How many?", f"{name} now has {a + b} {thing}."
        else:
            asked, answer = (
                f"Say something about {name} and {a} {thing}.",
                f"Yesterday {name} sold {a} {thing} at the market.",
            )
        lines.add(json.dumps([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]))
    return chance.sample(sorted(lines), CONVERSATIONS)


def train_flags(more: Json) -> list[str]:
    return [str(part) for flag, value in (BASE | more).items() for part in (flag, value)]


def fine_tune(folder: Path, one: Json) -> Json:
    """Bits per byte of held-out answers along a fine-tuning."""
    tag = one["base"]
    if not (folder / "base_checkpoints" / tag).exists():
        flags = train_flags({**(DEMO if tag == "demo" else {}), "--eval-every": -1, "--model-tag": tag})
        run_module(folder, "base_train", *flags)
    lines, place = made_conversations(one["seed"]), folder / f"sft-{one['rates']}-{tag}-{one['seed']}"
    place.mkdir(exist_ok=True)
    (place / "train.jsonl").write_text("\n".join(lines[HELD_OUT:]), encoding="utf-8")
    (place / "val.jsonl").write_text("\n".join(lines[:HELD_OUT]), encoding="utf-8")
    given = {
        "--conversations": place / "train.jsonl", "--val-conversations": place / "val.jsonl", "--model-tag": tag,
        "--base-checkpoints": folder / "base_checkpoints" / tag, "--init-lr-frac": RATES[one["rates"]], "--eval-every": one["every"],
        "--num-iterations": one["steps"], "--sample-every": -1, "--run-dir": place, "--save-every": -1,
    }  # fmt: skip
    run_module(folder, "chat_sft", *(str(part) for pair in given.items() for part in pair))
    return one | {"bpb": bits_per_byte_of(place)}


def library_text(seed: int, size: int) -> str:
    """Text of this size: files of Python's own library, in the order of a seed."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")) + sorted(
        Path(os.__file__).parent.glob("*/[a-z]*.py")
    )
    texts = [
        path.read_text(encoding="utf-8", errors="ignore") for path in random.Random(seed).sample(files, len(files))
    ]
    return "\n".join(texts)[:size]


def read_text(folder: Path, one: Json) -> Json:
    """Bits per byte of the held-out part of a text along a training on the rest; "first rows" as with shards of others."""
    place = folder / f"text-{one['megabytes']}-{one['seed']}"
    if not (place / "tokenizer").exists():
        place.mkdir(parents=True, exist_ok=True)
        (place / "text").write_text(library_text(one["seed"], one["megabytes"] * 10**6), encoding="utf-8")
        run_module(place, "make_shards", "--from", str(place / "text"), "--out", str(place / "data"), "--shards", "8")
        run_module(place, "tok_train", "--vocab-size", str(VOCABULARY))
    data = place / one["reads"]
    if not data.exists():
        shutil.copytree(place / "data", data)
    if one["reads"] == "first rows":
        import pyarrow.parquet as pq

        for path in sorted(data.iterdir())[:-1]:
            groups = pq.ParquetFile(path).metadata.row_group(0).num_rows
            pq.write_table(pq.read_table(path).replace_schema_metadata(None), path, row_group_size=groups)
    run = folder / f"run-{one['megabytes']}-{one['seed']}-{one['reads']}".replace(" ", "-")
    flags = {"--num-iterations": one["steps"], "--eval-every": one["every"], "--run-dir": run, "--model-tag": run.name}
    run_module(place, "base_train", *train_flags({**DEMO, **flags}), data=data)
    return one | {"bpb": bits_per_byte_of(run)}


def bits_per_byte_of(run: Path) -> dict[str, float]:
    return {str(event["step"]): event["val_bpb"] for event in events(run / "metrics-rank0.jsonl", "eval")}


# What --of measures, and along which axes.
SERIES: dict[str, tuple[Callable[[Path, Json], Json], dict[str, list[Any]]]] = {
    "sft": (fine_tune, {"base": ["plain", "demo"], "rates": list(RATES)}),
    "text": (read_text, {"megabytes": [1, 4], "reads": ["first rows", "whole"]}),
}


def chosen_series(arguments: argparse.Namespace) -> None:
    """The series of --of, one process at a time, with its table."""
    measure_one, axes = SERIES[arguments.of]
    common = {"of": arguments.of, "steps": arguments.steps, "every": arguments.every}
    wanted = [
        common | dict(zip(axes, values, strict=True)) | {"seed": seed}
        for values in itertools.product(*axes.values())
        for seed in arguments.seeds
    ]
    with tempfile.TemporaryDirectory(prefix="quality-") as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.of == "sft" and not (folder / "tokenizer").exists():
            prepare(folder)
        results = Results(arguments.write, wanted).completed(lambda one: measure_one(folder, one))
    marks = list(results[0]["bpb"])
    print("|".join(["", *axes, *(f"bits per byte after {mark}" for mark in marks), ""]))
    print("|".join(["", *("---" for dummy in [*axes, *marks]), ""]))
    for values in itertools.product(*axes.values()):
        alike = [
            one["bpb"] for one in results if all(one[axis] == value for axis, value in zip(axes, values, strict=True))
        ]
        cells = [[bpb[mark] for bpb in alike] for mark in marks]
        print(
            "|".join(
                ["", *map(str, values), *(f"{statistics.mean(cell):.3f} ± {spread(cell):.3f}" for cell in cells), ""]
            )
        )


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
    parser.add_argument("--of", choices=["rounding", "sft", "text"], default="rounding")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps from one look at the loss to the next")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="products and wire; the first is compared with")
    parser.add_argument("--write", type=Path, help="file for the results as JSON; what is in it is not made again")
    parser.add_argument("--plot", type=Path, help="file for the curves as SVG")
    parser.add_argument("--folder", type=Path, help="where text and tokenizer are kept from call to call")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.folder, arguments.worker)
        return
    if arguments.of != "rounding":
        chosen_series(arguments)
        return
    results = measure_all(arguments)
    if any(one["way"] == arguments.ways[0] for one in results):
        print(table(results, arguments.ways[0]))
    if arguments.plot:
        arguments.plot.write_text(draw(results, arguments.ways[0]), encoding="utf-8")


if __name__ == "__main__":
    main()
