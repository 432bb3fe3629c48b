# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The records of a session: how it was started (launch.json), and what became of it (session.json)."""

from __future__ import annotations

import hashlib
import os
from typing import Dict, List, Mapping, Optional, Tuple, TypedDict, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document, section, words
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object

LAUNCH = "launch.json"
# The exit code (EX_TEMPFAIL) of a job that has not come to its end and wants to be started again.
COME_BACK = os.EX_TEMPFAIL
TEXT, WHOLE, TIME = (str,), (int,), (int, float)
LARGEST = 2**63
# What the fields that we use may hold.
KINDS: Mapping[str, Tuple[type, ...]] = {
    **dict.fromkeys(("id", "session", "script", "record", "boot_id", "log", "terminated_by", "died_of"), TEXT),
    **dict.fromkeys(("pid", "pid_start", "child_pid", "log_begin", "exit_code", "signal", "revived"), WHOLE),
    **dict.fromkeys(("started", "ended", "stop_timeout", "died"), TIME),
}


def label_of(state_dir: str) -> str:
    """By what tmux tells for which folder a session runs: a session is known by it when it is started, and when it is after a reboot."""
    return hashlib.sha256(os.fsencode(os.path.abspath(state_dir))).hexdigest()[:16]


class Given(TypedDict):
    """Arguments of a start, with digests in place of the environment's values."""

    argv: List[str]
    chdir: str
    env_file: Optional[str]
    log: str
    env: Dict[str, str]


class Launch(TypedDict, total=False):
    """Arguments of the last start, for its runner; empty where there was none."""

    id: str
    session: str
    script: str
    record: str
    log: str
    argv: List[str]
    boot_id: str
    stop_timeout: float
    revive: bool  # start it again when it dies
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
    stopped: bool  # by a user
    terminated_by: Optional[str]  # the signal by which the host ended it
    revived: int  # how often it was started again
    died: Optional[float]  # when it last died
    died_of: Optional[str]


class Status(Record, total=False):
    """The record, and what is found of it."""

    state: str


def launch_in(path: str) -> Launch:
    """Read the arguments of the last start; invalid fields are left out, and everything if there is no id."""
    found = _fitting(read_object(path))
    given = section(found, "given")
    texts = [given.get("chdir"), given.get("log"), *section(given, "env").values(), *words(given, "argv")]
    if (
        not all(isinstance(text, str) for text in texts)
        or not isinstance(given.get("env"), dict)
        or not given.get("argv")
    ):
        found.pop("given", None)
    return cast(Launch, found if found.get("id") else {})


def cut_short(exit_code: Optional[int]) -> bool:
    """Whether a job that has ended was killed (it has no exit code) or wants to come back."""
    return exit_code in (None, COME_BACK)


def record_in(path: str) -> Record:
    """Read the record of a session; invalid fields are left out."""
    return cast(Record, _fitting(read_object(path)))


def _fitting(found: Document) -> Document:
    """The fields that hold what they may; somebody may have edited the file, or written over it."""
    return {
        name: value for name, value in found.items() if name not in KINDS or value is None or _fits(value, KINDS[name])
    }


def _fits(value: object, kinds: Tuple[type, ...]) -> bool:
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    return not isinstance(value, int) or abs(value) < LARGEST
