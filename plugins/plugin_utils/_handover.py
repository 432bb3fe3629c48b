# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands the terminal of a playbook run to a program, because tasks have no terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from ..module_utils._kit.printable import Stream


def is_there() -> bool:
    """Whether there is an interactive terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def hand_over(argv: Sequence[str], remote: bool) -> int:
    """Run a program in the terminal; Ctrl-C goes to it. A remote program's output is filtered."""
    sys.stdout.flush()
    shown = subprocess.PIPE if remote else 1
    # Not SIG_IGN, which child processes would inherit; a handler is not.
    before = signal.signal(signal.SIGINT, lambda *dummy: None)
    try:
        # Ansible keeps its own terminal descriptors from child processes.
        with subprocess.Popen(argv, stdin=0, stdout=shown, stderr=2) as program:
            if program.stdout:
                _show(program.stdout)
    finally:
        signal.signal(signal.SIGINT, before)
    return program.returncode


def _show(output: IO[bytes]) -> None:
    """Print output as it comes, filtered."""
    stream = Stream()
    while data := os.read(output.fileno(), 65536):
        _write(stream.clean(data))
    _write(stream.clean(b"", final=True))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
