# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""This rank's micro-batches, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nanochat.data import dataloader
from nanochat.data.dataloader import BatchSource
from nanochat.parallel.sync import Sync

Batch = tuple[Tensor, Tensor]


class Feed:
    """Reads ahead where it may; what is read ahead has its token ids sent ahead."""

    def __init__(self) -> None:
        self.sync: Sync
        self.passes: list[int] = []
        self.loader: BatchSource
        self.seconds = 0.0
        self._batches: list[Batch] | None = None
        self._position: dict[str, int] = {}
        self._taken: dataloader.Batch | None = None
        self._finished: dataloader.Batch | None = None  # the last one of the step that was finished last

    def take_shares(self, sync: Sync, passes: Sequence[int]) -> None:
        """From now on take so many rows in each pass."""
        self.sync, self.passes = sync, [rows for rows in passes if rows]

    def offer(self, stop: bool, save: bool, busy: float = 0.0, place: tuple[int, bool] = (0, False)) -> None:
        """Read the coming step's batches, unless that was done, and tell the other ranks what is in them."""
        if self._batches is not None:
            return
        begun = time.perf_counter()
        self._batches = self.loader.step(self.passes)
        self._position = self.loader.position()
        self.seconds += time.perf_counter() - begun
        self.sync.offer_ids([ids for ids, dummy in self._batches], stop, save, busy, place)

    def take(self) -> tuple[list[Batch], dict[str, int]]:
        """The batches of this step and their place in the data."""
        batches, self._batches = self._batches, None
        self._taken = self.loader.last
        return batches or [], self._position

    def finish(self) -> None:
        """The step whose batches were taken is done; what was read ahead for the next one does not count yet."""
        self._finished, self._taken = self._taken, None

    def state(self) -> dict[str, Any]:
        """The loader's state after the last step that was finished."""
        return self.loader.state(self._finished)

    def finished_position(self) -> dict[str, int]:
        """Where the last step that was finished was in the data."""
        return self._finished.cursor.position() if self._finished else self.loader.position()

    def take_seconds(self) -> float:
        """Seconds spent reading since this was last asked."""
        taken, self.seconds = self.seconds, 0.0
        return taken
