# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batches of tokens: documents packed best-fit into rows that each begin with BOS (of our own shards: cut into such rows).

    loader = Loader(tokenizer, folder, "train", rows=2, length=512)
    x, y = loader.next_batch()
    loader.position()        # upstream's three numbers, for the checkpoint's meta file
    loader.state()           # everything needed to resume bit-identically, for the rank's own file
    loader.close()

All ranks of a training read the same rows, and each takes its share of them (run/state.py). With rank r of world W, a loader reads the
row groups r, r+W, ... of each file, as upstream's ranks do.
A thread prepares the next batches while the model computes; position() and state() always refer to the last batch
returned.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import os
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanochat.data import dataset
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError, UserError
from nanochat.rules.causes import Cause

DOCUMENTS_AT_ONCE = 128
BUFFER_DOCUMENTS = 1000
MIXED_TOKENS = 2**17  # of our own shards: rows of at least this many tokens are mixed
BATCHES_AHEAD = 2
MOST_THREADS = 8
SHOWN_NAMES = 3
# Timeouts in seconds: for reading without progress, and after the run was asked to stop.
PATIENCE_SECONDS, STOP_SECONDS, POLL_SECONDS = 300.0, 10.0, 0.5
START = {"pq_idx": 0, "rg_idx": -1, "epoch": 1}

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class Cursor(NamedTuple):
    """The documents read last: file, row group, epoch, and the next of the group's slices of 128."""

    pq_idx: int
    rg_idx: int
    epoch: int
    next_slice: int

    def position(self) -> dict[str, int]:
        """Upstream's three numbers."""
        return {"pq_idx": self.pq_idx, "rg_idx": self.rg_idx, "epoch": self.epoch}


class LoadedBatch(NamedTuple):
    """One batch and the loader's whole state after it."""

    inputs: torch.Tensor
    targets: torch.Tensor
    cursor: Cursor
    waiting: list[Tokens]


Pair = tuple[torch.Tensor, torch.Tensor]


