# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batches of whole conversations packed into rows; only the assistant's tokens are targets.

    loader = ChatLoader(Talks(path, tokenizer), shares=[4, 4], rank=0, length=512)
    pairs = loader.step([2, 2])  # this rank's micro-batches of the coming step
    loader.last.counted          # the targets of the whole step, over all ranks
    loader.position()            # everything needed to resume

Every rank packs the rows of all ranks and takes its own, which costs almost nothing. So a step has the same rows for any
number of ranks, and a position in the data is two numbers: the epoch, and how many of its conversations were read.
A step takes the next conversations of the epoch as long as each fits into one of its rows, and puts
each where it leaves the least space. Rows end with padding rather than part of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.data import conversation
from nanochat.data.dataloader import Cursor, Pair, in_passes
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError
from nanochat.model.ops import IGNORED
from nanochat.rules.messages import Message

START = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}
SEED = 42


class Talks:
    """The conversations of a file, read and tokenized on demand."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.offsets = conversation.offsets(path)
        self._order: tuple[int, list[int]] = (0, [])

    def __len__(self) -> int:
        return len(self.offsets)

    def messages(self, number: int) -> list[Message]:
        """One conversation, by its index in the file."""
        return conversation.read_at(self.path, self.offsets[number])

    def order(self, epoch: int) -> list[int]:
        """The order of an epoch, the same on every rank."""
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(SEED + epoch)
            self._order = epoch, torch.randperm(len(self), generator=generator).tolist()
        return self._order[1]

    def rendered(self, number: int, most: int) -> tuple[Tensor, Tensor]:
        """Tokens and their target mask; a conversation that is too long is cut."""
        try:
            ids, said = conversation.render(self.tokenizer, self.messages(number))
        except DataError as error:
            raise DataError(f"conversation {number + 1} of {self.path}: {error}") from None
        return torch.tensor(ids[:most]), torch.tensor(said[:most])


class PackedRows(NamedTuple):
    """The rows of a step, and where the next step continues."""

    inputs: Tensor
    targets: Tensor
    epoch: int
    read: int


def pack(talks: Talks, epoch: int, index: int, rows: int, length: int, once: bool = False) -> PackedRows:
    """The rows of one step; `once`: only those of this epoch."""
    tokens = torch.full((rows, length + 1), talks.tokenizer.bos)
    learnt = torch.zeros(rows, length + 1, dtype=torch.bool)
    room, passed = [length + 1] * rows, 0
    while True:
        if index == len(talks):
            if once:
                break
            epoch, index = epoch + 1, 0
        ids, said = talks.rendered(talks.order(epoch)[index], length + 1)
        if said[1:].any():
            row = min((row for row in range(rows) if room[row] >= len(ids)), key=room.__getitem__, default=None)
            if row is None:
                break
            begin = length + 1 - room[row]
            tokens[row, begin : begin + len(ids)] = ids
            learnt[row, begin : begin + len(ids)] = said
            room[row] -= len(ids)
            passed = -1
        index, passed = index + 1, passed + 1
        if passed == len(talks):
            raise DataError(
                f"no conversation of {talks.path} has an assistant token in its first {length + 1} tokens; use a larger "
                "--max-seq-len, or shorter conversations."
            )
    targets = torch.where(learnt[:, 1:], tokens[:, 1:], IGNORED)
    return PackedRows(tokens[:, :-1].contiguous(), targets, epoch, index)


class ChatBatch(NamedTuple):
    """The rows of a step: where the next ones start, and the number of targets on all ranks."""

    cursor: Cursor
    counted: int


class ChatLoader:
    """One rank's micro-batches, step by step."""

    def __init__(
        self,
        talks: Talks,
        shares: Sequence[int],
        rank: int,
        length: int,
        position: Mapping[str, int] | None = None,
    ) -> None:
        """shares: rows per step of all ranks."""
        self.talks, self.shares, self.rank, self.length = talks, shares, rank, length
        at = {**START, **(position or {})}
        self._cursor = Cursor(0, at["rg_idx"], at["epoch"], 0)
        if not (at["epoch"] >= 1 and 0 <= at["rg_idx"] <= len(talks)):
            raise DataError(
                f"the checkpoint's position in the conversations, {dict(at)}, does not exist in {talks.path}, which has "
                f"{len(talks)}; use the file that the run was started with."
            )
        self.last: ChatBatch | None = None

    def deal(self, shares: Sequence[int], dummy: object) -> None:
        """Change the ranks' shares of the rows."""
        self.shares = shares

    def step(self, passes: Sequence[int]) -> list[Pair]:
        """This rank's micro-batches of the coming step, of these sizes."""
        packed = pack(self.talks, self._cursor.epoch, self._cursor.rg_idx, sum(self.shares), self.length)
        begin = sum(self.shares[: self.rank])
        mine = slice(begin, begin + self.shares[self.rank])
        self._cursor = Cursor(0, packed.read, packed.epoch, 0)
        self.last = ChatBatch(self._cursor, int((packed.targets != IGNORED).sum()))
        return in_passes(packed.inputs[mine], packed.targets[mine], passes)

    def position(self) -> dict[str, int]:
        """Where the next step continues, in upstream's format; rg_idx counts conversations."""
        return self._cursor.position()

    def state(self, batch: Any = None) -> dict[str, Any]:
        """The position for this rank's own file."""
        cursor = batch.cursor if batch is not None else self._cursor
        return {"cursor": list(cursor[:4])}

    def close(self) -> None:
        """Nothing is open."""


def epoch_batches(talks: Talks, rows: int, length: int) -> Iterator[Pair]:
    """All conversations, each once."""
    index = 0
    while index < len(talks):
        packed = pack(talks, 1, index, rows, length, once=True)
        index = packed.read
        yield packed.inputs, packed.targets
