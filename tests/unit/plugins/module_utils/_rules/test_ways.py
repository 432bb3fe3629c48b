# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bytes of the ways of --sync, and when the head is shared out."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._rules import ways


def test_what_rounds_more_sends_less() -> None:
    sizes = [way.value_bytes for way in ways.WAYS.values()]
    assert sizes == sorted(sizes, reverse=True) == [4.0, 2.0, 1 + 1 / 64, 0.5 + 1 / 64]


def test_what_was_asked_for_counts_where_it_can_be_had() -> None:
    assert ways.choose_head("shared", 32768, 512, [262144, 262144], "exact") == "shared"
    assert ways.choose_head("whole", 32768, 512, [1024, 1024], "exact") == "whole"
    assert ways.choose_head("shared", 32768, 512, [1024], "exact") == "whole"
