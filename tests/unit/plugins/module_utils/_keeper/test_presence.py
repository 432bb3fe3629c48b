# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a guest leaves and comes back; membership_world.py combines that with all other faults."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import presence
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.usage import Reading

RULES = m.Rules(("desktop", "laptop"), 1, 1.0, 1.0)
LIMITS: Any = {"hours": None, "battery_limit": 100, "away_if": None}
QUIET = Reading()
BATTERY = Reading(charge=64)


def after(readings: list[tuple[float, Reading]]) -> presence.GuestState:
    """The state of a guest after readings at these seconds."""
    guest = presence.GuestState()
    for now, reading in readings:
        guest = presence.look(LIMITS, guest, reading, now)
    return guest


@pytest.mark.parametrize(
    ("limits", "reading", "why"),
    [
        ({}, QUIET, []),
        ({}, BATTERY, ["on battery; back when plugged in"]),
        ({"battery_limit": 30}, BATTERY, []),
        ({"battery_limit": 0}, Reading(charge=0), []),
        ({}, Reading(users=("lzw", "eve")), ["used by lzw and eve; back when it is left alone"]),
        ({}, Reading(away_if=True), ["ddp_away_if says so; back when it does not"]),
        ({}, Reading(load=1.5), ["other programs use 1.5 cores; back below 0.25"]),
        ({"hours": "22:00-07:00"}, Reading(minute=12 * 60), ["outside of 22:00-07:00; back at 22:00"]),
    ],
)
def test_each_reason_says_when_it_ends(limits, reading, why):
    assert list(presence.reasons({**LIMITS, **limits}, reading, away=False).values()) == why


@pytest.mark.parametrize(
    ("hours", "inside"), [("22:00-07:00", (22, 23, *range(7))), ("08:00-10:00", (8, 9)), ("00:00-00:00", range(24))]
)
def test_hours_may_cross_midnight(hours, inside):
    assert {hour for hour in range(24) if presence.within(hours, 60 * hour)} == set(inside)


@pytest.mark.parametrize(("limits", "reading"), [({}, Reading(load=0.3)), ({"battery_limit": 60}, BATTERY)])
def test_to_come_back_takes_more_than_to_stay(limits, reading):
    found = [bool(presence.reasons({**LIMITS, **limits}, reading, away)) for away in (False, True)]
    assert found == [False, True]


def test_a_guest_leaves_at_once_and_comes_back_after_a_quiet_minute():
    assert after([(0.0, BATTERY)]).why == "on battery; back when plugged in"
    assert after([(0.0, BATTERY), (59.0, QUIET)]).why == "quiet again; back after a minute of it"
    assert after([(0.0, BATTERY), (61.0, QUIET)]).why == ""

    flapping = [(10.0 * n, (QUIET, BATTERY)[n % 2]) for n in range(1, 60)]
    assert all(after(flapping[:count]).why for count in range(1, 60))


def test_a_peak_of_load_is_no_reason_and_the_sentence_keeps_the_figure_of_the_moment_it_left():
    high, lower = Reading(load=2.0), Reading(load=0.9)
    assert after([(0.0, high), (5.0, high), (6.0, QUIET), (7.0, high), (16.0, high)]).why == ""
    assert after([(0.0, high), (10.0, high), (11.0, lower)]).why == "other programs use 2.0 cores; back below 0.25"


def test_who_lets_a_guest_in_by_hand_overrules_the_reason_as_long_as_it_lasts():
    guest = presence.let_in(after([(0.0, BATTERY)]))
    assert presence.look(LIMITS, guest, BATTERY, 1.0).why == ""
    assert presence.look(LIMITS, guest, BATTERY._replace(users=("eve",)), 1.0).why.startswith("used by eve")
    plugged = presence.look(LIMITS, presence.look(LIMITS, guest, BATTERY, 1.0), QUIET, 2.0)
    assert presence.look(LIMITS, plugged, BATTERY, 3.0).why.startswith("on battery")


MINE = m.Generation(2, ("desktop", "laptop"))


def test_a_guest_that_leaves_in_the_middle_of_a_start_is_not_waited_for():
    own = m.OwnState(m.KeeperState("desktop", m.TRAINING, generation=MINE, promised=2, last=MINE), since=0.0)
    public = m.KeeperState("laptop", m.RESTING, promised=2, last=m.Generation(1, MINE.members), why="used")
    own, order = m.decide(RULES, own, {"laptop": m.Received(public, 1.0, 0.0)}, 1.0)
    assert (own.public.state, own.public.why, order) == (m.ENDING, "laptop: used", m.SAVE)
