# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Permanent lines, and a live line below them; and a program that is given the terminal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...module_utils._kit.printable import Stream, printable

COLUMNS = "NANOCHAT_DDP_COLUMNS"
TICK = 1.0  # redraw interval of the live line, so that time visibly passes
MARKS = {
    "done": ("✔", "ok"),
    "failed": ("✘", "FAILED"),
    "error": ("✘", "error"),
    "warning": ("!", "warning"),
    "info": ("·", "note"),
}


def width() -> int:
    """The terminal's width without the display's indentation, also in processes that have no terminal; 0 if there is none."""
    columns = os.environ.get(COLUMNS, "")
    return max(0, int(columns) - 2) if columns.isdigit() else 0


class Terminal:
    """Standard output, a terminal or not; written through Ansible's display, which keeps the log."""

    def __init__(self, display: Any) -> None:
        self.present = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        # With -e ddp_json=true the output is for programs: only what the playbook itself prints.
        self.quiet = False
        # Called instead of redrawing if there is no terminal.
        self.tick_without_terminal: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._display = display
        self._original = display.display
        self._live: Callable[[int], str] | None = None
        self._ticking: threading.Thread | None = None
        self._lock = threading.RLock()

    @property
    def fancy(self) -> bool:
        """Whether marks and bars beyond ASCII can be shown."""
        return self.present and "utf" in (sys.stdout.encoding or "").lower()

    @property
    def columns(self) -> int:
        """The width; 0 means no limit."""
        return shutil.get_terminal_size().columns if self.present else 0

    def mark(self, kind: str) -> str:
        """The mark before a line of this kind."""
        fancy, plain = MARKS[kind]
        return fancy if self.fancy else plain

    def say(self, text: str, color: str | None = None, stderr: bool = False, colored: bool = False) -> None:
        """Print permanent lines; `colored` if Ansible has coloured some of them."""
        self._print(printable(text, colored), color=color, stderr=stderr)

    def _print(self, *args: Any, **options: Any) -> None:
        """Print with the live line out of the way."""
        with self._lock:
            self._clear()
            self._original(*args, **options)
            sys.stdout.flush()
            self._redraw()

    def guard(self, takes: Callable[[str, str | None], bool]) -> None:
        """Keep other output (warnings, the text of a plan) clear of the live line.

        `takes` is offered each text with its colour and returns whether it has shown it.
        """

        def guarded(msg: str, *args: Any, **options: Any) -> None:
            if os.getpid() != self._pid:
                # In a worker, whose output comes to the main process.
                self._original(msg, *args, **options)
            elif args or options.get("stderr") or options.get("log_only") or not takes(msg, options.get("color")):
                self._print(printable(msg), *args, **options)

        self._display.display = guarded
        if self.present:
            # Tables are made in processes without the terminal.
            os.environ[COLUMNS] = str(self.columns)

    def _write(self, text: str) -> None:
        """Bytes to the terminal past everything that keeps a log.

        Past the locks of sys.stdout too: workers are forked while the ticking thread writes, and would inherit a lock that is held.
        """
        os.write(sys.stdout.fileno(), text.encode(sys.stdout.encoding or "ascii", "replace"))

    def _clear(self) -> None:
        if self._live:
            self._write("\r\x1b[K")

    def _redraw(self) -> None:
        if self._live:
            width = self.columns - 1
            self._write("\r\x1b[K" + printable(self._live(width))[:width])

    def show(self, live: Callable[[int], str]) -> None:
        """Show the live line, on a terminal only, in the current width."""
        if self.quiet:
            return
        if self.present:
            with self._lock:
                self._live = live
                self._redraw()
        if self._ticking is None:
            self._ticking = threading.Thread(target=self._tick, name="story", daemon=True)
            self._ticking.start()

    def hide(self) -> None:
        """Hide the live line for now."""
        with self._lock:
            self._clear()
            self._live = None

    def _tick(self) -> None:
        """Redraw the line; costs the hosts nothing."""
        while True:
            time.sleep(TICK)
            with self._lock:
                if self.present:
                    self._redraw()
                else:
                    self.tick_without_terminal()

    def leave(self) -> bool:
        """Restore the terminal; False in a worker, which has none."""
        if os.getpid() != self._pid:
            return False
        self.hide()
        return True


def hand_over(argv: Sequence[str], remote: bool) -> int:
    """Run a program in the terminal of the playbook, since tasks have none; Ctrl-C goes to it. A remote program's output is filtered."""
    sys.stdout.flush()
    shown = subprocess.PIPE if remote else 1
    # Not SIG_IGN, which child processes would inherit; a handler is not.
    before = signal.signal(signal.SIGINT, lambda *dummy: None)
    try:
        # Ansible keeps its own terminal descriptors from child processes.
        with subprocess.Popen(argv, stdin=0, stdout=shown, stderr=2) as program:
            if program.stdout:
                stream = Stream()
                while data := os.read(program.stdout.fileno(), 65536):
                    _write(stream.clean(data))
                _write(stream.clean(b"", final=True))
    finally:
        signal.signal(signal.SIGINT, before)
    return program.returncode


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
