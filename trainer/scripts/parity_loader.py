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


def digest(tokens: torch.Tensor) -> str:
    """The first 32 hex digits of the sha256 of the raw int64 bytes."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()[:32]


class Replay:
    """The cases of one file over one data folder."""

    def __init__(self, data: Path) -> None:
        self.shards = data / "base_data_climbmix"
        self.tokenizer = tokenizers.load(data / "tokenizer")
        self.token_bytes = tokenizers.load_token_bytes(data / "tokenizer", self.tokenizer.vocab_size)

    def summary(self) -> Json:
        """The file's header, recomputed from the data."""
        shards = dataset.inspect(dataset.shard_paths(self.shards))
        return {
            "shards": len(shards),
            "row_groups": len(shards[0].group_rows),
            "docs_per_group": shards[0].group_rows[0],
            "vocab": self.tokenizer.vocab_size,
            "token_bytes_sum": int(self.token_bytes.sum()),
        }

    def case(self, case: Json) -> Json:
        """The requested batches of one loader, each with the position after it."""
        where = {name: case[name] for name in ("world", "rank", "split", "B", "T")}
        wanted = {int(batch["i"]) for batch in case["batches"]}
        loader = Loader(self.tokenizer, self.shards, case["split"], case["B"], case["T"], case["rank"], case["world"])
        found: dict[int, Json] = {}
        for number in range(max(wanted, default=-1) + 1):
            x, y = loader.next_batch()
            if number in wanted:
                found[number] = {"i": number, "x": digest(x), "y": digest(y), "state": loader.position()}
        loader.close()
        return {**where, "batches": [found[int(batch["i"])] for batch in case["batches"]]}

    def resume(self, case: Json, like: Json) -> Json:
        """The first batch after a position."""
        full: Json = {**like, **case}
        loader = Loader(
            self.tokenizer,
            self.shards,
            full["split"],
            full["B"],
            full["T"],
            full["rank"],
            full["world"],
            position=full["state_in"],
        )
        x, y = loader.next_batch()
        loader.close()
        kept: Json = {name: case[name] for name in ("world", "rank", "split", "B", "T", "state_in") if name in case}
        return {**kept, "x": digest(x), "y": digest(y), "state_out": loader.position()}


def replay(cases: Json, data: Path) -> Json:
    """Recompute the whole file."""
    run = Replay(data)
    out = run.summary()
    out["loader"] = [run.case(case) for case in cases.get("loader", [])]
    if "resume" in cases:
        # The golden file's resume case omits these three, which all cases share.
        first: Json = next(iter(out["loader"]), {"B": 2, "T": 64})
        like: Json = {"split": "train", "B": first["B"], "T": first["T"]}
        several = isinstance(cases["resume"], list)
        found = [run.resume(case, like) for case in (cases["resume"] if several else [cases["resume"]])]
        out["resume"] = found if several else found[0]
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
    except KeyError as error:
        raise UserError(f"a case in {args.cases} does not say its {error}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot replay {args.cases} into {args.write}: {error}.") from None


if __name__ == "__main__":
    sys.exit(exit_code(main))
