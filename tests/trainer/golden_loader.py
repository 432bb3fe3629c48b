# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The results of our data loader for the cases of golden/loader.json, in the format of that file.

Reads only world, rank, split, B, T, the batch numbers and the resume position; digests and states are recomputed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from nanochat.data import dataset, tokenizer
from nanochat.data.dataloader import Loader

Json = dict[str, Any]


def digest(tokens: torch.Tensor) -> str:
    """The first 32 hex digits of the sha256 of the raw int64 bytes."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()[:32]


def replay(cases: Json, data: Path) -> Json:
    """Recompute the whole file; data: folder with base_data_climbmix/ and tokenizer/."""
    folder, tokens = data / "base_data_climbmix", tokenizer.load(data / "tokenizer")
    shards = dataset.inspect(dataset.shard_paths(folder))

    def batches(case: Json, last: int, position: Json | None = None) -> list[Json]:
        """The batches up to a number, each with the position after it."""
        place = (case["B"], case["T"], case["rank"], case["world"])
        loader, found = Loader(tokens, folder, case["split"], *place, position=position), []
        for number in range(last + 1):
            x, y = loader.next_batch()
            found.append({"i": number, "x": digest(x), "y": digest(y), "state": loader.position()})
        loader.close()
        return found

    def replayed(case: Json) -> Json:
        wanted = [batch["i"] for batch in case["batches"]]
        found = batches(case, max(wanted))
        return {**case, "batches": [found[number] for number in wanted]}

    def resumed(case: Json, like: Json) -> Json:
        (first,) = batches({**like, **case}, 0, case["state_in"])
        kept = {name: case[name] for name in ("world", "rank", "state_in")}
        return {**kept, "x": first["x"], "y": first["y"], "state_out": first["state"]}

    return {
        "shards": len(shards),
        "row_groups": len(shards[0].group_rows),
        "docs_per_group": shards[0].group_rows[0],
        "vocab": tokens.vocab_size,
        "token_bytes_sum": int(tokenizer.load_token_bytes(data / "tokenizer", tokens.vocab_size).sum()),
        "loader": [replayed(case) for case in cases["loader"]],
        # This case omits what all others share.
        "resume": resumed(
            cases["resume"], {"split": "train", "B": cases["loader"][0]["B"], "T": cases["loader"][0]["T"]}
        ),
    }
