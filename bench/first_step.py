# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long it takes from starting the trainer to the end of its first step, and where that time goes.

    python bench/first_step.py                            # d4 and d8, this machine's cores
    python bench/first_step.py --models d4 --repeats 5 --write first_step.json
    python bench/first_step.py --models d2 --nodes 2      # as two hosts start it, each with an agent of torchrun

Starts scripts.base_train on made-up text with a vocabulary of 32768, in a folder that is removed afterwards. "ready" is
a process that has imported the trainer and does no more; what comes after that is "set up" (settings, data, model,
weights) and the first step itself. "leave" is the time from the end of the training to that of the last process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pieces import free_port

TRAINER = Path(__file__).resolve().parents[1] / "trainer"
VOCABULARY = 32768
MODELS = {
    "d2": ["--depth", "2", "--aspect-ratio", "16", "--head-dim", "32", "--max-seq-len", "64", "--total-batch-size", "256"],
    "d4": ["--depth", "4", "--head-dim", "64", "--max-seq-len", "512", "--total-batch-size", "2048"],
    "d8": ["--depth", "8", "--head-dim", "128", "--max-seq-len", "1024", "--total-batch-size", "4096"],
}  # fmt: skip
FLAGS = ["--device-batch-size", "2", "--num-iterations", "2", "--eval-every", "-1", "--sample-every", "-1"]
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


def make_data(folder: Path) -> None:
    """A tokenizer of pairs of bytes, which needs no training, and shards of words drawn at random."""
    sys.path.insert(0, str(TRAINER))
    import pyarrow as pa
    import tiktoken
    from pyarrow import parquet as pq

    from nanochat.data import tokenizer

    special, chance = tokenizer.SPECIAL_TOKENS, random.Random(0)
    ranks = {bytes([number]): number for number in range(256)}
    for number in range(256, VOCABULARY - len(special)):
        first, second = divmod(number - 256, 256)
        ranks[bytes([(first + 97) % 256, (second + 97) % 256])] = number
    names = {name: VOCABULARY - len(special) + number for number, name in enumerate(special)}
    encoding = tiktoken.Encoding("pairs", pat_str=tokenizer.SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=names)
    tokenizer.save(tokenizer.Tokenizer(encoding), folder / "tokenizer")
    (folder / "base_data_climbmix").mkdir()
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for dummy in range(5000)]
    for shard in range(2):
        texts = [" ".join(chance.choices(words, k=400)) for dummy in range(2000)]
        path = folder / "base_data_climbmix" / f"shard_{shard:05d}.parquet"
        pq.write_table(pa.table({"text": texts}), path, row_group_size=500)


def start_once(base: Path, model: str, nodes: int) -> dict[str, float]:
    """One start; the seconds of each part."""
    run = Path(tempfile.mkdtemp(dir=base))
    environ = os.environ | {"NANOCHAT_BASE_DIR": str(base), "GLIBC_TUNABLES": MALLOC, "PYTHONUNBUFFERED": "1"}
    trainer = [*MODELS[model], *FLAGS, "--model-tag", run.name]
    began = time.time()
    started = [
        subprocess.Popen(
            [sys.executable, *launcher, *trainer, "--run-dir", str(run)],
            cwd=TRAINER,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for launcher in launchers(nodes)
    ]
    said = [process.communicate()[1].strip() for process in started]
    gone = time.time()
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(said))
    events = [json.loads(line) for line in (run / "metrics-rank0.jsonl").read_text().splitlines()]
    when = {event["kind"]: event["time"] for event in events}
    first, second = (event for event in events if event["kind"] == "step")
    ready = seconds_to_import(environ)
    return {
        "ready": ready,
        "set_up": when["start"] - began - ready,
        "first_step": first["time"] - when["start"],
        "from_ready": first["time"] - began - ready,
        "total": first["time"] - began,
        "second_step": second["seconds"],
        "leave": gone - when["end"],
    }


def launchers(nodes: int) -> list[list[str]]:
    """The command that starts the trainer: itself, or an agent of torchrun for each of several nodes of this machine."""
    if nodes == 1:
        return [["-m", "scripts.base_train"]]
    port = free_port()
    return [
        [
            "-m", "scripts.torchrun", f"--nnodes={nodes}", f"--node-rank={node}", "--nproc-per-node=1",
            "--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1", "-m", "scripts.base_train", "--",
        ]
        for node in range(nodes)
    ]  # fmt: skip


def seconds_to_import(environ: dict[str, str]) -> float:
    """The time that Python and torch take before our code runs."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import scripts.base_train"], cwd=TRAINER, env=environ, check=True)
    return time.perf_counter() - began


def table(results: list[dict[str, Any]]) -> str:
    """The results for people."""
    heads = ["ready", "set_up", "first_step", "from_ready", "total", "second_step", "leave"]
    lines = [f"| model | {' | '.join(head.replace('_', ' ') for head in heads)} |", "|" + "---|" * (len(heads) + 1)]
    for one in results:
        lines.append(f"| {one['model']} | " + " | ".join(f"{one[head]:.2f} s" for head in heads) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="From starting the trainer to the end of its first step.")
    parser.add_argument("--models", default="d4,d8", help=f"of {', '.join(MODELS)}, with commas between")
    parser.add_argument("--nodes", type=int, default=1, help="so many nodes of this machine, each below torchrun")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is started; the median is shown")
    parser.add_argument("--write", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="nanochat-bench-") as name:
        make_data(Path(name))
        for model in arguments.models.split(","):
            starts = [start_once(Path(name), model, arguments.nodes) for dummy in range(arguments.repeats)]
            medians = {part: statistics.median(start[part] for start in starts) for part in starts[0]}
            results.append({"model": model, **medians})
    print(table(results))
    if arguments.write:
        arguments.write.write_text(
            json.dumps({"cores": os.cpu_count(), "nodes": arguments.nodes, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
