# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""JSON that is easy to read and to compare line by line: what fits into a line is one line."""

from __future__ import annotations

import json
from typing import Any

WIDTH = 150


def plain(value: Any) -> str:
    """JSON in one line; bytes that are not UTF-8 stay escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def dump(value: Any, indent: int = 0) -> str:
    """The value as text."""
    line = plain(value)
    if (indent and len(line) + indent <= WIDTH) or not isinstance(value, (dict, list)) or not value:
        return line
    inner = indent + 1
    if isinstance(value, dict):
        parts = [f"{plain(str(key))}: {dump(one, inner)}" for key, one in value.items()]
        begin, end = "{", "}"
    else:
        parts, begin, end = [dump(one, inner) for one in value], "[", "]"
    space = " " * inner
    return begin + "\n" + ",\n".join(space + part for part in parts) + "\n" + " " * indent + end
