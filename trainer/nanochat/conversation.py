# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations: lists of {"role": ..., "content": ...}, their tokens, and which of these are the assistant's to say.

A user's message stands between <|user_start|> and <|user_end|>, an assistant's between <|assistant_start|> and
<|assistant_end|>; a system message in front joins the first one of the user.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanochat.common import DataError
from nanochat.tokenizer import Tokenizer

Message = dict[str, str]
ROLES = ("user", "assistant")
# So many broken lines are named at once.
MOST_NAMED = 5


def problem(messages: Any) -> str:
    """What is wrong with something that is to be a conversation; empty where nothing is."""
    if not isinstance(messages, list) or not messages:
        return 'it must be a list of {"role": ..., "content": ...}'
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is no object with role and content"
        if not isinstance(message.get("content"), str):
            return f"the content of message {number} is no text"
        if message.get("role") not in (*ROLES, "system"):
            return f"the role of message {number} is {message.get('role')!r}; user, assistant or system is known"
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if any(role != ROLES[number % 2] for number, role in enumerate(turns)):
        return f"the roles are {', '.join(roles)}; user and assistant must take turns, the user first (after a system message)"
    return "" if len(turns) > 1 else "the assistant says nothing in it"


def parse(line: str) -> list[Message]:
    """One line of a file; raises ValueError with what is wrong."""
    try:
        messages = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    wrong = problem(messages)
    if wrong:
        raise ValueError(wrong)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def read(path: Path) -> list[list[Message]]:
    """The conversations of a file of JSON lines; a broken one is an error that names the file and the line."""
    found, wrong = [], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the conversations of {path}: {error}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(parse(line))
            except ValueError as error:
                wrong.append(f"{path}, line {number}: {error}")
    if wrong:
        more = f"; and {len(wrong) - MOST_NAMED} more broken lines" if len(wrong) > MOST_NAMED else ""
        raise DataError("; ".join(wrong[:MOST_NAMED]) + more + ".")
    if not found:
        raise DataError(f"{path} holds no conversations; each line is a list of role and content.")
    return found


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation from <|bos|> on, and for each whether the assistant is to learn to say it."""
    ids, said = [tokenizer.bos], [False]
    for message in merged(messages):
        role, content = message["role"], tokenizer.encode(message["content"])
        is_assistant = role == "assistant"
        ids += [tokenizer.special(f"<|{role}_start|>"), *content, tokenizer.special(f"<|{role}_end|>")]
        said += [False, *[is_assistant] * (len(content) + 1)]
    return ids, said


def merged(messages: Sequence[Message]) -> list[Message]:
    """With a system message in front of the first one of the user."""
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        return [{**messages[1], "content": text}, *messages[2:]]
    return list(messages)


def to_answer(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens after which the assistant is to speak."""
    return [*render(tokenizer, messages)[0], tokenizer.special("<|assistant_start|>")]
