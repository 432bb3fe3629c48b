# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One rank's rows of the shards, for any share of a step.

Every rank reads its own stream, even if it takes no rows of it, and so keeps that stream's position in the data;
it also reads those of other ranks whose rows it takes (shares.py). Of our own shards there is one stream, which all ranks read
and each takes its rows of: no part of the text is finished, and begun again, before another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanochat.data.dataloader import LoadedBatch, Loader, Pair, in_passes
from nanochat.rules.shares import StreamRows, pieces

# Opens a stream with this number and these rows per step.
Open = Callable[[int], Loader]


class Streams:
    """The streams that this rank reads; `common`: one for all ranks, of all rows of a step."""

    def __init__(self, rank: int, shares: Sequence[int], open_stream: Open, common: bool = False) -> None:
        self.rank, self.common = rank, common
        self.loaders: dict[int, Loader] = {}
        self._pieces: list[StreamRows] = []
        self.deal(shares, open_stream)

    def deal(self, shares: Sequence[int], open_stream: Open) -> None:
        """Change this rank's share of the rows; open streams stay open."""
        if self.common:
            begin = sum(shares[: self.rank])
            self._pieces, wanted = [StreamRows(0, begin, begin + shares[self.rank])], {0}
        else:
            self._pieces = pieces(shares, self.rank)
            wanted = {self.rank, *(piece.stream for piece in self._pieces)}
        for stream in self.loaders.keys() - wanted:
            self.loaders.pop(stream).close()
        for stream in sorted(wanted - self.loaders.keys()):
            self.loaders[stream] = open_stream(stream)

    @property
    def own(self) -> Loader:
        return self.loaders[0 if self.common else self.rank]

    @property
    def last(self) -> LoadedBatch | None:
        return self.own.last

    def step(self, passes: Sequence[int]) -> list[Pair]:
        """Inputs and targets of this rank's micro-batches in the coming step, of these sizes."""
        drawn = {stream: loader.next_batch() for stream, loader in self.loaders.items()}
        if not self._pieces:
            return []
        ids, targets = (
            torch.cat([drawn[piece.stream][part][piece.start : piece.stop] for piece in self._pieces])
            for part in (0, 1)
        )
        return in_passes(ids, targets, passes)

    def position(self) -> dict[str, int]:
        """The position of the last batch in the data, in upstream's three numbers."""
        return self.own.position()

    def state(self, batch: Any = None) -> dict[str, Any]:
        """The state of this rank's own stream after a batch (the last one), for bit-identical resuming."""
        return self.own.state(batch)

    def close(self) -> None:
        """Stop reading."""
        for loader in self.loaders.values():
            loader.close()
