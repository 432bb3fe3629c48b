# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations: lists of {"role": ..., "content": ...}, their tokens, which of them are the assistant's, and batches of them.

    loader = ChatLoader(Talks(path, tokenizer), rows=8, length=512)
    x, y = loader.next_batch()   # the rows of the coming step
    loader.position()            # everything needed to resume

A user message is enclosed in <|user_start|> and <|user_end|>, an assistant's in <|assistant_start|> and
<|assistant_end|>; an initial system message is prepended to the first user message.
A position in the data is two numbers: the epoch, and how many of its conversations were read.
A step takes the next conversations of the epoch as long as each fits into one of its rows, and puts
each where it leaves the least space. Rows end with padding rather than part of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.data.dataloader import Cursor, Pair
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError
from nanochat.model.ops import IGNORED
from nanochat.rules.messages import Message, parse, scan, summary

START = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}
SEED = 42


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation from <|bos|> on, and for each whether it is a target."""
    ids, said = [tokenizer.bos], [False]
    for message in merged(messages):
        role, content = message["role"], tokenizer.encode(message["content"])
        is_assistant = role == "assistant"
        ids += [tokenizer.special(f"<|{role}_start|>"), *content, tokenizer.special(f"<|{role}_end|>")]
        said += [False, *[is_assistant] * (len(content) + 1)]
    return ids, said


def merged(messages: Sequence[Message]) -> list[Message]:
    """Prepend the system message to the first user message."""
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        return [{**messages[1], "content": text}, *messages[2:]]
    return list(messages)


def to_answer(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens after which the assistant answers."""
    return [*render(tokenizer, messages)[0], tokenizer.special("<|assistant_start|>")]


class Talks:
    """The conversations of a file, read and tokenized on demand; an invalid line raises an error with file and line."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self.tokenizer = path, tokenizer
        try:
            self.offsets, wrong = scan(path)
        except OSError as error:
            raise DataError(f"cannot read the conversations of {path}: {error.strerror or error}.") from None
        if wrong:
            raise DataError(f"{summary(wrong)}.")
        self._order: tuple[int, list[int]] = (0, [])

    def __len__(self) -> int:
        return len(self.offsets)

    def messages(self, number: int) -> list[Message]:
        """One conversation, by its index in the file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offsets[number])
                return parse(file.readline().decode())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} changed while it was being read: {error}; start again.") from None

    def order(self, epoch: int) -> list[int]:
        """The order of an epoch, the same on every rank."""
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(SEED + epoch)
            self._order = epoch, torch.randperm(len(self), generator=generator).tolist()
        return self._order[1]

    def rendered(self, number: int, most: int) -> tuple[Tensor, Tensor]:
        """Tokens and their target mask; a conversation that is too long is cut."""
        try:
            ids, said = render(self.tokenizer, self.messages(number))
        except DataError as error:
            raise DataError(f"conversation {number + 1} of {self.path}: {error}") from None
        return torch.tensor(ids[:most]), torch.tensor(said[:most])


class PackedRows(NamedTuple):
    """The rows of a step, and where the next step continues."""

    inputs: Tensor
    targets: Tensor
    cursor: Cursor


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
    return PackedRows(tokens[:, :-1].contiguous(), targets, Cursor(0, index, epoch, 0))


class ChatLoader:
    """The rows of each step, of all ranks."""

    def __init__(self, talks: Talks, rows: int, length: int, position: Mapping[str, int] | None = None) -> None:
        self.talks, self.rows, self.length = talks, rows, length
        at = {**START, **(position or {})}
        self._cursor = Cursor(0, at["rg_idx"], at["epoch"], 0)
        if not (at["epoch"] >= 1 and 0 <= at["rg_idx"] <= len(talks)):
            raise DataError(
                f"the checkpoint's position in the conversations, {dict(at)}, does not exist in {talks.path}, which has "
                f"{len(talks)}; use the file that the run was started with."
            )
        self.last: PackedRows | None = None

    def next_batch(self) -> Pair:
        """Inputs and targets of the coming step."""
        self.last = pack(self.talks, self._cursor.epoch, self._cursor.rg_idx, self.rows, self.length)
        self._cursor = self.last.cursor
        return self.last.inputs, self.last.targets

    def position(self) -> dict[str, int]:
        """Where the next step continues, in upstream's format; rg_idx counts conversations."""
        return self._cursor.position()

    def state(self, batch: Any = None) -> dict[str, Any]:
        """The meta file's position is enough."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def epoch_batches(talks: Talks, rows: int, length: int) -> Iterator[Pair]:
    """All conversations, each once."""
    index = 0
    while index < len(talks):
        packed = pack(talks, 1, index, rows, length, once=True)
        index = packed.cursor.rg_idx
        yield packed.inputs, packed.targets
