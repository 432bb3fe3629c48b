# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replay a file of data loader cases and write our loader's results in the same format.

    python -m scripts.parity_loader CASES.json --data FOLDER --write OUT.json

FOLDER holds base_data_climbmix/ and tokenizer/. Reads only world, rank, split, B, T, the batch numbers and the
resume position; digests and states are recomputed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanochat.data import dataset
from nanochat.data import tokenizer as tokenizers
from nanochat.data.dataloader import Loader
from nanochat.kit.common import UserError, exit_code

Json = dict[str, Any]
WHERE = ("world", "rank", "split", "B", "T")


def digest(tokens: torch.Tensor) -> str:
    """The first 32 hex digits of the sha256 of the raw int64 bytes."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()[:32]


def replay(cases: Json, data: Path) -> Json:
    """Recompute the whole file."""
    folder, tokenizer = data / "base_data_climbmix", tokenizers.load(data / "tokenizer")
    token_bytes = tokenizers.load_token_bytes(data / "tokenizer", tokenizer.vocab_size)
    shards = dataset.inspect(dataset.shard_paths(folder))

    def drawn(case: Json, count: int, position: Json | None = None) -> list[Json]:
        """The first batches of a loader, each with the position after it."""
        world, rank, split, rows, length = (case[name] for name in WHERE)
        loader = Loader(tokenizer, folder, split, rows, length, rank, world, position=position)
        with contextlib.closing(loader):
            pairs = (loader.next_batch() for dummy in range(count))
            return [{"x": digest(x), "y": digest(y), "state": loader.position()} for x, y in pairs]

    def replayed(case: Json) -> Json:
        """The requested batches of one loader."""
        numbers = [int(batch["i"]) for batch in case["batches"]]
        found = drawn(case, max(numbers) + 1)
        return {**case, "batches": [{"i": number, **found[number]} for number in numbers]}

    def resumed(case: Json) -> Json:
        """The first batch after a position. The golden file's case omits what all cases share."""
        first: Json = next(iter(cases.get("loader", [])), {"B": 2, "T": 64})
        [found] = drawn({"split": "train", "B": first["B"], "T": first["T"], **case}, 1, case["state_in"])
        kept = {name: case[name] for name in (*WHERE, "state_in") if name in case}
        return {**kept, "x": found["x"], "y": found["y"], "state_out": found["state"]}

    out: Json = {
        "shards": len(shards),
        "row_groups": len(shards[0].group_rows),
        "docs_per_group": shards[0].group_rows[0],
        "vocab": tokenizer.vocab_size,
        "token_bytes_sum": int(token_bytes.sum()),
        "loader": [replayed(case) for case in cases.get("loader", [])],
    }
    if "resume" in cases:
        given = cases["resume"]
        out["resume"] = resumed(given) if isinstance(given, dict) else [resumed(case) for case in given]
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.parity_loader", description="Replay data loader cases.")
    parser.add_argument("cases", type=Path, help="a file like golden/loader.json")
    parser.add_argument("--data", type=Path, required=True, help="folder with base_data_climbmix/ and tokenizer/")
    parser.add_argument("--write", type=Path, required=True, help="output file")
    args = parser.parse_args(argv)
    try:
        cases = json.loads(args.cases.read_text(encoding="utf-8"))
        args.write.write_text(json.dumps(replay(cases, args.data), indent=1) + "\n", encoding="utf-8")
    except (LookupError, OSError, ValueError) as error:
        raise UserError(f"cannot replay {args.cases} into {args.write}: {error!r}.") from None


if __name__ == "__main__":
    sys.exit(exit_code(main))
