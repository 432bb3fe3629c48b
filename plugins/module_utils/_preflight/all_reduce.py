# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the trainer's all-reduce in the background: all ranks at the same time, even if Ansible handles few hosts at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from typing import Mapping

from .._kit.files import read_text

# The shell survives the program, to say how it ended.
SCRIPT = 'cd "$1" && shift && timeout "$@" >out 2>err; echo $? >ended.new; mv ended.new ended'


def start_all_reduce(
    python: str, trainer: str, timeout: float, seconds: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Start this host's rank; timeout: of each of its waits, seconds: of all. Its output goes to a temporary folder."""
    folder = tempfile.mkdtemp(prefix="nanochat-ddp-")
    program = [python, "-m", "scripts.gloo_check", "--timeout", str(timeout)]
    subprocess.Popen(  # pylint: disable=consider-using-with,ansible-bad-function
        ["/bin/sh", "-c", SCRIPT, "sh", folder, str(seconds), *program],
        env={**os.environ, **environ, "PYTHONPATH": trainer},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return {"folder": folder}


def end_all_reduce(folder: str, seconds: int) -> dict[str, object]:
    """Wait until it has ended, and return its output as the module command does."""
    over = time.monotonic() + seconds
    while not os.path.exists(os.path.join(folder, "ended")) and time.monotonic() < over:
        time.sleep(0.1)
    out, err, ended = (read_text(os.path.join(folder, name)) for name in ("out", "err", "ended"))
    shutil.rmtree(folder, ignore_errors=True)
    if not ended.strip():
        err = f"the all-reduce did not end within {seconds} s"
    return {"rc": int(ended.strip() or 124), "stdout": out, "stderr": err}
