# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the trainer's test programs on a host; one that all ranks run at the same time goes on in the background, even if Ansible
handles few hosts at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import Mapping, Sequence

from .._contract.document import Document
from .._kit import background, bare
from .._kit.files import read_object, write_json

NAME = "nanochat-gloo"
RESULT = "result.json"


def run_program(argv: Sequence[str], folder: str, environ: Mapping[str, str]) -> Document:
    """Run a program in a folder, and return its output as the module command does."""
    code, out, err = bare.run(argv, environ, folder)
    return {"rc": code, "stdout": out, "stderr": err}


def start_program(argv: Sequence[str], folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Start a program in a folder. Its output goes to a temporary folder."""
    result = tempfile.mkdtemp(prefix="nanochat-ddp-")
    background.spawn(NAME, [], lambda: write_json(os.path.join(result, RESULT), run_program(argv, folder, environ)))
    return {"folder": result}


def end_program(folder: str, seconds: int) -> Document:
    """Wait until it has ended, and return its output."""
    result, over = os.path.join(folder, RESULT), time.monotonic() + seconds
    while not os.path.exists(result) and time.monotonic() < over:
        time.sleep(0.1)
    found = read_object(result)
    shutil.rmtree(folder, ignore_errors=True)
    return found or {"rc": 124, "stdout": "", "stderr": f"it did not end within {seconds} s"}


def keep_measured(path: str, measured: Document) -> dict[str, bool]:
    """Keep the measurements for the next time."""
    write_json(path, measured)
    return {}
