# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the trainer's all-reduce in the background: all ranks at the same time, even if Ansible handles few hosts at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import Any, Mapping

from .._kit import background, bare
from .._kit.files import read_object, write_json

NAME = "nanochat-gloo"
RESULT = "result.json"


def start_all_reduce(
    python: str, trainer: str, timeout: float, seconds: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Start this host's rank; timeout: of each of its waits, seconds: of all. Its output goes to a temporary folder."""
    folder = tempfile.mkdtemp(prefix="nanochat-ddp-")
    argv = ["timeout", str(seconds), python, "-m", "scripts.gloo_check", "--timeout", str(timeout)]

    def work() -> None:
        code, out, err = bare.run(argv, {**environ, "PYTHONPATH": trainer}, trainer)
        write_json(os.path.join(folder, RESULT), {"rc": code, "stdout": out, "stderr": err})

    background.spawn(NAME, [], work)
    return {"folder": folder}


def end_all_reduce(folder: str, seconds: int) -> Mapping[str, Any]:
    """Wait until it has ended, and return its output as the module command does."""
    result, over = os.path.join(folder, RESULT), time.monotonic() + seconds
    while not os.path.exists(result) and time.monotonic() < over:
        time.sleep(0.1)
    found = read_object(result)
    shutil.rmtree(folder, ignore_errors=True)
    return found or {"rc": 124, "stdout": "", "stderr": f"the all-reduce did not end within {seconds} s"}
