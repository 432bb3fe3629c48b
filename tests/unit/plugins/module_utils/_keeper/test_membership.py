# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which hosts train, continue without others, and give way."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import memory
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._keeper import membership_world

SCHEDULES = int(os.environ.get("SCHEDULES", "500"))
BOTH = ("desktop", "laptop")
RULES = m.Rules(BOTH, least=1, grace=10, first_grace=60)
THREE = m.Rules(("a", "b", "c"), least=2, grace=10, first_grace=60)


def received(now, *messages):
    return {public.host: m.Received(public, now, now - 100) for public in messages}


def trains(rules, host, members, number=2, now=100.0, **public):
    own = m.OwnState(m.KeeperState(host))
    mine = m.Generation(number, members)
    own = m._started(own.with_fields(promised=number, generation=mine), mine, now)
    return own.with_fields(**public)


def test_random_schedules():
    """Losses, signals, reboots, cut links, hosts that leave and join, late messages: the invariants hold in every second."""
    events, waits = membership_world.prove(0, SCHEDULES)
    assert len(waits) > SCHEDULES / 3
    ends = ("stopped", "finished", "given up", "not enough were left")
    assert len(waits) + sum(events[end] for end in ends) == SCHEDULES
    assert events["steps"] > 10 * SCHEDULES
    # Every kind of fault and of end did occur.
    faults = [membership_world.name_of(fault) for fault in membership_world.OFTEN]
    assert not [
        name for name in (*faults, "ended in order", "stopped", "finished", "hosts gave up") if not events[name]
    ]


@pytest.mark.parametrize(
    ("hosts", "least", "members", "left", "answer"),
    [
        ("ab", 2, "ab", "", True),
        ("ab", 2, "a", "", False),
        ("ab", 1, "b", "", True),
        ("abc", 2, "bc", "", True),
        ("abcd", 3, "ab", "", False),
        # With at most half of the hosts, both parts of a split train.
        ("abcd", 2, "ab", "", True),
        ("abcd", 2, "cd", "", True),
        # A host taken out by hand is not waited for.
        ("ab", 2, "a", "b", True),
        ("ab", 1, "", "ab", False),
    ],
)
def test_who_may_go_on(hosts, least, members, left, answer):
    rules = m.Rules(tuple(hosts), least, 10, 60)
    assert m.may_train(rules, tuple(members), tuple(left)) is answer


def test_an_offer_from_before_a_suspend_is_void():
    """The others may have started and been stopped while this host slept."""
    offer = m.Generation(5, BOTH)
    caller = m.KeeperState("desktop", m.TRAINING, offer, promised=5, last=offer, hears=("laptop",))
    own = m.OwnState(m.KeeperState("laptop", m.PROMISED, offer, promised=5))
    assert m.decide(RULES, own, received(5, caller), 5.0)[1] == m.START
    own, order = m.decide(RULES, memory.slept(own, 5.0, 60.0), received(5, caller), 5.0)
    assert (own.public.state, order, own.public.returned) == (m.IDLE, "", True)


def test_who_promises_a_new_generation_still_tells_who_was_in_its_last():
    """a was away while b and c trained, and c was stopped; b, which was off since, must not go on with a."""
    offer = m.Generation(10, ("a", "b"))
    a = m.OwnState(m.KeeperState("a", m.OFFERED, offer, last=m.Generation(4, ("a", "b")), promised=10, returned=True))
    b = m.KeeperState(
        "b", m.PROMISED, offer, last=m.Generation(5, ("b", "c")), promised=10, returned=True, hears=("a",)
    )
    assert m.decide(THREE, a, received(1, b), 1.0)[1] == ""
    assert m.decide(THREE, a, received(1, b._replace(returned=False)), 1.0)[1] == m.START


def test_the_first_generation_waits_for_all_hosts():
    own = m.OwnState(m.KeeperState("desktop"))
    assert m.decide(RULES, own, {}, 30.0)[0].public.state == m.IDLE
    assert m.decide(RULES, own, {}, 61.0)[0].public.state == m.OFFERED


@pytest.mark.parametrize("ended", [False, True])
def test_all_of_the_part_that_gives_way_know_it(ended):
    """Also a host whose rank ended before it heard the reason."""
    attic = trains(THREE, "b", ("a", "b"), number=4, now=0.0, steps=35)
    mine = attic.public.generation
    leader = m.KeeperState("a", m.ENDING, mine, last=mine, regroup=4, apart=True, hears=("b",), why="c has more steps")
    if ended:
        attic = m.rank_ended(THREE, attic, 50.0, 35, m.STOPPED)
    attic = m.decide(THREE, attic, received(50, leader), 50.0)[0]
    assert (attic.public.apart, attic.public.state) == (True, m.IDLE if ended else m.ENDING)


