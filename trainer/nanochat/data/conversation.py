# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations: lists of {"role": ..., "content": ...}, their tokens, and which of them are the assistant's.

A user message is enclosed in <|user_start|> and <|user_end|>, an assistant's in <|assistant_start|> and
<|assistant_end|>; an initial system message is prepended to the first user message.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError
from nanochat.rules.messages import Message, parse, scan, summary


def offsets(path: Path) -> array[int]:
    """Offsets of the conversations in a JSON lines file; an invalid line raises an error with file and line."""
    try:
        found, wrong = scan(path)
    except OSError as error:
        raise DataError(f"cannot read the conversations of {path}: {error.strerror or error}.") from None
    if wrong:
        raise DataError(f"{summary(wrong)}.")
    return found


def read_at(path: Path, offset: int) -> list[Message]:
    """The conversation at an offset."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return parse(file.readline().decode())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} changed while it was being read: {error}; start again.") from None


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation from <|bos|> on, and for each whether it is a target."""
    ids, said = [tokenizer.bos], [False]
    for message in merged(messages):
        role, content = message["role"], tokenizer.encode(message["content"])
        is_assistant = role == "assistant"
        ids += [tokenizer.special(f"<|{role}_start|>"), *content, tokenizer.special(f"<|{role}_end|>")]
        said += [False, *[is_assistant] * (len(content) + 1)]
    return ids, said


def merged(messages: Sequence[Message]) -> list[Message]:
    """Prepend the system message to the first user message."""
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        return [{**messages[1], "content": text}, *messages[2:]]
    return list(messages)


def to_answer(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens after which the assistant answers."""
    return [*render(tokenizer, messages)[0], tokenizer.special("<|assistant_start|>")]
