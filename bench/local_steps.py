# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of local steps in quality: the same model and tokens, synchronised in every step or every N steps.

    python bench/local_steps.py --write local_steps.json
    python bench/local_steps.py --ranks 4 --seeds 0 1 --ways exact int8/30 --write local_steps.json

A way is SYNC[/LOCAL_STEPS[/LOCAL_OVERLAP[/FIRST+LAST]]], for example int8/30/15/12+6: the trainer's flags of these names, and the
maximum number of common steps at the beginning and the end. outer/30 is what local steps are to be compared with: common steps,
and every 30 of them the same outer step on the same weights, which sends nothing. It is trained by one rank, as "exact" of one
rank is: all ranks of common steps make the same update. rate/2 is one rank with twice the learning rates of
matrices and head. Ranks of one thread each train on Python's own library on this
machine; a step has the same number of tokens for any number of ranks. A seed determines the first weights and the order of the
text. Results are the final bits per byte on the validation shard, their mean and spread over the seeds, and the difference
from common steps with the same ranks, seed by seed. Seconds mean nothing here, because the loopback is not a slow link:
bench/two_nodes.py measures those. "alone" is one rank that trains on its part of the rows; a way that does not beat it makes
the other hosts useless.

Each training is an entry in the file of --write; a second call skips those already there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pieces import Results, free_port

Json = dict[str, Any]
TRAINER = Path(__file__).resolve().parents[1] / "trainer"
ALONE, COMMON, OUTER, RATE = "alone", "exact", "outer", "rate"
WAYS = (COMMON, "outer/30", "exact/10", "exact/30", "bf16/30", "int8/30", "int4/30", ALONE)
VOCABULARY = 4096
MODEL = ["--depth", "2", "--aspect-ratio", "64", "--head-dim", "32"]
TRAINING_SHARDS = 6


def prepare(folder: Path, shards: int = 3) -> None:
    """Make shards and tokenizer from Python's own library."""
    library = sysconfig.get_paths()["stdlib"]
    out = ["--out", str(folder / "data"), "--shards", str(shards)]
    call("scripts.make_shards", "--from", library, *out, "--suffix", ".py")
    call("scripts.tok_train", "--vocab-size", str(VOCABULARY), folder=folder)