def died(own, number, steps, when, failure=""):
    """A host whose rank failed in this generation."""
    own = m._started(own.with_fields(promised=number), m.Generation(number, BOTH), when)
    return m.rank_ended(RULES, own, when + 5, steps, m.FAILED, own_failure=failure)


@pytest.mark.parametrize("steps", [(17, 17, 17), (1, 2, 3, 4)])
def test_a_rank_that_fails_by_itself_time_and_again_is_given_up(steps):
    own, other = m.OwnState(m.KeeperState("laptop")), m.OwnState(m.KeeperState("desktop"))
    for number, step in enumerate(steps):
        assert own.public.state != m.FAILED
        other = died(other, number + 1, step, 100.0 * number, failure=None)
        own = died(own, number + 1, step, 100.0 * number)
    assert own.public.state == m.FAILED
    assert own.public.why.startswith("the rank of laptop died")
    # The other host is well, so it continues alone at once, unless all hosts are needed.
    assert other.public.state == m.IDLE
    alone, dummy = m.decide(RULES, other, received(1000, own.public), 1000.0)
    assert (alone.public.state, alone.public.generation.members) == (m.OFFERED, ("desktop",))
    assert again(alone, returned=True).public.failed == ("laptop",)
    # After a user's join it has one more try.
    joined = again(own, returned=True)
    assert m.decide(RULES, joined, received(1, alone.public._replace(hears=("laptop",))), 1.0)[0].public.state == m.IDLE
    assert died(joined, 9, steps[-1], 10.0, failure=None).public.state == m.IDLE
    assert died(joined, 9, steps[-1], 10.0).public.state == m.FAILED
    over, dummy = m.decide(RULES._replace(least=2), other, received(1000, own.public), 1000.0)
    assert (over.public.state, over.public.why) == (m.FAILED, "laptop gave up: " + own.public.why)


def test_deaths_of_long_ago_count_only_at_their_step():
    own = m.OwnState(m.KeeperState("laptop"))
    for number in range(100):
        own = died(own, number + 1, number, 1e6 + 1300.0 * number)
    assert own.public.state == m.IDLE and len(own.deaths) < 10
    for number in (1, 2):
        assert own.public.state == m.IDLE
        own = died(own, 100 + number, 99, 2e6 + 5000.0 * number)
    assert own.public.state == m.FAILED


def test_deaths_before_a_reboot_or_a_suspend_are_not_within_the_hour():
    own = m.OwnState(m.KeeperState("laptop"))
    for number in range(3):
        own = died(own, number + 1, number, 90000.0 * number)
    assert len(own.deaths) == 3
    for rested in (again(own, returned=True, same_boot=False), memory.slept(own, 180010.0, 90000.0)):
        for number in (4, 5, 6):
            assert rested.public.state != m.FAILED
            rested = died(rested, number, number, 180010.0)
        assert rested.public.state == m.IDLE


def test_where_the_ranks_of_two_hosts_fail_together_both_give_up_and_the_run_with_them():
    a, b = (m.OwnState(m.KeeperState(host)) for host in "ab")
    for number in range(1, 4):
        a, b = (died(own, number, 17, 100.0 * number) for own in (a, b))
    c, dummy = m.decide(THREE, m.OwnState(m.KeeperState("c")), received(400, a.public, b.public), 400.0)
    assert (c.public.state, c.public.why) == (m.FAILED, "a and b gave up: " + a.public.why)


def test_what_befalls_other_hosts_ends_the_run_for_nobody():
    """A host that is lost, and a keeper that is killed with its rank, by whose end another rank dies."""
    own = m.OwnState(m.KeeperState("laptop"))
    for number in range(1, 50):
        own = died(own, number, 17, 10.0 * number, failure=None)
        others = [m.KeeperState("desktop", restarted=True)] if number % 2 else []
        own = m.decide(RULES, own, received(10, *others), 10.0)[0]._replace(since=0.0).with_fields(state=m.IDLE)
    own = trains(RULES, "laptop", BOTH, number=60, now=600.0)
    own, order = m.decide(RULES, own, {}, 610.0)
    assert (own.public.state, order) == (m.ENDING, m.SAVE)
    own = m.rank_ended(RULES, own, 612.0, 17, m.FAILED, own_failure="")
    assert (own.public.state, own.deaths) == (m.IDLE, ())


def test_a_run_that_stalls_at_one_step_while_all_are_there_ends():
    own = m.OwnState(m.KeeperState("laptop"))
    for number in range(1, 11):
        assert own.public.state == m.IDLE
        own = died(own, number, 17, 100.0 * number, failure=None)
        own, dummy = m.decide(RULES, own, received(10, m.KeeperState("desktop", hears=("laptop",))), 10.0)
    assert (own.public.state, own.public.why) == (m.FAILED, "the run died 10 times at step 17")


