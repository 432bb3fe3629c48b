# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""This rank's rows of each step, which all ranks read alike: so a step has the same rows for any number of ranks and any shares."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nanochat.data.conversation import ChatLoader
from nanochat.data.dataloader import Loader, Pair
from nanochat.parallel.sync import Notice, Sync


class Feed:
    """Reads ahead if allowed, and then sends the token ids ahead too."""

    def __init__(self) -> None:
        self.sync: Sync
        self.loader: Loader | ChatLoader
        self.passes: list[int] = []
        self.mine = slice(0)
        self.seconds = 0.0
        self._batches: list[Pair] | None = None
        # The loader's last batch: of the coming step, and of the last finished one.
        self._taken: Any = None
        self._finished: Any = None

    def take_shares(self, sync: Sync, before: int, passes: Sequence[int]) -> None:
        """Change this rank's rows: so many per pass, after those of the ranks before it."""
        self.sync, self.passes = sync, [rows for rows in passes if rows]
        self.mine = slice(before, before + sum(passes))

    def offer(self, notice: Notice) -> None:
        """Read the coming step's batches and send their ids to the other ranks."""
        begun = time.perf_counter()
        inputs, targets = (rows[self.mine].split(self.passes) for rows in self.loader.next_batch())
        self._batches = list(zip(inputs, targets, strict=True))
        self.seconds += time.perf_counter() - begun
        self.sync.offer_ids([ids for ids, dummy in self._batches], notice)

    @property
    def offered(self) -> bool:
        """Whether the coming step's were offered."""
        return self._batches is not None

    def take(self) -> tuple[list[Pair], dict[str, int]]:
        """This step's batches and their position in the data."""
        batches, self._batches = self._batches, None
        self._taken = self.loader.last
        return batches or [], self.loader.position()

    def finish(self) -> None:
        """Finish the step whose batches were taken; what was read ahead does not count yet."""
        self._finished, self._taken = self._taken, None

    def state(self) -> dict[str, Any]:
        """The loader's state after the last finished step."""
        return self.loader.state(self._finished)

    def position(self) -> dict[str, int]:
        """The last finished step's position in the data."""
        return self._finished.cursor.position() if self._finished else self.loader.position()

    def take_seconds(self) -> float:
        """Seconds spent reading since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken
