# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Seconds to learn a text, beside nanoGPT's own example for CPUs: bits per byte of the last tenth, which neither trains on.

    python bench/nanogpt.py --text tinyshakespeare.txt --nanogpt CHECKOUT
    python bench/nanogpt.py --text tinyshakespeare.txt --quick      # ours alone, one order of the text

nanoGPT runs as its README says for a CPU (2,000 steps of 12 rows of 64 characters, 4 layers of width 128), on one core and on
two; its curve is its own estimate, and its last figure is of the whole last tenth, with the weights that it kept. Ours runs
scripts.base_train on one core, on two, and on two ranks of one core each over the loopback; each figure is of the whole last
tenth. They differ in tokens (ours has a vocabulary of 1,024 learnt from the first nine tenths, nanoGPT characters), context (64
tokens of 2 to 3 characters, and 64 characters), optimizer (Muon and AdamW, and AdamW), and numbers of steps. Seconds are of training and
evaluation, from the first step on; loading, the tokenizer (1 s) and the last checkpoint are not counted. Ours is repeated with
other orders of the text; nanoGPT has one seed. The last line is a row of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pieces import TRAINER, environment, events, free_port, run_module

sys.path.insert(0, str(TRAINER))

VOCABULARY, DOCUMENT_CHARACTERS = 1024, 2000
# Which cores each rank may use.
WAYS = {"one core": [[0]], "two cores": [[0, 1]], "two ranks of one core": [[0], [1]]}
FLAGS = {
    "--depth": 2, "--aspect-ratio": 64, "--head-dim": 32, "--max-seq-len": 64, "--device-batch-size": 16, "--total-batch-size": 1024,
    "--num-iterations": 900, "--warmup-steps": 10, "--warmdown-ratio": 0.8, "--matrix-lr": 0.06, "--embedding-lr": 1.5,
    "--unembedding-lr": 0.03, "--weight-decay": 0.05, "--sample-every": -1, "--core-metric-every": -1, "--eval-every": 50,
}  # fmt: skip
NANOGPT = [
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64",
    "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0",
]  # fmt: skip
# Run in nanoGPT's checkout: the loss of every held-out character, in rows like those that it trains on.
WHOLE_TENTH = """
import pickle, sys, numpy, torch
from model import GPT, GPTConfig
kept = torch.load("out-shakespeare-char/ckpt.pt", weights_only=False)
model = GPT(GPTConfig(**kept["model_args"]))
model.load_state_dict(kept["model"])
model.eval()
ids = torch.from_numpy(numpy.fromfile("data/shakespeare_char/val.bin", numpy.uint16).astype(numpy.int64))
rows = (len(ids) - 1) // 64
pairs = torch.utils.data.TensorDataset(ids[: rows * 64].view(rows, 64), ids[1 : rows * 64 + 1].view(rows, 64))
with torch.no_grad():
    losses = [model(*pair)[1].item() * len(pair[0]) for pair in torch.utils.data.DataLoader(pairs, 64)]
print(sum(losses) / rows)
"""
SPEAKS = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")
GOALS = (2.71, 2.40)
Curve = dict[float, float]  # bits per byte by seconds


def split(text: str) -> tuple[str, str]:
    """The first nine tenths, and the rest."""
    return text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]


def write_data(folder: Path, text: str, seed: int) -> int:
    """Shards and tokenizer; the seed orders the documents. Returns the number of held-out tokens."""
    from nanochat.data.tokenizer import load
    from scripts.make_shards import cut, write_shards

    data = folder / "data"
    data.mkdir(parents=True)
    learnt, held_out = (cut(part, DOCUMENT_CHARACTERS) for part in split(text))
    random.Random(seed).shuffle(learnt)
    write_shards(held_out, data, 1, docs_per_group=16)
    (data / "shard_00000.parquet").rename(data / "shard_00001.parquet")
    write_shards(learnt, data, 1, docs_per_group=16)
    run_module(folder, "tok_train", "--vocab-size", str(VOCABULARY))
    known = load(folder / "tokenizer")
    return sum(len(known.encode(document, bos=True)) for document in held_out)


