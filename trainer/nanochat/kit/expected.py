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


def anything(value: Any) -> bool:
    return True


def nothing(value: Any) -> bool:
    return value is None


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS


def count(most: int = MOST, least: int = 0) -> Fits:
    """An integer within bounds."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def matching(pattern: str) -> Fits:
    """A text that fully matches the pattern."""
    return lambda value: text(value) and re.fullmatch(pattern, value, re.ASCII) is not None


def one_of(values: Collection[str]) -> Fits:
    return lambda value: text(value) and value in values


def maybe(fits: Fits) -> Fits:
    """The format, or None."""
    return lambda value: value is None or fits(value)


def row(*each: Fits) -> Fits:
    """A list of exactly these formats."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(each)
        and all(fits(one) for fits, one in zip(each, value, strict=True))
    )


def listed(fits: Fits, most: int = MOST_ITEMS) -> Fits:
    """A list of any length."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(fits, value))


def named(fits: Fits, names: Collection[str] | None = None) -> Fits:
    """An object with these values, with any names or exactly the given ones."""

    def is_named(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and len(value) <= MOST_ITEMS
            and (all(map(text, value)) if names is None else value.keys() == set(names))
            and all(map(fits, value.values()))
        )

    return is_named
