# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of a rank's log: its last lines, and the one with the error."""

from __future__ import annotations

import re
from typing import List, Optional

from .metrics import read_tail

LOG_BYTES = 64 * 1024


# "RuntimeError: ...", also after a rank's prefix.
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]:?\s*)*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_lines(path: str, count: int) -> List[str]:
    """The last lines of a log, without terminal codes."""
    lines = plain_lines(read_tail(path, LOG_BYTES))
    return lines[-count:] if count else []


def plain_lines(data: bytes) -> List[str]:
    """The lines of a log as a terminal finally shows them, without codes and empty lines."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in data.decode("utf-8", "replace").split("\n"))
    return [plain for plain in (_ANSI.sub("", line).rstrip() for line in lines) if plain]


def error_line(lines: List[str]) -> Optional[str]:
    """The log line with the error; if there is none, the last line."""
    errors = (match.group(1) for match in map(_ERROR_LINE.match, map(str.strip, reversed(lines))) if match)
    return next(errors, lines[-1].strip() if lines else None)
