# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks the format of messages between ranks before use. Without torch.

    comm.exchange("the steps of all checkpoints", steps, fits=listed(count()))

A compromised rank can spoil the training, but must not reach another host's files or memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

Fits = Callable[[Any], bool]
# Far beyond valid messages: files, ranks, matrices or shards, characters of a text, and numbers.
MOST_ITEMS, MOST_CHARACTERS, MOST = 100_000, 4096, 2**53


def anything(told: Any) -> bool:
    return True


def nothing(told: Any) -> bool:
    return told is None


def flag(told: Any) -> bool:
    return isinstance(told, bool)


def number(told: Any) -> bool:
    return isinstance(told, (int, float)) and not isinstance(told, bool)


def text(told: Any) -> bool:
    return isinstance(told, str) and len(told) <= MOST_CHARACTERS


def count(most: int = MOST, least: int = 0) -> Fits:
    """An integer within bounds."""
    return lambda told: isinstance(told, int) and not isinstance(told, bool) and least <= told <= most


def matching(pattern: str) -> Fits:
    """A text that fully matches the pattern."""
    return lambda told: text(told) and re.fullmatch(pattern, told, re.ASCII) is not None


def one_of(values: Collection[str]) -> Fits:
    return lambda told: text(told) and told in values


def maybe(fits: Fits) -> Fits:
    """The format, or None."""
    return lambda told: told is None or fits(told)


def row(*each: Fits) -> Fits:
    """A list of exactly these formats."""
    return lambda told: (
        isinstance(told, list) and len(told) == len(each) and all(f(t) for f, t in zip(each, told, strict=True))
    )


def listed(fits: Fits, most: int = MOST_ITEMS) -> Fits:
    """A list of any length."""
    return lambda told: isinstance(told, list) and len(told) <= most and all(map(fits, told))


def named(fits: Fits, names: Collection[str] | None = None) -> Fits:
    """An object with these values, with any names or exactly the given ones."""

    def is_named(told: Any) -> bool:
        return (
            isinstance(told, dict)
            and len(told) <= MOST_ITEMS
            and (all(map(text, told)) if names is None else told.keys() == set(names))
            and all(map(fits, told.values()))
        )

    return is_named
