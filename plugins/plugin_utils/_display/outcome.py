# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What came of a task on a host, the same whichever ansible-core reports it: until 2.18 its parts had private names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """The parts by the names that they have since ansible-core 2.19."""

    task: Any
    host: Any
    result: dict[str, object]


def with_outcome(report: Callable[..., None]) -> Callable[..., None]:
    """Hand a method of the display an outcome of any ansible-core."""

    @functools.wraps(report)
    def plain(display: Any, result: Any, *words: Any, **named: Any) -> None:
        if not hasattr(result, "task"):
            result = Outcome(result._task, result._host, result._result)
        report(display, result, *words, **named)

    return plain
