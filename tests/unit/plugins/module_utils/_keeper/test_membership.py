# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who trains, who goes on without whom, and who gives way."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._keeper import membership_world

# ./test.sh unit tries ten thousand.
SCHEDULES = int(os.environ.get("SCHEDULES", "2000"))
RULES = m.Rules(("desktop", "laptop"), least=1, grace=10, first_grace=60)
THREE = m.Rules(("a", "b", "c"), least=2, grace=10, first_grace=60)


def heard(now, *words):
    return {word.host: m.Heard(word, now, now - 100) for word in words}


def trains(rules, host, members, number=2, now=100.0, **word):
    own = m.Own(m.Word(host), returned=False)
    mine = m.Generation(number, members)
    own = own._replace(word=own.word._replace(promised=number, generation=mine), since=now)
    own = m._started(own, mine, now)
    return own._replace(word=own.word._replace(**word))


@pytest.mark.parametrize("part", range(10))
def test_random_schedules(part):
    """Losses, delays, cuts in one direction, clocks that jump, keepers that die: what must hold is asserted every second."""
    count = SCHEDULES // 10
    events, waits = membership_world.prove(part * count, count)
    assert len(waits) == count
    # The schedules do make what they are to withstand.
    for name in ("rank died", "keeper died", "host froze", "link cut", "split", "clock jumped", "ended to let in"):
        assert events[name] > count / 20, name
    assert events["steps"] > 10 * count


@pytest.mark.parametrize(
    ("hosts", "least", "members", "answer"),
    [
        ("ab", 2, "ab", True),
        ("ab", 2, "a", False),
        ("ab", 1, "a", True),
        ("ab", 1, "b", True),
        ("abc", 2, "bc", True),
        ("abc", 2, "a", False),
        ("abcd", 3, "bcd", True),
        ("abcd", 2, "cd", True),
        ("abcde", 3, "ab", False),
        ("abcde", 2, "ab", True),
        ("abcd", 3, "ab", False),
    ],
)
def test_who_may_go_on(hosts, least, members, answer):
    rules = m.Rules(tuple(hosts), least, 10, 60)
    assert m.may_train(rules, tuple(members)) is answer


def test_half_with_the_first_host_goes_on_and_the_other_half_does_not():
    rules = m.Rules(tuple("abcdef"), 4, 10, 60)
    assert not m.may_train(rules, tuple("abc"))  # fewer than ddp_min_hosts
    rules = rules._replace(least=3)
    # At most half: the user lets each part go on by itself.
    assert m.may_train(rules, tuple("abc"))
    assert m.may_train(rules, tuple("def"))


def test_a_host_taken_out_by_hand_is_not_waited_for():
    assert m.may_train(RULES._replace(least=2), ("desktop",), left=("laptop",))
    assert not m.may_train(RULES._replace(least=2), ("desktop",))


def test_a_generation_is_offered_promised_and_begun():
    now = 5.0
    a, b = m.Own(m.Word("desktop")), m.Own(m.Word("laptop"))
    a, order = m.decide(RULES, a, heard(now, b.word._replace(hears=("desktop",))), now)
    assert (a.word.state, order, a.word.generation.members) == (m.OFFERED, "", ("desktop", "laptop"))
    b, order = m.decide(RULES, b, heard(now, a.word), now)
    assert (b.word.state, order, b.word.promised) == (m.PROMISED, "", a.word.promised)
    a, order = m.decide(RULES, a, heard(now, b.word), now)
    assert (a.word.state, order, a.word.go) == (m.TRAINING, m.START, True)
    b, order = m.decide(RULES, b, heard(now, a.word), now)
    assert (b.word.state, order, b.word.started) == (m.TRAINING, m.START, a.word.started)


def test_the_first_generation_waits_for_all_hosts():
    own = m.Own(m.Word("desktop"))
    assert m.decide(RULES, own, {}, 30.0)[0].word.state == m.IDLE
    assert m.decide(RULES, own, {}, 61.0)[0].word.state == m.OFFERED


def test_a_missing_member_ends_the_generation_and_is_waited_for():
    own = trains(RULES, "desktop", ("desktop", "laptop"))
    laptop = m.Word("laptop", m.TRAINING, started=2, promised=2, hears=("desktop",))
    assert m.decide(RULES, own, {"laptop": m.Heard(laptop, 100, 0)}, 105.0)[1] == ""
    own, order = m.decide(RULES, own, {"laptop": m.Heard(laptop, 100, 0)}, 107.0)
    assert (order, own.word.why) == (m.SAVE, "laptop is not heard")
    own = m.rank_ended(own, 108.0, 17, m.FAILED)
    assert (own.word.state, own.word.steps) == (m.IDLE, 17)
    assert m.decide(RULES, own, {}, 117.0)[0].word.state == m.IDLE
    own, order = m.decide(RULES, own, {}, 118.0)
    own, order = m.decide(RULES, own, {}, 118.0)
    assert (order, own.word.generation.members) == (m.START, ("desktop",))