def train(folder: Path, cores: Sequence[Sequence[int]], flags: Mapping[str, Any]) -> Curve:
    """Train in processes on these cores, which share the rows of a step; returns the curve."""
    flags = {**flags, "--device-batch-size": flags["--device-batch-size"] // len(cores)}
    port, words = free_port(), [str(word) for flag, value in flags.items() for word in (flag, value)]
    processes = []
    for rank, own in enumerate(cores):
        told = {
            "RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": len(cores), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": len(own),
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "scripts.base_train", *words, "--run-dir", str(folder)], cwd=TRAINER, stdout=subprocess.DEVNULL,
                env=environment(folder, **{name: str(value) for name, value in told.items()}), preexec_fn=on_cores(own),
            )
        )  # fmt: skip
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("A rank of ours failed; see above.")
    metrics = folder / "metrics-rank0.jsonl"
    shutil.rmtree(folder / "base_checkpoints")
    kinds = events(metrics)
    metrics.unlink()
    begun = min(event["time"] - event["seconds"] for event in kinds if event["kind"] in ("step", "eval"))
    return {event["time"] - begun: event["val_bpb"] for event in kinds if event["kind"] == "eval"}


def on_cores(cores: Sequence[int]) -> Any:
    return lambda: os.sched_setaffinity(0, cores)


def nanogpt(checkout: Path, text: str, cores: Sequence[int]) -> Curve:
    """Run its example in a copy of the checkout; returns its curve, the last figure from the whole last tenth."""
    import numpy

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "nanoGPT"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "out*"))
        data, known = copy / "data/shakespeare_char", sorted(set(text))
        ids = {character: number for number, character in enumerate(known)}
        for name, part in zip(("train", "val"), split(text), strict=True):
            numpy.array([ids[character] for character in part], numpy.uint16).tofile(data / f"{name}.bin")
        # Without it nanoGPT would make a model for 50,304 characters.
        (data / "meta.pkl").write_bytes(
            pickle.dumps({"vocab_size": len(known), "itos": dict(enumerate(known)), "stoi": ids})
        )
        options: dict[str, Any] = {
            "cwd": copy, "preexec_fn": on_cores(cores), "stdout": subprocess.PIPE, "text": True,
            "env": {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "PYTHONUNBUFFERED": "1"},
        }  # fmt: skip
        curve, begun = {}, 0.0
        with subprocess.Popen([sys.executable, "train.py", *NANOGPT], **options) as process:
            for line in process.stdout or ():
                begun = begun or (time.monotonic() if line.startswith(("num decayed", "using fused")) else 0.0)
                if said := SPEAKS.match(line):
                    curve[time.monotonic() - begun] = float(said[2]) / math.log(2)
        if process.returncode:
            raise SystemExit("nanoGPT failed; see above.")
        options.pop("stdout")
        nats = subprocess.run([sys.executable, "-c", WHOLE_TENTH], **options, stdout=subprocess.PIPE, check=True).stdout
        curve[max(curve)] = float(nats.split()[-1]) / math.log(2)
        return curve


def reached(curve: Curve, goal: float) -> float | None:
    """Seconds until the goal, between two evaluations by a straight line."""
    before: tuple[float, float] | None = None
    for seconds, bits in sorted(curve.items()):
        if bits <= goal:
            if before is None or before[1] == bits:
                return seconds
            return before[0] + (seconds - before[0]) * (before[1] - goal) / (before[1] - bits)
        before = seconds, bits
    return None


def row(curves: Sequence[Curve]) -> dict[str, Any]:
    """Means over the seeds."""
    figures: dict[str, Any] = {}
    for goal in GOALS:
        times = [reached(curve, goal) for curve in curves]
        known = [seconds for seconds in times if seconds is not None]
        figures[f"seconds to {goal:.2f}"] = round(statistics.mean(known), 2) if len(known) == len(times) else None
    figures["seconds"] = round(statistics.mean(max(curve) for curve in curves), 2)
    figures["bits per byte"] = round(statistics.mean(curve[max(curve)] for curve in curves), 4)
    return figures


