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
# Maximum number of broken lines to report at once.
MOST_NAMED = 5


def problem(messages: Any) -> str:
    """Why this is not a valid conversation; empty if it is."""
    if not isinstance(messages, list) or not messages:
        return 'it must be a list of {"role": ..., "content": ...}'
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is not an object with role and content"
        if not isinstance(message.get("content"), str):
            return f"the content of message {number} is not text"
        if message.get("role") not in (*ROLES, "system"):
            return f"the role of message {number} is {message.get('role')!r}; it must be user, assistant or system"
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if any(role != ROLES[number % 2] for number, role in enumerate(turns)):
        return f"the roles are {', '.join(roles)}; user and assistant must take turns, the user first (after a system message)"
    return "" if len(turns) > 1 else "it has no answer by the assistant"


def parse(line: str) -> list[Message]:
    """Parse one line; raises ValueError with the reason."""
    try:
        messages = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Its own line is always the first; whoever reads the file names its line.
        raise ValueError(f"it is not JSON ({getattr(error, 'msg', error)})") from None
    wrong = problem(messages)
    if wrong:
        raise ValueError(wrong)
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
