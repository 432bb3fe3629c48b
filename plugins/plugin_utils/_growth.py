# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Says how much has arrived while a module moves much data.

A module says nothing before it ends. So the action that runs it looks now and then, over the same connection, how far a folder
on the host has grown, and tells the display of this collection, which shows it beside the seconds. Nothing depends on it: whatever
goes wrong ends the looking.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import shlex
import threading
from typing import Any

from ansible.plugins.action.normal import ActionModule as NormalAction
from ansible.utils.display import Display
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import bytes_text

# What the display takes for itself; other displays only write it to their log.
MARK = "nanochat.ddp progress"
MARKED = re.compile(rf"{MARK} (\S+) (.+)")
FIRST_SECONDS = 3.0
EVERY_SECONDS = 5.0


def growth_text(size: int, total: int) -> str:
    """How much is there, and of how much if that is known."""
    if not total:
        return bytes_text(size)
    return f"{bytes_text(min(size, total))} of {bytes_text(total)} ({min(99, 100 * size // total)} %)"


class GrowingAction(NormalAction):
    """Ansible's own way to run a module, with an eye on what grows meanwhile."""

    def growing(self) -> tuple[list[str], int]:
        """Shell words for the folders that grow, and the bytes that they will hold in the end, 0 if nobody knows."""
        return [], 0

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module, watched."""
        words, total = self.growing()
        over = threading.Event()
        if words and self._connection.transport in ("ssh", "local") and not self._task.check_mode:
            host = str((task_vars or {}).get("inventory_hostname"))
            context = contextvars.copy_context()
            watching = threading.Thread(target=context.run, args=(self._watch, words, total, host, over), daemon=True)
            watching.start()
        try:
            result: dict[str, Any] = super().run(tmp, task_vars)
        finally:
            over.set()
        return result

    def _watch(self, words: list[str], total: int, host: str, over: threading.Event) -> None:
        # An error here is nobody's concern.
        with contextlib.suppress(Exception):
            pause = FIRST_SECONDS
            while not over.wait(pause):
                pause = EVERY_SECONDS
                answer = self._low_level_execute_command(f"du -skc {' '.join(words)} 2>/dev/null | tail -n 1; true")
                found = re.search(r"^(\d+)\s+\S+", str(answer.get("stdout") or ""), re.M)
                if found and int(found[1]) and not over.is_set():
                    Display().display(f"{MARK} {host} {growth_text(1024 * int(found[1]), total)}", log_only=True)


def quoted(path: str) -> str:
    """A path as a shell word, the home folder that of the host."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)
