# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A hostile text on its way to a terminal."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.printable import Stream, printable

HOSTILE = [
    ("\x1b]52;c;ZXZpbA==\x07", ""),  # the clipboard
    ("\x1b]0;title\x1b\\", ""),  # the window's title
    ("\x1bP+q544e\x1b\\x", "x"),  # a question that the terminal answers
    ("\x1b[2J\x1b[1;1Hall is well", "all is well"),  # the screen rewritten
    ("\x1bc", ""),  # a reset
    ("\x9b2J\x9d0;t\x9c", "2J0;t"),  # the same by single characters of eight bits
    ("loss 9\rloss 1", "loss 9loss 1"),  # a line written over
    ("\u202eabc\u2066\u200f", "abc"),  # letters in another order
    ("a\x00b\x08\x7f\x1b", "ab"),
    ("half \ud800", "half "),
]
PLAIN = ["step 3\tloss 8.3\n", "größer 漢字 👍 ✔ ▸", "[INFO] a[0;1m] \\x1b[31m"]


@pytest.mark.parametrize(("text", "shown"), [*HOSTILE, *zip(PLAIN, PLAIN)])
def test_nothing_is_left_that_a_terminal_obeys(text, shown):
    assert printable(text) == shown


def test_the_colours_of_a_difference_may_stay():
    assert printable("\x1b[0;32m+a\x1b[0m\x1b[2J\x1b]0;t\x07\u202e", colors=True) == "\x1b[0;32m+a\x1b[0m"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("> hi\r\n\x1b[K\x08\x1b[C\x1b[?2004hä\x07", "> hi\r\n\x1b[K\x08\x1b[C\x1b[?2004hä\x07"),
        ("a\x1b]52;c;ZXZpbA==\x07b\x1b[6n\x1b[?1049hc\u202ed", "abcd"),
        ("a\x1b", "a"),
    ],
)
def test_a_program_in_which_somebody_types_may_edit_its_line_only(sent, shown, size):
    stream, data = Stream(), sent.encode()
    pieces = [stream.clean(data[at : at + size]) for at in range(0, len(data), size)]
    assert b"".join([*pieces, stream.clean(b"", final=True)]).decode() == shown


def test_a_sequence_is_kept_back_until_it_is_whole_and_not_for_ever():
    stream = Stream()
    assert stream.clean(b"> \x1b[C") == b"> \x1b[C"
    assert (stream.clean(b"\x1b["), stream.clean(b"K")) == (b"", b"\x1b[K")
    shown = b"".join(stream.clean(b"\x1b]0;" + b"x" * 3000) for dummy in range(3))
    assert len(shown) > 3000 and b"\x1b" not in shown
