# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of a rank's log: its last lines, and the one with the error."""

from __future__ import annotations

import re
from typing import List, Optional

from .metrics import read_tail

LOG_BYTES = 64 * 1024


# "RuntimeError: ...", also after a rank's prefix; torchrun's summary of a failed child adds nothing.
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]:?\s*)*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_HOLLOW = ("ChildFailedError", "SignalException", "KeyboardInterrupt")
# torchrun ends the log with a box about the failed child, and lines of its logger.
_RULER = re.compile(r"^(={8,}|-{8,})$")
_AGENT = re.compile(r"^(?:\[[^\]]*\]:?\s*)*[EWI]\d{4} \S+ +\d+ torch/|^Traceback \(most recent call last\):|^\s")
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
    """The log line with the error; if there is none, the last line that is not torchrun's."""
    lines = _without_box(lines)
    for line in reversed(lines):
        match = _ERROR_LINE.match(line.strip())
        if match and not any(word in match.group(1) for word in _HOLLOW):
            return match.group(1)
    own = [line for line in lines if not _AGENT.match(line) and not any(word in line for word in _HOLLOW)]
    return own[-1].strip() if own else None


def _without_box(lines: List[str]) -> List[str]:
    """The lines without rulers and torchrun's box, which says FAILED below its first ruler and ends with another."""
    kept, inside = [], False
    for line, following in zip(lines, [*lines[1:], ""]):
        if _RULER.match(line.strip()):
            inside = (line.startswith("=") and following.rstrip().endswith(" FAILED")) or (
                inside and line.startswith("-")
            )
        elif not inside:
            kept.append(line)
    return kept
