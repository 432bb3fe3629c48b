# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Figures and tables as people read them."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import words

FIGURES = {
    words.bytes_text: {
        None: "-", 0: "0 B", 999: "999 B", 81_246: "81.2 kB", 2_500_000: "2.5 MB", 3e9: "3.0 GB", 4e12: "4.0 TB",
        99.9e6: "99.9 MB", 123.4e6: "123 MB",
    },
    words.seconds_text: {
        None: "-", 0.04: "0.0 s", 9.94: "9.9 s", 59: "59 s", 61: "1 min 01 s", 3600: "1 h 00 min", 2e5: "2 d 7 h",
    },
    words.speed_text: {None: "-", 99.96: "100.0", 1234.5: "1234"},
    words.share_text: {None: "-", 0.04: "4.0 %", 0.33: "33 %"},
    words.loss_text: {None: "-", 3.14159: "3.1416"},
}  # fmt: skip


@pytest.mark.parametrize("as_text", FIGURES, ids=lambda function: function.__name__)
def test_a_figure_has_as_many_digits_as_are_of_use(as_text):
    assert {figure: as_text(figure) for figure in FIGURES[as_text]} == FIGURES[as_text]


def test_what_ansible_says_before_the_reason_is_left_out():
    assert words.plain_reason("Task failed: Failed to connect to the host via ssh: no route") == "no route"
    broken = "mux_client_request_session: read from master failed: Broken pipe"
    assert (
        words.plain_reason(f"{broken}\r\nssh: connect to host h port 22: timed out")
        == "ssh: connect to host h port 22: timed out"
    )
    assert words.plain_reason(broken) == broken
    sending = 'Data could not be sent to remote host "10.0.0.2". Make sure this host can be reached over ssh: '
    assert words.plain_reason(sending) == "the connection broke"
    assert words.plain_reason(sending + "no route") == "no route"
    assert words.plain_reason("") == ""