def test_who_comes_back_is_let_in():
    own = trains(RULES, "desktop", ("desktop",), now=0.0)
    laptop = m.Word("laptop", m.IDLE, hears=("desktop",))
    assert m.decide(RULES, own, {"laptop": m.Heard(laptop, 10, 9)}, 10.0)[1] == ""
    own, order = m.decide(RULES, own, {"laptop": m.Heard(laptop, 30, 9)}, 30.0)
    assert (order, own.word.why) == (m.FINISH_STEP, "laptop comes in")
    own = m.rank_ended(own, 33.0, 40, m.STOPPED)
    own, order = m.decide(RULES, own, {"laptop": m.Heard(laptop, 33, 9)}, 33.0)
    assert own.word.generation.members == ("desktop", "laptop")


def test_of_two_parts_the_one_with_fewer_steps_gives_way():
    desktop = trains(RULES, "desktop", ("desktop",), number=2, now=0.0, steps=40)
    laptop = trains(RULES, "laptop", ("laptop",), number=3, now=0.0, steps=35)
    desktop = desktop._replace(word=desktop.word._replace(hears=("laptop",)))
    laptop = laptop._replace(word=laptop.word._replace(hears=("desktop",)))
    desktop, order = m.decide(RULES, desktop, heard(50, laptop.word), 50.0)
    assert (order, desktop.word.over) == ("", 3)
    laptop, order = m.decide(RULES, laptop, heard(51, desktop.word), 51.0)
    assert (order, laptop.apart, laptop.word.why) == (m.FINISH_STEP, True, "desktop has more steps")


def test_three_deaths_at_one_step_end_it():
    own = m.Own(m.Word("desktop"))
    for number in (2, 4, 6, 8):
        mine = m.Generation(number, ("desktop", "laptop"))
        joined = m._join(RULES, own, mine, 10.0 * number, m.OFFERED)
        if joined.word.state == m.FAILED:
            break
        own = m.rank_ended(m._started(joined, mine, 10.0 * number), 10.0 * number + 5, 17, m.FAILED)
    assert (number, joined.word.why) == (8, "the run died 3 times at step 17")


def test_who_is_not_asked_to_stop_yet_waits_for_its_rank_to_end_with_the_others():
    laptop, order = m.asked_to_end(trains(RULES, "laptop", ("desktop", "laptop")), 110.0, m.STOPPED, "it was stopped")
    assert (laptop.word.state, order) == (m.ENDING, m.FINISH_STEP)
    desktop, order = m.decide(RULES, trains(RULES, "desktop", ("desktop", "laptop")), heard(110, laptop.word), 110.0)
    assert (desktop.word.state, order) == (m.TRAINING, "")
    desktop = m.rank_ended(desktop, 112.0, 20, m.STOPPED)
    laptop = m.rank_ended(laptop, 112.0, 20, m.STOPPED)
    desktop, order = m.decide(RULES, desktop, heard(113, laptop.word), 113.0)
    assert (desktop.word.state, order) == (m.STOPPED, "")


def test_what_another_start_would_not_change_is_not_tried_again():
    own = trains(RULES, "desktop", ("desktop", "laptop"))
    own = m.rank_ended(own, 108.0, 17, m.FAILED, "the shard is damaged")
    assert (own.word.state, own.word.why) == (m.FAILED, "the shard is damaged")
    # The others hear of it once their ranks have ended, too.
    other = m.rank_ended(trains(RULES, "laptop", ("desktop", "laptop")), 108.0, 17, m.FAILED)
    other, order = m.decide(RULES, other, heard(109, own.word), 109.0)
    assert (other.word.state, order) == (m.FAILED, "")
    assert other.word.why == "desktop gave up: the shard is damaged"