class WaitingDocuments:
    """Documents waiting for a row, by length and then by age."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.tokens: dict[int, Tokens] = {}
        self.count = 0

    def add(self, tokens: Tokens) -> None:
        """Add a document."""
        bisect.insort(self.order, (len(tokens), self.count))
        self.tokens[self.count] = tokens
        self.count += 1

    def take(self, room: int) -> Tokens:
        """The longest that fits (the oldest of equals), or else the shortest, to be cropped."""
        end = bisect.bisect_left(self.order, (room + 1, -1))
        at = bisect.bisect_left(self.order, (self.order[end - 1][0], -1)) if end else 0
        dummy, number = self.order.pop(at)
        return self.tokens.pop(number)


class Packer:
    """Reads, tokenizes and packs one batch at a time, without a thread."""

    def __init__(
        self, tokenizer: Tokenizer, shards: Sequence[dataset.Shard], rows: int, length: int, rank: int, world: int
    ) -> None:
        self.tokenizer, self.shards, self.rows, self.length = tokenizer, shards, rows, length
        self.rank, self.world = rank, world
        self.threads = min(MOST_THREADS, os.cpu_count() or 1)
        self.waiting = WaitingDocuments()
        self.cursor = Cursor(0, 0, 1, 0)
        self.slices = self.slices_after(START)

    def resume_exactly(self, cursor: Cursor, waiting: Sequence[Tokens]) -> None:
        """Resume as if nothing had been interrupted."""
        self.cursor = cursor
        self.slices = itertools.chain(self._cut(cursor), self.slices_after(cursor.position()))
        for tokens in waiting:
            self.waiting.add(tokens)

    def slices_after(self, start: Mapping[str, int]) -> Iterator[tuple[list[str], Cursor]]:
        """This rank's documents from just after the given position, a slice of at most 128 at a time, epoch after epoch, and the
        cursor after each."""
        first, epoch = start["pq_idx"], start["epoch"]
        # The position may be another rank's: this rank's first group of the next round.
        group = (start["rg_idx"] // self.world + 1) * self.world + self.rank if start["rg_idx"] >= 0 else self.rank
        while True:
            for index in range(first, len(self.shards)):
                for one in range(group, len(self.shards[index].group_rows), self.world):
                    yield from self._cut(Cursor(index, one, epoch, 0))
                group = self.rank
            first, epoch = 0, epoch + 1

    def _cut(self, begin: Cursor) -> Iterator[tuple[list[str], Cursor]]:
        """The rest of a row group."""
        path = self.shards[begin.pq_idx].path
        with dataset.open_shard(path) as file:
            texts = dataset.read_group(file, path, begin.rg_idx)
        for number in range(begin.next_slice, -(-len(texts) // DOCUMENTS_AT_ONCE)):
            first = number * DOCUMENTS_AT_ONCE
            yield texts[first : first + DOCUMENTS_AT_ONCE], begin._replace(next_slice=number + 1)

    def batch(self) -> LoadedBatch:
        """The next batch: every row filled to the last token."""
        rows = np.empty((self.rows, self.length + 1), dtype=np.int64)
        for row in rows:
            self._fill(row)
        both = torch.from_numpy(rows)
        return LoadedBatch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), self.cursor, self.left())

    def left(self) -> list[Tokens]:
        """What was read and is not in a batch yet, in order of arrival."""
        return list(self.waiting.tokens.values())

    def _fill(self, row: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        filled = 0
        while filled < len(row):
            while len(self.waiting.order) < BUFFER_DOCUMENTS:
                self._read_more()
            tokens = self.waiting.take(len(row) - filled)[: len(row) - filled]
            row[filled : filled + len(tokens)] = tokens
            filled += len(tokens)

    def _read_more(self) -> None:
        texts, self.cursor = next(self.slices)
        for tokens in self._encoded(texts):
            self.waiting.add(tokens)

    def _encoded(self, texts: list[str]) -> list[Tokens]:
        try:
            encoded = self.tokenizer.encode_documents(texts, self.threads)
        except DataError as error:
            raise DataError(f"{self.place()}: {error}") from None
        return [np.array(ids, dtype=np.int32) for ids in encoded]

    def place(self) -> str:
        """The current reading position."""
        return f"row group {self.cursor.rg_idx} of {self.shards[self.cursor.pq_idx].path}"


class TextPacker(Packer):
    """Cuts our own shards into rows, so that an epoch has each token once as a target. Rows of a part of the shards, or of all that
    is left of an epoch, are mixed; no row of an epoch comes before the last one of the epoch before."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.ready: deque[Tokens] = deque()
        self.rest: Tokens = np.empty(0, dtype=np.int32)  # too short for a row
        self._ahead: tuple[list[str], Cursor] | None = None  # of the next epoch

    def resume_exactly(self, cursor: Cursor, waiting: Sequence[Tokens]) -> None:
        super().resume_exactly(cursor, ())
        self.rest, self.ready = waiting[0], deque(waiting[1:])

    def left(self) -> list[Tokens]:
        return [self.rest, *self.ready]

    def _fill(self, row: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        while not self.ready:
            self._read_more()
        row[:] = self.ready.popleft()

    def _read_more(self) -> None:
        tokens, count = [self.rest], 0
        while count < MIXED_TOKENS:
            texts, cursor = self._ahead or next(self.slices)
            self._ahead = (texts, cursor) if count and cursor.epoch != self.cursor.epoch else None
            if self._ahead is not None:
                break
            self.cursor = cursor
            tokens += self._encoded(texts)
            count = sum(map(len, tokens))
        rows, self.rest = cut_rows(np.concatenate(tokens), self.tokenizer.bos, self.length)
        generator = torch.Generator().manual_seed(zlib.crc32(repr(tuple(self.cursor)).encode()))
        order = torch.randperm(max(0, len(rows) - 1), generator=generator).tolist()
        # The first one has what was left over from before.
        self.ready.extend(rows[:1] + [rows[1 + number] for number in order])


def cut_rows(tokens: Tokens, bos: int, length: int) -> tuple[list[Tokens], Tokens]:
    """Rows of BOS and the next `length` tokens (without the BOS of a document that begins there), and what is left."""
    rows: list[Tokens] = []
    at = 0
    while True:
        at += int(at < len(tokens) and tokens[at] == bos)
        if at + length > len(tokens):
            return rows, tokens[at:]
        rows.append(np.concatenate([np.array([bos], dtype=np.int32), tokens[at : at + length]]))
        at += length


class Loader:
    """Batches for one rank, packed ahead by a thread; next_batch() raises what a batch failed with."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        split: str,
        rows: int,
        length: int,
        rank: int = 0,
        world: int = 1,
        position: Mapping[str, int] | None = None,
        state: Mapping[str, Any] | None = None,
        patience: float = PATIENCE_SECONDS,
        interrupted: Callable[[], bool] = lambda: False,
        ahead: int = BATCHES_AHEAD,
    ) -> None:
        """state: where to resume exactly, position: where to resume like upstream; patience: timeout in seconds without progress;
        interrupted: whether to stop waiting; ahead: number of batches to prepare besides the one being made."""
        self.shards = shards = dataset.inspect_split(folder, split)
        kind = TextPacker if shards[0].every_token else Packer
        self.packer = kind(tokenizer, shards, rows, length, rank, world)
        if state is not None:
            cursor = Cursor(*map(operator.index, state["cursor"]))
            _checked(cursor.position(), len(shards), folder)
            self.packer.resume_exactly(cursor, _unflatten(state))
        elif position is not None:
            # Like upstream: at the next row group, with nothing waiting.
            self.packer.slices = self.packer.slices_after(_checked(position, len(shards), folder))
        self.last: LoadedBatch | None = None
        self.patience, self.interrupted = patience, interrupted
        self._orders: queue.SimpleQueue[Future[LoadedBatch] | None] = queue.SimpleQueue()
        self._ahead: deque[Future[LoadedBatch]] = deque()
        for dummy in range(ahead + 1):
            self._order()
        # A thread that hangs on a dead disk must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="dataloader", daemon=True)
        self._thread.start()

    def next_batch(self) -> Pair:
        """Inputs and targets, int64 [rows, length]."""
        self._wait()
        # One that failed stays the next: there is nothing behind it.
        self.last = made = self._ahead[0].result()
        self._ahead.popleft()
        self._order()
        return made.inputs, made.targets

    def position(self) -> dict[str, int]:
        """The documents read last for the last batch, in upstream's three numbers."""
        assert self.last is not None
        return self.last.cursor.position()

    def state(self, batch: LoadedBatch | None = None) -> dict[str, Any]:
        """The state after a batch (the last one) for bit-identical resuming."""
        batch = batch or self.last
        assert batch is not None
        lengths = torch.tensor([len(tokens) for tokens in batch.waiting], dtype=torch.int64)
        tokens = torch.from_numpy(np.concatenate(batch.waiting)) if batch.waiting else torch.empty(0, dtype=torch.int32)
        files, digests = [shard.path.name for shard in self.shards], [shard.digest for shard in self.shards]
        return {"files": files, "digests": digests, "cursor": list(batch.cursor), "lengths": lengths, "tokens": tokens}

    def close(self) -> None:
        """Stop the thread."""
        for one in self._ahead:
            one.cancel()
        self._orders.put(None)
        self._thread.join(STOP_SECONDS)

    def _order(self) -> None:
        """Order one more batch."""
        self._ahead.append(Future())
        self._orders.put(self._ahead[-1])

    def _work(self) -> None:
        for made in iter(self._orders.get, None):
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(self.packer.batch())
                # Whatever ends a batch, the training thread must learn of it.
                except BaseException as error:
                    made.set_exception(error)

    def _wait(self) -> None:
        """Wait for the next batch as long as there is progress."""
        began = moved = time.monotonic()
        cursor, asked = self.packer.cursor, math.inf
        while not wait(itertools.islice(self._ahead, 1), POLL_SECONDS).done:
            now = time.monotonic()
            if self.packer.cursor != cursor:
                cursor, moved = self.packer.cursor, now
            asked = min(asked, now) if self.interrupted() else math.inf
            if now - max(asked, moved) > STOP_SECONDS:
                raise UserError(
                    f"stopped while waiting for data, which has not arrived for {now - began:.0f} s from "
                    f"{self.packer.place()}; the steps since the last checkpoint are not saved.",
                    Cause.STOPPED,
                )
            if now - moved > self.patience:
                raise DataError(
                    f"no data arrived for {now - moved:.0f} s; the last read was {self.packer.place()}; "
                    "check that disk, then resume."
                )


def why_not_exact(state: Mapping[str, Any], shards: Sequence[dataset.Shard]) -> str:
    """Why training cannot continue exactly at this state; empty if it can."""
    if "cursor" not in state:
        return "it does not say which documents were read, so some may be read twice or left out"
    names, now = list(state.get("files", ())), {shard.path.name: shard.digest for shard in shards}
    # Older states have no digests.
    before = dict(zip(names, state.get("digests") or [now.get(name) for name in names], strict=True))
    if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        more = f" and {len(changed) - SHOWN_NAMES} more" if len(changed) > SHOWN_NAMES else ""
        shown = ", ".join(changed[:SHOWN_NAMES]) + more
        return f"the data have changed since ({shown}), and training continues with what is there now"
    if state.get("world", 1) != 1 or len(state["cursor"]) != len(Cursor._fields):
        return "in the version that made it each rank read documents of its own, so some may be read twice or left out"
    return ""


def _unflatten(state: Mapping[str, Any]) -> list[Tokens]:
    if not len(state["lengths"]):
        return []
    ends = np.cumsum(state["lengths"].numpy())[:-1]
    return [piece.astype(np.int32) for piece in np.split(state["tokens"].numpy(), ends)]


def _checked(position: Mapping[str, int], files: int, folder: Path) -> Mapping[str, int]:
    whole = {key: operator.index(position[key]) for key in START}
    if not 0 <= whole["pq_idx"] < files:
        raise DataError(
            f"the checkpoint's position in the data, {whole}, does not exist in {folder}, which has {files} file(s)."
        )
    return whole
