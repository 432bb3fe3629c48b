# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replays data loader cases like golden/loader.json: what our loader gives, in the same format.

Of a case only world, rank, split, B, T, the batch numbers and the position to resume from are read; digests and states are computed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from nanochat.data import dataset
from nanochat.data import tokenizer as tokenizers
from nanochat.data.dataloader import Loader

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
        """What the file's head says about the data."""
        shards = dataset.inspect(dataset.shard_paths(self.shards))
        return {
            "shards": len(shards),
            "row_groups": len(shards[0].group_rows),
            "docs_per_group": shards[0].group_rows[0],
            "vocab": self.tokenizer.vocab_size,
            "token_bytes_sum": int(self.token_bytes.sum()),
        }

    def case(self, case: Json) -> Json:
        """One loader: the batches asked for, each with the position after it."""
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
        split, rows, length, rank, world = ({**like, **case}[name] for name in ("split", "B", "T", "rank", "world"))
        loader = Loader(self.tokenizer, self.shards, split, rows, length, rank, world, position=case["state_in"])
        x, y = loader.next_batch()
        loader.close()
        kept: Json = {name: case[name] for name in ("world", "rank", "split", "B", "T", "state_in") if name in case}
        return {**kept, "x": digest(x), "y": digest(y), "state_out": loader.position()}


def replay(cases: Json, data: Path) -> Json:
    """The whole file, computed again."""
    run = Replay(data)
    out = run.summary()
    out["loader"] = [run.case(case) for case in cases["loader"]]
    # The golden file's resume case does not repeat these three; it shares them with the other cases.
    like = {"split": "train", "B": out["loader"][0]["B"], "T": out["loader"][0]["T"]}
    return {**out, "resume": run.resume(cases["resume"], like)}