def test_deaths_are_counted_within_an_hour_and_losses_are_not():
    own = m.Own(m.Word("desktop"))
    for number in range(2, 20, 2):
        mine = m.Generation(number, ("desktop", "laptop"))
        own = m._join(RULES, own, mine, 600.0 * number, m.OFFERED)
        own = m.rank_ended(m._started(own, mine, 600.0 * number), 600.0 * number + 5, number, m.FAILED)
        # Each time the laptop was lost, and the desktop went on alone for a while.
        alone = m.Generation(number + 1, ("desktop",))
        own = m._started(m._join(RULES, own, alone, 600.0 * number + 20, m.OFFERED), alone, 600.0 * number + 20)
        own = m.rank_ended(own._replace(clean=True), 600.0 * number + 300, number, m.STOPPED)
        own = m.change(own, 600.0 * number + 300, m.IDLE)
    assert own.deaths == ()
    for step in (1, 2, 3):
        own = own._replace(deaths=(*own.deaths, (100.0 * step, step)))
    assert m.verdict(RULES, own, 400.0) == ""
    own = own._replace(deaths=(*own.deaths, (400.0, 4)))
    assert "4 times within an hour, and ddp_restarts is 3" in m.verdict(RULES, own, 500.0)
    assert m.verdict(RULES, own, 3800.0) == ""


def again(own, **fields):
    """The keeper after this one, from what is on the disk."""
    kept = json.loads(json.dumps(m.to_remember(own)))
    return m.awake(own.word.host, kept, 0.0, own.word.steps, **fields)


def test_a_host_that_was_off_does_not_begin_alone():
    own = trains(RULES, "laptop", ("desktop", "laptop"))
    assert m.decide(RULES, again(own, returned=True), {}, 1000.0)[0].word.state == m.IDLE
    assert m.decide(RULES, again(own, returned=False), {}, 1000.0)[0].word.state == m.OFFERED


def test_who_was_taken_out_by_hand_is_known_after_a_reboot():
    left = m.Word("c", m.LEFT)
    a, b = (m.decide(THREE, m.Own(m.Word(host)), heard(1, left), 1.0)[0] for host in "ab")
    a, b = again(a, returned=True), again(b, returned=True)
    a, order = m.decide(THREE._replace(least=3), a, heard(1, b.word._replace(hears=("a",))), 1.0)
    assert (a.word.state, a.word.generation.members) == (m.OFFERED, ("a", "b"))


def test_a_stop_reaches_whoever_waits():
    stopped = m.Word("desktop", m.STOPPED)
    assert m.decide(RULES, m.Own(m.Word("laptop")), heard(1, stopped), 1.0)[0].word.state == m.STOPPED
    own = trains(RULES, "laptop", ("desktop", "laptop"))
    own = m.rank_ended(own, 105.0, 20, m.STOPPED)
    assert own.word.state == m.ASKING
    assert m.decide(RULES, own, {}, 106.0)[0].word.state == m.ASKING
    assert m.decide(RULES, own, heard(107, stopped), 107.0)[0].word.state == m.STOPPED
    assert m.decide(RULES, own, {}, 1120.0)[0].word.state == m.ASKING
    idle = m.Word("desktop", m.IDLE, started=2)
    assert m.decide(RULES, own, heard(107, idle), 107.0)[0].word.state == m.IDLE


def test_leaving_by_hand_lets_the_others_go_on():
    laptop, order = m.asked_to_end(trains(RULES, "laptop", ("desktop", "laptop")), 110.0, m.LEFT, "taken out")
    assert order == m.FINISH_STEP
    desktop = m.rank_ended(trains(RULES, "desktop", ("desktop", "laptop")), 111.0, 20, m.STOPPED)
    laptop = m.rank_ended(laptop, 111.0, 20, m.STOPPED)
    assert laptop.word.state == m.LEFT
    desktop, dummy = m.decide(RULES._replace(least=2), desktop, heard(112, laptop.word), 112.0)
    assert desktop.word.left == ("laptop",)
    desktop, dummy = m.decide(RULES._replace(least=2), desktop, {}, 113.0)
    assert desktop.word.generation.members == ("desktop",)


def test_a_link_that_is_cut_one_way_counts_as_none():
    deaf = m.Word("c", m.IDLE, hears=())
    own = m.Own(m.Word("a"), since=0.0)
    words = heard(1, m.Word("b", hears=("a",)), deaf)
    assert m.circle(THREE, own, m.present(own, m.fresh(THREE, words, 1))) == ("a", "b")


def test_numbers_are_unique_to_who_offers():
    numbers = {}
    for host in THREE.hosts:
        for promised in range(12):
            number = m.next_number(THREE, m.Own(m.Word(host, promised=promised)), {})
            assert number > promised
            assert numbers.setdefault(number, host) == host
