# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkout's own optimizer between our exchanges, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat.join.optimizer import Joined, Touched


def collectives() -> Any:
    """The collectives of a single rank."""
    done = SimpleNamespace(wait=lambda: None)
    return SimpleNamespace(
        comm=SimpleNamespace(rank=0, world=1), start_step=lambda optimizer: None, gather=lambda parts, flat: done
    )


def test_unused_token_ids_are_forgotten_with_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Embedding, "forward", torch.nn.Embedding.forward)
    touched, table, other = Touched(), torch.nn.Embedding(8, 4), torch.nn.Embedding(8, 4)
    touched.install()
    joined = Joined(torch.optim.SGD([{"params": [table.weight]}]), collectives(), touched)
    for dummy in range(3):
        table(torch.arange(5)).sum().backward()
        other(torch.arange(5))
        joined.step(torch.zeros(1))
    # Ids of another optimizer's table are kept for it.
    assert list(touched.ids) == [other.weight]