def environment(folder: Path, **more: str) -> dict[str, str]:
    paths = {"NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_DATA_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def call(module: str, *argv: str, folder: Path | None = None) -> None:
    environ = environment(folder) if folder else None
    subprocess.run([sys.executable, "-m", module, *argv], cwd=TRAINER, env=environ, check=True, stdout=sys.stderr)


def order(folder: Path, seed: int) -> Path:
    """The same shards, rotated by seed; the last one stays the validation shard."""
    shards, ordered = sorted((folder / "data").glob("*.parquet")), folder / f"data-{seed}"
    if not ordered.exists():
        ordered.mkdir()
        training = shards[:-1]
        for number, shard in enumerate(training):
            (ordered / shard.name).symlink_to(training[(number + seed) % len(training)])
        (ordered / shards[-1].name).symlink_to(shards[-1])
    return ordered


def worker(seed: int, together: str, outer: int, flags: list[str]) -> None:
    """One rank: scripts.base_train with other first weights, and fewer common steps or an outer step if given."""
    sys.path.insert(0, str(TRAINER))
    from nanochat.kit.common import exit_code
    from nanochat.model.gpt import GPT
    from nanochat.rules import schedule
    from scripts import base_train

    GPT.init_weights.__defaults__ = (seed,)
    if together:
        schedule.MOST_FIRST, schedule.MOST_LAST = map(int, together.split("+"))
    if outer:
        add_outer_step(outer, int(flags[flags.index("--num-iterations") + 1]))
    sys.argv = ["base_train", *flags]
    sys.exit(exit_code(base_train.main))


def add_outer_step(every: int, steps: int) -> None:
    """Make a single rank take local steps' outer step along its own change, every so many steps."""
    import torch

    from nanochat.model.gradients import is_table
    from nanochat.parallel.sync import SMALL, Sync
    from nanochat.rules import schedule

    inner, apart, (rate, momentum) = Sync.step, schedule.steps_apart(steps), schedule.outer_rates(schedule.FEW)
    kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    made = 0

    @torch.no_grad()
    def step(sync: Sync, loss: torch.Tensor, now: schedule.StepSchedule) -> float:
        nonlocal made
        if made == apart.start:
            named = sync.training.model.named_parameters()
            dense = [p.detach() for name, p in named if p.dim() == 2 and p.numel() >= SMALL and not is_table(name)]
            kept[:] = [(p, p.clone(), torch.zeros_like(p)) for p in dense]
        found = inner(sync, loss, now)
        made += 1
        if apart.start < made <= apart.stop and (made % every == 0 or made == apart.stop):
            for p, anchor, speed in kept:
                change = p - anchor
                speed.mul_(momentum).add_(change)
                p.copy_(anchor.add_(change.add_(speed, alpha=momentum), alpha=rate))
        return found

    Sync.step = step  # type: ignore[method-assign]


def train(one: Json, folder: Path) -> Json:
    """One training; returns its evaluations and bytes sent."""
    way, steps, ranks, length = one["way"], one["steps"], one["ranks"], one["length"]
    world, rows = (1, one["rows"] // ranks) if way == ALONE else (ranks, one["rows"])
    sync, every, overlap, together = [*(COMMON if way == ALONE else way).split("/"), "", "", ""][:4]
    outer, factor = every if sync == OUTER else "0", float(every) if sync == RATE else 1.0
    sync, every = (COMMON, "") if sync in {OUTER, RATE} else (sync, every)
    with tempfile.TemporaryDirectory(dir=folder, prefix="run-") as name:
        flags = [
            *MODEL, "--max-seq-len", str(length),
            "--device-batch-size", str(one["rows"] // ranks), "--total-batch-size", str(rows * length),
            "--num-iterations", str(steps), "--eval-every", str(max(1, steps // 2)), "--eval-tokens", "32768",
            "--sample-every", "-1", "--core-metric-every", "-1", "--run-dir", name,
            "--matrix-lr", str(0.02 * factor), "--unembedding-lr", str(0.008 * factor),
            "--sync", sync, "--local-steps", every or "0", "--local-overlap", overlap or "0",
        ]  # fmt: skip
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        (Path(name) / "tokenizer").symlink_to(folder / "tokenizer")
        place |= {"NANOCHAT_BASE_DIR": name, "NANOCHAT_DATA_DIR": str(order(folder, one["seed"]))}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(one["seed"]), together, outer, *flags],
                env=environment(folder, RANK=str(rank), LOCAL_RANK=str(rank), **place),
                stdout=subprocess.DEVNULL,
            )
            for rank in range(world)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a rank failed in {one}")
        return one | told([Path(name) / f"metrics-rank{rank}.jsonl" for rank in range(world)], steps)


def told(files: Sequence[Path], steps: int) -> Json:
    """Summarise the metrics of all ranks; bytes are those of the rank that sent most."""
    by_rank = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    sent = [sum(event.get("bytes_sent", 0) for event in events) for events in by_rank]
    return {
        "val_bpb": {event["step"]: event["val_bpb"] for event in by_rank[0] if event["kind"] == "eval"},
        "megabytes_a_step": max(sent) / steps / 1e6,
    }


def measure_all(arguments: argparse.Namespace) -> list[Json]:
    """Train every way with every seed and number of ranks that the file lacks."""
    size = {"rows": arguments.rows, "length": arguments.length}
    wanted = [
        {"ranks": ranks, "seed": seed, "way": way, "steps": arguments.steps, **size}
        for ranks in arguments.ranks
        for seed in arguments.seeds
        for way in arguments.ways
    ]
    found = Results(arguments.write, wanted)
    with tempfile.TemporaryDirectory(prefix="local-steps-") as temporary:
        folder = arguments.folder or Path(temporary)
        if found.missing and not (folder / "tokenizer").exists():
            prepare(folder, TRAINING_SHARDS + 1)
        return found.completed(lambda one: train(one, folder))


def table(results: Sequence[Json]) -> str:
    """Final losses by number of ranks and way."""
    heads = ["ranks", "way", "seeds", "bits per byte, mean", "spread over seeds"]
    heads += [f"from {COMMON}: mean", "spread", "in %", "MB a step and rank"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    last = {(one["ranks"], one["way"], one["seed"]): list(one["val_bpb"].values())[-1] for one in results}
    for ranks, way in dict.fromkeys((one["ranks"], one["way"]) for one in results):
        found = {seed: bpb for (of, by, seed), bpb in last.items() if (of, by) == (ranks, way)}
        sent = [one["megabytes_a_step"] for one in results if (one["ranks"], one["way"]) == (ranks, way)]
        apart = [bpb - last[ranks, COMMON, seed] for seed, bpb in found.items() if (ranks, COMMON, seed) in last]
        cells = [str(ranks), way, str(len(found)), f"{statistics.mean(found.values()):.4f}", spread([*found.values()])]
        if apart:
            share = statistics.mean(apart) / (statistics.mean(found.values()) - statistics.mean(apart))
            cells += [f"{statistics.mean(apart):+.4f}", spread(apart), f"{100 * share:+.1f}"]
        else:
            cells += ["", "", ""]
        lines.append(f"| {' | '.join([*cells, f'{statistics.mean(sent):.3f}'])} |")
    return "\n".join(lines)


def spread(figures: Sequence[float]) -> str:
    return f"{statistics.stdev(figures):.4f}" if len(figures) > 1 else ""


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
    parser = argparse.ArgumentParser(description="What local steps cost in quality.")
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), help="--sync[/--local-steps[/--local-overlap[/FIRST+LAST]]], or alone"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], choices=(1, 2, 4, 8))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=8, help="of a step, of all ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--write", type=Path, help="file for the results as JSON; what is in it is not made again")
    parser.add_argument("--folder", type=Path, help="where text and tokenizer are kept from call to call")
    print(table(measure_all(parser.parse_args())))


if __name__ == "__main__":
    main()
