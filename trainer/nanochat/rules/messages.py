# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversation files: each line is a list of {"role": ..., "content": ...}.

Standard library only, so that a file can be checked without a trainer.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any, Dict, Sequence

Message = Dict[str, str]
ROLES = ("user", "assistant")
WRONG = 'it must be a list of {"role": ..., "content": ...} in which user and assistant take turns, the user first (after a system message)'
# Maximum number of broken lines to report at once.
MOST_NAMED = 5


def parse(line: str) -> list[Message]:
    """Parse one line; raises ValueError with the reason."""
    try:
        messages: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Its own line is always the first; whoever reads the file names its line.
        raise ValueError(f"it is not JSON ({getattr(error, 'msg', error)})") from None
    listed = messages if isinstance(messages, list) else []
    roles = [
        one.get("role") if isinstance(one, dict) and isinstance(one.get("content"), str) else None for one in listed
    ]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) < 2 or any(role != ROLES[number % 2] for number, role in enumerate(turns)):
        raise ValueError(f"{WRONG}; its roles are {', '.join(map(str, roles)) or 'none'}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def scan(path: Path) -> tuple[array[int], list[str]]:
    """Byte offset of each conversation, and the errors by line; raises OSError if the file is unreadable."""
    found, wrong, at = array("q"), [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    parse(line.decode())
                    found.append(at)
                except ValueError as error:
                    wrong.append(f"{path}, line {number}: {error}")
            at += len(line)
    if not found and not wrong:
        wrong.append(f"{path} has no conversations; each line is a JSON list of role and content")
    return found, wrong


def summary(wrong: Sequence[str]) -> str:
    """The first few errors."""
    more = f"; and {len(wrong) - MOST_NAMED} more broken lines" if len(wrong) > MOST_NAMED else ""
    return "; ".join(wrong[:MOST_NAMED]) + more
