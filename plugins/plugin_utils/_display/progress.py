# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The run's progress: a live line, or without a terminal a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ...module_utils._run.health import Seen
from ...module_utils._run.live_line import live_line, regrouped
from .steps import Steps
from .terminal import Terminal

QUIET_SECONDS = (2.0, 60.0)  # interval of progress lines without a terminal, at first and in a long run


class Watched(NamedTuple):
    """A watched host, with times by this machine's clock."""

    seen: Seen
    first: float  # when watching it began
    looked: float  # when it answered last


def run_line(seen: Collection[Seen], width: int = 0, fancy: bool = True) -> str:
    """The run's position in the available width; without a width all of it."""
    away = sorted(one.host for one in seen if one.silent)
    tail = f"  ({', '.join(away)} does not answer)" if away else ""
    room = max(20, width - len(tail)) if width else 0
    return live_line(list(seen), room, unicode=fancy) + tail


def is_due(line: str, before: str, since: float, begun: float) -> bool:
    """Whether to print a permanent line: it is news, and the last one was a while ago."""
    now = time.monotonic()
    return line != before and now - since >= min(QUIET_SECONDS[1], max(QUIET_SECONDS[0], (now - begun) / 10))


class RunProgress:
    """The last result of run_watch of each host."""

    def __init__(self, terminal: Terminal, steps: Steps) -> None:
        self.rows: dict[str, Watched] = {}
        self._terminal = terminal
        self._steps = steps
        self._line = ("", 0.0)
        self._generation = 1  # the first one is no news

    @property
    def unfinished(self) -> bool:
        """Whether a watched run has no verdict yet."""
        return any(row.seen.verdict is None for row in self.rows.values())

    def take(self, host: str, seen: Mapping[str, Any], final: bool) -> None:
        """Add a result of run_watch."""
        if "over" not in seen or not isinstance(seen.get("run"), Mapping):
            return
        now, silent = time.monotonic(), math.inf if seen.get("reachable") is False else 0.0
        first = self.rows[host].first if host in self.rows else now
        self.rows[host] = Watched(Seen(host, seen["run"], silent=silent, verdict=seen.get("verdict")), first, now)
        self._show(final and bool(seen.get("verdict")))

    def _show(self, ended: bool) -> None:
        self._steps.forget_task()
        self._generation, news = regrouped([row.seen for row in self.rows.values()], self._generation)
        if news:
            self._steps.tell(news)
        if self._terminal.quiet:
            return
        if ended:
            self._terminal.hide()
        else:
            self._terminal.show(self._run_line)
        if not self._terminal.present:
            self._print_if_due(self._run_line(0).strip())

    def _run_line(self, width: int) -> str:
        """Below its step, and in what is left of a terminal's line."""
        now = time.monotonic()
        rows = [row.seen._replace(age=now - row.first, looked=now - row.looked) for row in self.rows.values()]
        return "  " + run_line(rows, max(1, width - 2) if width else 0, self._terminal.fancy)

    def _print_if_due(self, line: str) -> None:
        """Without a terminal, a line now and then."""
        before, at = self._line
        if is_due(line, before, at, self._steps.begun):
            self._line = (line, time.monotonic())
            self._steps.tell(line)
