# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is written down of a session: what it was given (launch.json), and what became of it (session.json)."""

from __future__ import annotations

import hashlib
import os
from typing import Dict, List, Optional, TypedDict

LAUNCH = "launch.json"


def label_of(state_dir: str) -> str:
    """By what tmux tells for which folder a session runs: a session is known by it when it is started, and when it is after a reboot."""
    return hashlib.sha256(os.fsencode(os.path.abspath(state_dir))).hexdigest()[:16]


class Given(TypedDict):
    """What a start was given, with digests in the place of the environment's values."""

    argv: List[str]
    chdir: str
    env_file: Optional[str]
    log: str
    env: Dict[str, str]


class Launch(TypedDict, total=False):
    """What the last start was given, for its runner; empty where there was none."""

    id: str
    session: str
    script: str
    record: str
    log: str
    argv: List[str]
    boot_id: str
    stop_timeout: float
    given: Given


class Record(TypedDict, total=False):
    """A session from its start on; empty where there is none."""

    id: str
    session: str
    argv: List[str]
    boot_id: str
    pid: int
    pid_start: Optional[int]
    child_pid: Optional[int]
    log: str
    log_begin: int
    started: float
    ended: Optional[float]
    exit_code: Optional[int]
    signal: Optional[int]
    stopped: bool


class Status(Record, total=False):
    """The record, and what is found of it."""

    state: str
