# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cleans untrusted text (from a host, a log, a model) for a terminal, which would obey some of its characters.

They can write to the clipboard, rename the window, hide or rewrite lines, and reverse the order of letters.
"""

from __future__ import annotations

import codecs
import re
from typing import Pattern

# Operating system commands and the like (to their end, if any), then any other escape sequence.
_STRING = "\x1b[\\]PX^_](?:[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c))?"
_SEQUENCE = re.compile(_STRING + "|\x1b\\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-Z\\\\^-~]")
_NONE = re.compile("(?!)")
_COLOR = re.compile("\x1b\\[[0-9;]*m")
# Control characters except tab and line feed; direction marks and other invisible characters; lone surrogates.
_UNSEEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f"
)
_REMOVED = re.compile("[" + _UNSEEN + "]")
# Sequences of a program that edits lines: carriage return, backspace, bell; cursor moves, erasing, colours; bracketed paste.
_EDITING = "\b\r\x07"
_EDITS = re.compile("\x1b\\[(?:[0-9;]*[ABCDGKPXm@]|[0-2]?J|\\?2004[hl])")
_LIVE_REMOVED = re.compile("(?![" + _EDITING + "])[" + _UNSEEN + "]")
_LONGEST_TAIL = 4096


def printable(text: str, colors: bool = False) -> str:
    """The text without anything that a terminal would obey; `colors` keeps Ansible's."""
    return _cleaned(text, _COLOR if colors else _NONE, _REMOVED)


def _cleaned(text: str, allowed: Pattern[str], removed: Pattern[str]) -> str:
    """The text with only the allowed sequences."""
    shown, at = [], 0
    for found in _SEQUENCE.finditer(text):
        shown += [removed.sub("", text[at : found.start()]), found.group() if allowed.fullmatch(found.group()) else ""]
        at = found.end()
    return "".join([*shown, removed.sub("", text[at:])])


class Stream:
    """Filters the output of an interactive program as it arrives; keeps line editing, otherwise like `printable`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = ""

    def clean(self, data: bytes, final: bool = False) -> bytes:
        """The bytes that can be shown now; an incomplete sequence is held back."""
        text = self._tail + self._decoder.decode(data, final)
        cut = text.rfind("\x1b")
        is_open = cut >= 0 and not _is_whole(text[cut:]) and len(text) - cut < _LONGEST_TAIL
        text, self._tail = (text[:cut], text[cut:]) if is_open and not final else (text, "")
        return _cleaned(text, _EDITS, _LIVE_REMOVED).encode("utf-8")


def _is_whole(text: str) -> bool:
    """Whether a text that starts with an escape contains the end of that sequence."""
    if len(text) > 1 and text[1] in "]PX^_":
        return any(end in text for end in ("\x07", "\x9c"))
    return _SEQUENCE.match(text) is not None