def test_a_signal_to_a_rank_that_nobody_explains_costs_no_wait():
    desktop = m.rank_ended(RULES, trains(RULES, "desktop", BOTH), 111.0, 20, m.STOPPED)
    laptop = m.rank_ended(RULES, trains(RULES, "laptop", BOTH), 111.0, 20, m.STOPPED)
    training = trains(RULES, "laptop", BOTH)
    assert m.decide(RULES, desktop, received(111, training.public), 111.0)[0].public.state == m.ASKING
    assert m.decide(RULES, desktop, received(112, laptop.public), 112.0)[0].public.state == m.IDLE
    assert desktop.deaths == ()


def test_a_rank_that_ends_in_order_is_cut_off_once_another_is_lost():
    laptop, dummy = m.asked_to_end(trains(RULES, "laptop", BOTH), 110.0, m.STOPPED, "it was stopped")
    public = trains(RULES, "desktop", BOTH).public
    assert m.decide(RULES, laptop, received(115, public), 115.0)[1] == ""
    assert m.decide(RULES, laptop, {"desktop": m.Received(public, 109, 0)}, 117.0)[1] == m.SAVE


@pytest.mark.parametrize("number", [1, 2])
def test_who_is_not_asked_to_stop_yet_waits_for_its_rank_to_end_with_the_others(number):
    laptop, order = m.asked_to_end(trains(RULES, "laptop", BOTH, number), 110.0, m.STOPPED, "it was stopped")
    assert (laptop.public.state, order) == (m.ENDING, m.FINISH_STEP)
    desktop, order = m.decide(RULES, trains(RULES, "desktop", BOTH, number), received(110, laptop.public), 110.0)
    assert (desktop.public.state, order) == (m.TRAINING, "")
    desktop = m.rank_ended(RULES, desktop, 112.0, 20, m.STOPPED)
    laptop = m.rank_ended(RULES, laptop, 112.0, 20, m.STOPPED)
    desktop, order = m.decide(RULES, desktop, received(113, laptop.public), 113.0)
    assert (desktop.public.state, order) == (m.STOPPED, "")


def test_what_another_start_would_not_change_is_not_tried_again():
    own = trains(RULES, "desktop", BOTH)
    own = m.rank_ended(RULES, own, 108.0, 17, m.FAILED, "the shard is damaged", "it")
    assert (own.public.state, own.public.why) == (m.FAILED, "the shard is damaged")
    # The others hear of it after their ranks have ended, too.
    other = m.rank_ended(RULES, trains(RULES, "laptop", BOTH), 108.0, 17, m.FAILED)
    assert m.decide(RULES, other, received(109, own.public), 109.0)[0].public.generation.members == ("laptop",)
    other, order = m.decide(RULES._replace(least=2), other, received(109, own.public), 109.0)
    assert (other.public.state, order) == (m.FAILED, "")
    assert other.public.why == "desktop gave up: the shard is damaged"


def again(own, **fields):
    """The next keeper, from the state on disk."""
    kept = json.loads(json.dumps(memory.to_remember(own)))
    return memory.awake(own.public.host, kept, 0.0, own.public.steps, **fields)


def test_a_host_without_memory_uses_no_number_twice_and_begins_with_nobody_but_all():
    own = memory.forgetful("a", 0.0, 1.7e9, 7)
    b, c = (
        m.KeeperState(host, hears=("a", "b", "c"), last=m.Generation(5, ("a", "b", "c")), promised=5, returned=True)
        for host in "bc"
    )
    assert m.decide(THREE, own, received(1000, b), 1000.0)[0].public.state == m.IDLE
    assert m.decide(THREE, own, received(1000, b, c), 1000.0)[0].public.promised > 1.7e9


def test_a_host_that_wakes_up_has_missed_nothing_where_all_still_train_with_it():
    own = trains(RULES, "laptop", BOTH)
    own = own.with_fields(returned=True)
    same = own.public._replace(host="desktop")
    stopped = same._replace(state=m.STOPPED)
    for public, since, missed in ((same, 100.0, False), (same, 200.0, True), (stopped, 100.0, True)):
        assert memory.woken(own, received(150, public), since).public.returned is missed
    assert memory.woken(own, {}, 100.0).public.returned


def test_who_was_taken_out_by_hand_is_known_after_a_reboot():
    left = m.KeeperState("c", m.LEFT)
    a, b = (m.decide(THREE, m.OwnState(m.KeeperState(host)), received(1, left), 1.0)[0] for host in "ab")
    a, b = again(a, returned=True), again(b, returned=True)
    a, dummy = m.decide(THREE._replace(least=3), a, received(1, b.public._replace(hears=("a",))), 1.0)
    assert (a.public.state, a.public.generation.members) == (m.OFFERED, ("a", "b"))
