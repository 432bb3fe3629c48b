# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands the terminal of a playbook run to a program, which no task can do: tasks have none."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence


def is_there() -> bool:
    """Whether a person can type."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextlib.contextmanager
def _interrupts_left_to_others() -> Iterator[None]:
    # Not SIG_IGN, which whatever is started would inherit; a handler is not.
    before = signal.signal(signal.SIGINT, lambda *dummy: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def hand_over(argv: Sequence[str]) -> int:
    """Run a program in the terminal to its end; Ctrl-C is its own affair."""
    sys.stdout.flush()
    with _interrupts_left_to_others():
        # Ansible keeps its own ends of the terminal from whatever it starts.
        return subprocess.call(argv, stdin=0, stdout=1, stderr=2)