def mean(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Seconds and bits per byte of each evaluation."""
    evaluations = zip(*(curve.items() for curve in curves), strict=True)
    return [
        (statistics.mean(seconds), statistics.mean(bits))
        for seconds, bits in (zip(*at, strict=True) for at in evaluations)
    ]


# Without a background, in colours that stand out on white; where the reader's page is dark, in lighter ones.
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#57606a}
.grid{stroke:#d0d7de}.ours{--c:#0550ae}.other{--c:#cf222e}
path{fill:none;stroke:var(--c);stroke-width:2.5}.other path{stroke-dasharray:6 4}circle,text.name{fill:var(--c)}
@media(prefers-color-scheme:dark){text{fill:#adbac7}.grid{stroke:#444c56}.ours{--c:#6cb6ff}.other{--c:#ff938a}}
"""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 60, 150, 30, 52
# Shown of the bits per byte.
LEAST, MOST = 2.0, 4.0


def words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{text}</text>'


def picture(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Both on two cores, with the means of all orders of the text, as an SVG."""
    shown = {"ours": "ours", "other": "nanoGPT"}
    means = {kind: mean(curves[f"{who}, two cores"]) for kind, who in shown.items()}
    longest = max(points[-1][0] for points in means.values())

    def across(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / longest

    def down(bits: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (bits - LEAST) / (MOST - LEAST))

    lines = [words(LEFT, 14, "bits per byte of the last tenth of tiny Shakespeare")]
    lines.append(
        words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "seconds of training on two cores", ' text-anchor="middle"')
    )
    for bits in (2.0, 2.5, 3.0, 3.5, 4.0):
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(bits):.1f}" y2="{down(bits):.1f}"/>'
        )
        lines.append(words(LEFT - 8, down(bits) + 4, f"{bits:.1f}", ' text-anchor="end"'))
    for seconds in range(0, int(longest) + 1, 10):
        lines.append(words(across(seconds), HEIGHT - BOTTOM + 20, str(seconds), ' text-anchor="middle"'))
    for kind, points in means.items():
        seen = [(across(seconds), down(bits)) for seconds, bits in points if bits <= MOST]
        lines.append(f'<g class="{kind}"><path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in seen)}"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in seen]
        lines.append(
            words(seen[-1][0] + 8, seen[-1][1] + 4, f"{shown[kind]}, {points[-1][1]:.2f}", ' class="name"') + "</g>"
        )
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    title = "<title>How soon tiny Shakespeare is learnt on two cores, beside nanoGPT's example for CPUs</title>"
    return "\n".join([begin, title, f"<style>{STYLE}</style>", *lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to learn a text, beside nanoGPT's own example for CPUs.")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to run beside ours")
    parser.add_argument("--quick", action="store_true", help="one order of the text in place of three")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--write", type=Path, help="file for all curves as JSON")
    parser.add_argument("--plot", type=Path, help="file for the curves on two cores as SVG; needs --nanogpt")
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="flags of base_train in place of the ones here, as JSON"
    )
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.nanogpt and "two cores" in arguments.ways):
        parser.error("--plot shows both on two cores: it needs --nanogpt, and two cores among --ways")
    text = arguments.text.read_text(encoding="utf-8")
    curves: dict[str, list[Curve]] = {f"ours, {way}": [] for way in arguments.ways}
    for seed in range(1 if arguments.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            flags = {**FLAGS, **arguments.flags, "--eval-tokens": write_data(Path(folder), text, seed)}
            for way in arguments.ways:
                curves[f"ours, {way}"].append(train(Path(folder), WAYS[way], flags))
                print(f"ours, {way}: {row(curves[f'ours, {way}'][-1:])}", file=sys.stderr, flush=True)
    if arguments.nanogpt:
        for way in ("one core", "two cores"):
            curves[f"nanoGPT, {way}"] = [nanogpt(arguments.nanogpt, text, WAYS[way][0])]
            print(f"nanoGPT, {way}: {row(curves[f'nanoGPT, {way}'])}", file=sys.stderr, flush=True)
    if arguments.write:
        arguments.write.write_text(json.dumps(curves), encoding="utf-8")
    if arguments.plot:
        arguments.plot.write_text(picture(curves), encoding="utf-8")
    print(json.dumps({way: row(of_way) for way, of_way in curves.items()}))


if __name__ == "__main__":
    main()
