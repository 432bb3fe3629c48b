# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The result of the demo: its model's samples, and its bits per byte beside those of gzip and xz. Called by demo.sh:

TRAINER_PYTHON tools/demo_result.py RUN_FOLDER
"""

from __future__ import annotations

import gzip
import json
import lzma
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyarrow import parquet

PROMPTS = ("If the", "Once upon a time")
COLUMNS = 78


def main(run_folder: Path) -> None:
    lines = (run_folder / "metrics-rank0.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    samples = [event for event in events if event["kind"] == "sample"]
    for prompt in PROMPTS:
        show_samples(prompt, [event for event in samples if event["prompt"] == prompt])
    plan = json.loads((run_folder / "plan.json").read_text(encoding="utf-8"))
    bits = next((event["val_bpb"] for event in reversed(events) if event["kind"] == "eval"), None)
    if bits is not None:
        print(textwrap.fill(compared(bits, held_out(Path(plan["nodes"][0]["data_dir"]))), COLUMNS))


def show_samples(prompt: str, samples: Sequence[dict[str, Any]]) -> None:
    """The first, the middle and the last one."""
    if samples:
        print(f'What it made of "{prompt}"')
    for at in sorted({0, len(samples) // 2, len(samples) - 1} if samples else ()):
        text = " ".join(samples[at]["text"].split())
        print("  " + textwrap.shorten(f"step {samples[at]['step']}: {text}", COLUMNS - 2, placeholder=" ..."))


def held_out(data_dir: Path) -> bytes:
    """The text on which the model was evaluated, but never trained."""
    shard = max(data_dir.glob("shard_*.parquet"))
    return "".join(parquet.read_table(shard)["text"].to_pylist()).encode()


def compared(bits: float, text: bytes) -> str:
    packed = {name: 8 * len(pack(text)) / len(text) for name, pack in (("gzip", gzip.compress), ("xz", lzma.compress))}
    others = " and ".join(f"{name} {found:.2f}" for name, found in packed.items())
    beaten = [name for name, found in packed.items() if bits < found]
    better = f": it predicts this text better than {beaten[-1]} packs it" if beaten else ""
    return f"For text that it has never seen the model needs {bits:.2f} bits per byte, {others}{better}."


if __name__ == "__main__":
    main(Path(sys.argv[1]))
