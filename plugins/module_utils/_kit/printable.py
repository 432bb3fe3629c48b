# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text for a terminal that somebody else wrote: a host, a log, a model. A terminal obeys some characters in place of showing them.

With them a text can write into the clipboard, rename the window, hide or rewrite lines, and turn the order of letters around.
"""

from __future__ import annotations

import codecs
import re
from typing import Pattern

# An operating system command and its like (to its end, if it has one), then any other escape sequence.
_STRING = "\x1b[\\]PX^_](?:[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c))?"
_SEQUENCE = re.compile(_STRING + "|\x1b\\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-Z\\\\^-~]")
_NONE = re.compile("(?!)")
_COLOR = re.compile("\x1b\\[[0-9;]*m")
# Control characters but tab and line feed; marks of direction and other signs without a shape; half characters.
_UNSEEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f"
)
_REMOVED = re.compile("[" + _UNSEEN + "]")
# What a program needs that edits a line: carriage return, backspace, bell; moving in the line, erasing, colours; pasting as one piece.
_EDITING = "\b\r\x07"
_EDITS = re.compile("\x1b\\[(?:[0-9;]*[ABCDGKPXm@]|[0-2]?J|\\?2004[hl])")
_LIVE_REMOVED = re.compile("(?![" + _EDITING + "])[" + _UNSEEN + "]")
_LONGEST_TAIL = 4096


def printable(text: str, colors: bool = False) -> str:
    """The text without anything that a terminal would obey; with `colors`, those of Ansible stay."""
    return _cleaned(text, _COLOR if colors else _NONE, _REMOVED)


def _cleaned(text: str, allowed: Pattern[str], removed: Pattern[str]) -> str:
    """The text with those sequences alone that are allowed."""
    shown, at = [], 0
    for found in _SEQUENCE.finditer(text):
        shown += [removed.sub("", text[at : found.start()]), found.group() if allowed.fullmatch(found.group()) else ""]
        at = found.end()
    return "".join([*shown, removed.sub("", text[at:])])


class Stream:
    """The bytes of a program in which a person types, as they come; what edits the line passes, all else is as in `printable`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = ""

    def clean(self, data: bytes, final: bool = False) -> bytes:
        """The bytes that can be shown now; an unfinished sequence is kept back."""
        text = self._tail + self._decoder.decode(data, final)
        cut = text.rfind("\x1b")
        is_open = cut >= 0 and not _is_whole(text[cut:]) and len(text) - cut < _LONGEST_TAIL
        text, self._tail = (text[:cut], text[cut:]) if is_open and not final else (text, "")
        return _cleaned(text, _EDITS, _LIVE_REMOVED).encode("utf-8")


def _is_whole(text: str) -> bool:
    """Whether a text that begins with an escape holds the end of that sequence."""
    if len(text) > 1 and text[1] in "]PX^_":
        return any(end in text for end in ("\x07", "\x9c"))
    return _SEQUENCE.match(text) is not None
