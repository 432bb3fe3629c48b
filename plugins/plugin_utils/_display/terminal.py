# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lines that stay, and the one live line below them that is drawn again and again."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.printable import printable

TICK = 1.0  # the live line is redrawn this often, so that whoever waits sees that time goes by
MARKS = {
    "done": ("✔", "ok"),
    "failed": ("✘", "FAILED"),
    "error": ("✘", "error"),
    "warning": ("!", "warning"),
    "info": ("·", "note"),
}


class Terminal:
    """Standard output, whether that is a terminal or not; written to through Ansible's display, which keeps the log."""

    def __init__(self, display: Any) -> None:
        self.present = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        # With -e ddp_json=true the output is for programs: nothing but what the playbook itself prints.
        self.quiet = False
        # What is called in place of redrawing where there is no terminal.
        self.without: Callable[[], None] = lambda: None
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

    def mark(self, kind: str) -> str:
        """The sign in front of a line of this kind."""
        fancy, plain = MARKS[kind]
        return fancy if self.fancy else plain

    def say(self, text: str, color: str | None = None, stderr: bool = False, colored: bool = False) -> None:
        """Lines that stay; `colored` where Ansible has coloured some of them."""
        self._print(printable(text, colored), color=color, stderr=stderr)

    def _print(self, *args: Any, **options: Any) -> None:
        """With the live line out of the way."""
        with self._lock:
            self._clear()
            self._original(*args, **options)
            sys.stdout.flush()
            self._redraw()

    def guard(self, takes: Callable[[str, str | None], bool]) -> None:
        """Let everything that others print (warnings, the text of a plan) keep clear of the live line.

        `takes` is offered each text with its colour and returns whether it has shown it.
        """

        def guarded(msg: str, *args: Any, **options: Any) -> None:
            if os.getpid() != self._pid:
                # A worker; what it prints comes to the main process.
                self._original(msg, *args, **options)
            elif args or options.get("stderr") or options.get("log_only") or not takes(msg, options.get("color")):
                self._print(printable(msg), *args, **options)

        self._display.display = guarded
        if self.present:
            # Tables are made in processes that no longer see the terminal.
            os.environ["NANOCHAT_DDP_COLUMNS"] = str(shutil.get_terminal_size().columns)

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
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + printable(self._live(width))[:width])

    def show(self, live: Callable[[int], str]) -> None:
        """The one line that is drawn over and over; on a terminal only. It is made for the width that there is."""
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
        """No live line for now."""
        with self._lock:
            self._clear()
            self._live = None

    def _tick(self) -> None:
        """Draw the line again and again; it costs the hosts nothing."""
        while True:
            time.sleep(TICK)
            with self._lock:
                if self.present:
                    self._redraw()
                else:
                    self.without()

    def leave(self) -> bool:
        """Leave the terminal in order; False in a worker, which has none."""
        if os.getpid() != self._pid:
            return False
        if self._live:
            self._write("\n")
            self._live = None
        return True
