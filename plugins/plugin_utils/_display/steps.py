# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The job's steps: the current one, its messages, and its line when it is over."""

from __future__ import annotations

import time
from typing import Any

from ansible import constants as C

from ...module_utils._kit.words import seconds_text, wrapped
from ...module_utils._run.live_line import whole_seconds
from .terminal import Terminal
from .texts import changes_word, counted_text, step_of, task_name

HEADING = "bright blue"  # legible on light and dark terminals
COMMANDS = ("ssh ", "tail ", "ansible-playbook ", "nft ")
LONG_TASK = (2.0, 60.0)  # seconds after which a task's time is shown on a terminal, and printed without one


class Steps:
    """One step after another."""

    def __init__(self, terminal: Terminal, checking: bool) -> None:
        self.current: str | None = None
        self.begun = 0.0
        self.failed = False
        self.worked = False
        self.shown = 0  # how many have printed their line
        self._terminal = terminal
        self._checking = checking
        self._has_output = False
        self._changed: dict[str, int] = {}
        self._task = ""
        self._task_begun = 0.0
        self._task_told = 0.0
        terminal.tick_without_terminal = self._say_long_task

    def enter(self, task: Any) -> None:
        """Enter the step of a starting task."""
        step = step_of(task)
        if step == self.current:
            return
        self.leave()
        self.current = step
        if step is not None:
            self.begun, self._has_output, self.failed = time.monotonic(), False, False
            self._changed, self.worked = {}, False

    def start_task(self, task: Any) -> None:
        """Show the current task on the live line."""
        self._task_begun, self._task = time.monotonic(), task_name(task)
        self._terminal.show(self._task_line)

    def forget_task(self) -> None:
        """Show something else on the live line."""
        self._task = ""

    def leave(self) -> None:
        """Print the step's own line."""
        if self.current is None:
            return
        step, self.current = self.current, None
        self._terminal.hide()
        if self._terminal.quiet or not (self.worked or self._has_output):
            return
        took = seconds_text(time.monotonic() - self.begun)
        changes = f"   {changes_word(self._checking)}: {counted_text(self._changed)}" if self._changed else ""
        line = f"{self._terminal.mark('failed' if self.failed else 'done')} {step:<10} {took:>8}{changes}"
        self._terminal.say(line, C.COLOR_ERROR if self.failed else C.COLOR_OK)
        self.shown += 1

    def count_change(self, host: str) -> None:
        """One more thing was changed on a host."""
        self._changed[host] = self._changed.get(host, 0) + 1

    def tell(self, text: str, color: str | None = None) -> None:
        """Print something below the step's name, in lines no longer than the terminal; commands to copy stay whole."""
        if self._terminal.quiet:
            self._terminal.say(text, color, stderr=color == C.COLOR_ERROR)
            return
        if self.current is not None and not self._has_output:
            self._has_output = True
            self._terminal.say(f"{'▸ ' if self._terminal.fancy else ''}{self.current}", HEADING)
        indent = "  " if self.current is not None else ""
        width = max(0, self._terminal.columns - len(indent))
        lines = [
            part
            for line in text.split("\n")
            for part in ([line] if line.lstrip().startswith(COMMANDS) else wrapped(line, width))
        ]
        self._terminal.say("\n".join(indent + line if line else "" for line in lines), color)

    def _task_line(self, width: int) -> str:
        """The current task and its age."""
        took = time.monotonic() - self._task_begun
        ticking = f"  {whole_seconds(took)}" if took >= LONG_TASK[0] else ""
        return f"  {self.current or '':<10} {self._task}"[: max(0, width - len(ticking))] + ticking

    def _say_long_task(self) -> None:
        """Without a terminal, a task that takes minutes prints a line once a minute."""
        now = time.monotonic()
        if self.current and self._task and now - max(self._task_begun, self._task_told) >= LONG_TASK[1]:
            self._task_told = now
            self.tell(f"{self._task}: {whole_seconds(now - self._task_begun)} so far")
