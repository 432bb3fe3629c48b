# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of a pause, from what a keeper and its rank have seen."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import keeper_states as states
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import pause

START = {"time": 107.0, "opening": {"began": 104.0, "met": 104.5}}


def test_each_part_lasts_from_the_end_of_the_one_before() -> None:
    one = pause.Pause()
    one.change(states.TRAINING, None, 50.0)
    one.change(states.ENDING, 100.0, 101.0)
    one.change(states.IDLE, 100.0, 102.0)
    one.change(states.OFFERED, 100.0, 103.0)
    one.change(states.TRAINING, 100.0, 103.5)
    parts = one.over(START, {"time": 108.0})
    assert parts == {"notice": 1.0, "end": 1.0, "agree": 1.5, "process": 0.5, "meet": 0.5, "load": 2.5, "step": 1.0}
    assert pause.in_words(parts).startswith("8.0 s without a step: notice 1.0, end 1.0")
    assert one.over(START, {"time": 109.0}) == {}


def test_a_first_start_is_no_pause() -> None:
    one = pause.Pause()
    one.change(states.OFFERED, None, 102.0)
    one.change(states.TRAINING, None, 103.0)
    assert one.over(START, {"time": 108.0}) == {}
