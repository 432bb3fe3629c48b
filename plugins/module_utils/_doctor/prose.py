# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parses the cause of a death from messages of other trainers, torchrun and libraries.

This is the only place that parses sentences. Our trainer records the cause and the ranks at fault as data (deaths.py).
"""

from __future__ import annotations

import re

# Messages of libraries about a missing rank; their rank is not to blame.
ECHO = re.compile(
    r"did not (come|arrive)|(closed|reset) by peer|broken pipe|timed out|timeout|connectfullmesh|clients joined", re.I
)
# Error patterns and their codes, the most specific first.
WORDS = (
    (re.compile(r"no space left|disk (is )?full|not enough (disk )?space", re.I), "disk-full"),
    (re.compile(r"weights.*(differ|not identical|diverged)", re.I), "weights-differ"),
    (re.compile(r"settings? differ|differs? (between|across) (the )?ranks|disagree", re.I), "settings-differ"),
    (re.compile(r"EADDRINUSE|address already in use", re.I), "port-held"),
    (re.compile(r"out of memory|cannot allocate|can't allocate|MemoryError", re.I), "rank-oom"),
    (re.compile(r"checkpoint", re.I), "rank-failed"),
    (re.compile(r"parquet|\bshards?\b|row groups?|tokenizer|no documents|no data", re.I), "data-mismatch"),
)
KILLED = re.compile(r"exitcode\s*: -9|\bsignal 9\b|SIGKILL")


def code_of(text: str) -> str:
    """The code of an error."""
    return next((code for pattern, code in WORDS if pattern.search(text)), "rank-failed")


def is_echo(text: str) -> bool:
    """Whether an error only reports a missing rank."""
    return bool(ECHO.search(text)) and code_of(text) == "rank-failed"


def says_killed(text: str) -> bool:
    """Whether a keeper or torchrun reports that SIGKILL killed its rank."""
    return bool(KILLED.search(text))
