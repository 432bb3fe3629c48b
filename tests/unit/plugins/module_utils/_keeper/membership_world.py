# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A world in which everything goes wrong: hosts with keepers and ranks, and links between them, one second a tick.

The keepers are the real decisions of membership.py, and keep on their disks what the real ones keep (memory.py). Ranks,
network and runner are the least that behaves alike. What must never happen is checked as it would happen (`Checks`); each
schedule ends with peace for some hosts (which must then train), with a user's stop, or with the last step.

    python membership_world.py 10000        # so many random schedules, and what happened in them
    python membership_world.py 1 4711       # the one of seed 4711
"""

from __future__ import annotations

import collections
import json
import random
import sys

from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import manners, memory
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.quorum import Rules, may_train

SAVE_EVERY = 5
TIMEOUT = 25  # how long a rank waits for another one
END_TICKS = 5  # how long a rank that hangs may take to end
LINGER = 3  # how long a keeper that is over tells so
EVER = 10**9


class Lineage:
    """One step of training, and the steps before it."""

    __slots__ = ("before", "number", "step")

    def __init__(self, before, step, number):
        self.before, self.step, self.number = before, step, number


START = Lineage(None, 0, 0)


class Host:
    """One machine: its disk, its clock, its keeper and its rank."""

    def __init__(self, name, clock):
        self.name, self.clock = name, clock
        self.own = memory.new(name, clock, 0)
        self.disk = ""  # what the keeper remembers
        self.kept, self.full_until = {}, 0
        self.out = {"left": (), "failed": ()}  # whom it has known to be out, which it must not forget
        self.saved = START  # the newest checkpoint
        self.files = set()  # "leave", "stop": what a user asked for
        self.heard = {}
        self.off_at = self.deaf_until = self.thaws_at = self.unkillable_until = 0
        self.back_at = None  # when the keeper starts again, and whether the host was off
        self.was_off = False
        self.over_at = None  # when its keeper ended
        self.gone = False  # for good: nobody starts it again, or it is of another start of the run
        self.rank = None  # the generation it trains in
        self.head = None  # what it has trained, once all ranks have met
        self.order, self.ordered_at = "", 0
        self.waits_since = 0
        self.needed_until = 0  # its owner uses it, and it is a guest
        self.crashes = 0
        self.sick_at = None  # the step at which its rank fails each time

    def runs(self, tick):
        """Whether its keeper runs; one that is over tells so for a while."""
        over = self.over_at is not None and tick > self.over_at + LINGER
        return self.back_at is None and not self.gone and tick >= self.thaws_at and not over


class Checks:
    """Invariants, by name."""

    def __init__(self, rules):
        self.rules = rules
        self.members = {}  # number -> members, for ever
        self.begun = set()
        self.everywhere = 0  # newest step that all members of a generation have saved
        self.parts = 2 * rules.least <= len(rules.hosts)  # parts may train apart

    def promises_grow(self, before, word):
        assert word.promised >= before.promised and word.started >= before.started, "a promise was taken back"

    def a_number_has_one_generation(self, mine):
        assert self.members.setdefault(mine.number, mine.members) == mine.members, "one number, two generations"

    def starts_once(self, host, mine):
        assert host.rank is None, "a rank runs already"
        assert host.name in mine.members and (host.name, mine.number) not in self.begun, (
            "started twice in one generation"
        )
        self.begun.add((host.name, mine.number))

    def enough_are_called(self, before, word):
        if word.state == m.OFFERED != before.state:
            assert may_train(self.rules, word.generation.members, word.left), "not enough to train"

    def one_generation_at_once(self, trains):
        assert trains <= 1 or self.parts, "two generations train at once"

    def all_begin_together(self, ranks):
        assert all(host.head is None for host in ranks), "ranks of one generation did not begin together"

    def all_have_the_same_weights(self, ranks):
        assert all(host.head is ranks[0].head for host in ranks), "ranks of one generation have different weights"

    def nothing_saved_by_all_is_lost(self, best):
        assert best.step >= self.everywhere or self.parts, "a step that a whole generation had saved is lost"

    def each_step_once(self, host):
        one = host.head or host.saved
        while one.before is not None:
            assert one.step == one.before.step + 1, "a step was counted twice or left out"
            assert one.number >= one.before.number or self.parts, "an older generation followed a newer one"
            one = one.before

    def only_own_errors_end_it(self, host, hosts):
        """Neither losses nor signals, however many."""
        crashes = sum(one.crashes for one in hosts.values())
        assert host.own.word.state != m.FAILED or crashes >= min(3, self.rules.restarts), "a run of no error gave up"

    def only_a_user_stops_it(self, host, hosts):
        if host.own.word.state == m.STOPPED:
            assert any("stop" in one.files for one in hosts.values()), "stopped, though no user asked for it"


class World:
    """All hosts and links of one schedule."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        size = rng.choice((2, 2, 3, 3, 3, 4, 5))
        names = tuple("abcde"[:size])
        least = rng.choice((size, size, size // 2 + 1, max(1, size // 2), 1))
        restarts = rng.choice((3, 10**6))
        self.rules = Rules(names, least, rng.choice((0, 4, 10)), first_grace=15, restarts=restarts, settle=5)
        self.hosts = {name: Host(name, rng.uniform(0, 1000)) for name in names}
        self.checks = Checks(self.rules)
        self.cut = {}  # (from, to) -> until when
        self.post = collections.defaultdict(list)  # when it arrives -> (to, word)
        self.arrives = collections.Counter()  # (from, to) -> when the last word does
        self.tick = self.steps = 0
        self.last_step = EVER
        self.trouble = rng.choice((0.05, 0.12, 0.25))
        # Some schedules have few kinds of faults: what two of them do together does not drown in the others.
        share = rng.choice((0.2, 0.5, 1.0, 1.0))
        self.faults = {fault: often for fault, often in OFTEN.items() if fault in HEALING or rng.random() < share}
        self.events = collections.Counter()
        if rng.random() < 0.1:
            self.events["a host is sick"] += 1
            self.hosts[rng.choice(names)].sick_at = rng.randint(1, 12)

    # -- what goes wrong

    def disturb(self):
        rng = self.random
        host = self.hosts[rng.choice(self.rules.hosts)]
        if rng.random() < self.trouble and not host.gone:
            fault = rng.choices(list(self.faults), list(self.faults.values()))[0]
            if fault(self, host, rng):
                self.events[fault.__name__[2:].replace("_", " ")] += 1

    def a_rank_died(self, host, rng):
        return bool(host.rank) and self.crash(host)

    def a_rank_was_told_to_end(self, host, rng):
        if not host.rank or host.order:
            return False
        host.order, host.ordered_at = "sigterm", EVER
        return True

    def a_rank_cannot_be_killed(self, host, rng):
        host.unkillable_until = self.tick + rng.randint(5, 40)
        return bool(host.rank)

    def a_keeper_died(self, host, rng):
        return self.switch_off(host, rng.randint(1, 15), was_off=rng.random() < 0.3)

    def a_power_cut(self, host, rng):
        return self.switch_off(host, rng.randint(8, 30), was_off=True)

    def a_reboot(self, host, rng):
        if not host.runs(self.tick) or host.over_at is not None or host.off_at:
            return False
        host.own, order = m.going_down(host.own, host.clock)
        self.obey(host, order)
        host.off_at = self.tick + rng.randint(0, 10)
        return True

    def a_late_network(self, host, rng):
        host.deaf_until = self.tick + rng.randint(2, 30)
        return self.switch_off(host, rng.randint(8, 20), was_off=True)

    def a_spoilt_memory(self, host, rng):
        host.disk, host.kept = "{}" if host.disk else "", {}
        return self.switch_off(host, rng.randint(1, 15), was_off=rng.random() < 0.5)

    def a_new_disk(self, host, rng):
        """Of another start of the run, or of none: nobody hears it any more."""
        if rng.random() < 0.8:
            return False
        host.gone, host.rank, host.head, host.saved = True, None, None, START
        self.forget_saved()
        return True

    def a_full_disk(self, host, rng):
        host.full_until = self.tick + rng.randint(3, 40)
        return True

    def a_freeze(self, host, rng):
        host.thaws_at = self.tick + rng.randint(2, 25)
        if host.thaws_at - self.tick > self.rules.lost + self.rules.grace:
            host.own = host.own._replace(word=host.own.word._replace(returned=True))
        return True

    def a_need_of_the_owner(self, host, rng):
        """For minutes or for a moment: also in the middle of a start, and again as soon as it is back."""
        host.needed_until = self.tick + rng.choice((1, 2, 5, 30))
        return True

    def a_jump_of_the_clock(self, host, rng):
        host.clock += rng.uniform(0, 60)
        return True

    def a_cut(self, host, rng, until=EVER):
        other = rng.choice([name for name in self.rules.hosts if name != host.name])
        self.cut[host.name, other] = until
        if rng.random() < 0.6:
            self.cut[other, host.name] = until
        return True

    def a_flap(self, host, rng):
        return self.a_cut(host, rng, self.tick + rng.randint(3, 12))

    def a_split(self, host, rng):
        names = self.rules.hosts
        side = set(rng.sample(names, rng.randint(1, len(names) - 1)))
        self.cut.update({(a, b): EVER for a in names for b in names if (a in side) != (b in side)})
        return True

    def a_repair(self, host, rng):
        if rng.random() < 0.3:
            self.cut.clear()
        elif self.cut:
            del self.cut[rng.choice(sorted(self.cut))]
        return True

    def a_leave(self, host, rng):
        if not host.runs(self.tick) or host.over_at is not None:
            return False
        host.files.add("leave")
        return True

    def a_join(self, host, rng):
        """By hand, of a host whose keeper has ended."""
        if host.over_at is None or host.off_at or host.back_at is not None:
            return False
        host.files.discard("leave")
        return self.switch_off(host, 1, was_off=True)

    def switch_off(self, host, seconds, was_off):
        if host.back_at is not None:
            return False
        host.rank = host.head = None
        host.back_at, host.was_off = self.tick + seconds, was_off
        return True

    def crash(self, host):
        host.crashes += 1
        self.end_rank(host, m.FAILED, by_itself=True)
        return True

    def forget_saved(self):
        """Steps that only hosts had which a user took away are gone."""
        here = [host.saved.step for host in self.hosts.values() if not host.gone and "leave" not in host.files]
        self.checks.everywhere = min(self.checks.everywhere, max(here, default=0))

    # -- one second

    def step(self, disturbed):
        self.tick += 1
        if disturbed:
            self.disturb()
        if any(until <= self.tick for until in self.cut.values()):
            self.cut = {link: until for link, until in self.cut.items() if until > self.tick}
        for host in self.hosts.values():
            host.clock += 1
            if host.off_at and self.tick >= host.off_at:
                host.off_at, host.over_at = 0, None
                self.switch_off(host, self.random.randint(5, 20), was_off=True)
            if host.back_at is not None and self.tick >= host.back_at:
                self.awaken(host)
        self.train()
        self.deliver()
        for host in self.hosts.values():
            if host.runs(self.tick):
                self.keep(host)

    def awaken(self, host):
        host.back_at, host.heard, host.order = None, {}, ""
        if host.files:
            # What was taken out or stopped is not started again by itself.
            host.over_at = self.tick - LINGER
            return
        host.over_at = None
        if host.was_off and self.random.random() < 0.8:
            host.clock = self.random.uniform(0, 50)
        host.own = self.next_keeper(host)

    def next_keeper(self, host):
        """The keeper that the runner or the boot starts after this one, as keeper.py has it."""
        try:
            kept = json.loads(host.disk)
            return memory.awake(host.name, kept, host.clock, host.saved.step, returned=host.was_off)
        except LookupError:
            host.out = {"left": (), "failed": ()}
            return memory.forgetful(host.name, host.clock, 10**6 + 60 * self.tick, host.saved.step)
        except ValueError:
            return memory.new(host.name, host.clock, host.saved.step)

    def deliver(self):
        for to, word in self.post.pop(self.tick, ()):
            host = self.hosts[to]
            if host.runs(self.tick) and self.tick >= host.deaf_until:
                host.heard[word.host] = m.hear(host.heard.get(word.host), word, host.clock, self.rules.lost)

    def keep(self, host):
        """One look of a keeper, as keeper.py has it."""
        if host.over_at is None and not self.look(host):
            return  # What must be on the disk first is not told.
        word = host.own.word
        if self.tick >= host.full_until:
            host.out = {"left": word.left, "failed": word.failed}
        if self.tick < host.deaf_until:
            return
        for name in self.rules.hosts:
            if name != host.name and (host.name, name) not in self.cut:
                late = self.tick + 1 + int(self.random.random() * 3) * (self.random.random() < 0.6)
                # Late, but in their order: who asks waits for one answer before the next question.
                late = self.arrives[host.name, name] = max(late, self.arrives[host.name, name])
                self.post[late].append((name, word))

    def look(self, host):
        if host.rank and host.head:
            word, steps = host.own.word, host.head.step
            host.own = host.own._replace(
                word=word._replace(steps=steps, returned=word.returned and steps <= word.steps)
            )
        before, order = host.own.word, self.asked(host)
        own = host.own
        if not order:
            own, order = m.decide(self.rules, host.own, host.heard, host.clock)
        if not self.remember(host, own):
            return False
        host.own = own
        self.checks.promises_grow(before, own.word)
        self.checks.enough_are_called(before, own.word)
        self.checks.only_own_errors_end_it(host, self.hosts)
        self.checks.only_a_user_stops_it(host, self.hosts)
        self.obey(host, order)
        if own.word.state in m.OVER and host.rank is None:
            host.over_at = self.tick
            self.forget_saved()
        return True

    def remember(self, host, own):
        """Write down what the keeper remembers; on a full disk it may go on without, but must make no promise."""
        kept = memory.to_remember(own)
        if kept == host.kept:
            return True
        if self.tick < host.full_until:
            return all(kept[name] == host.kept.get(name, 0) for name in ("promised", "started"))
        host.kept, host.disk = kept, json.dumps(kept)
        return True

    def asked(self, host):
        if host.own.word.state in m.OVER or host.own.after_ending in m.OVER:
            return ""
        order, before = "", host.own.word.state
        for name, state in (("stop", m.STOPPED), ("leave", m.LEFT)):
            if name in host.files and host.own.after_ending not in m.OVER and host.own.word.state not in m.OVER:
                host.own, order = m.asked_to_end(host.own, host.clock, state, name)
        if not order:
            why = "used by its owner" if self.tick < host.needed_until else ""
            host.own, order = manners.follow(host.own, host.clock, why)
            self.events["guests came back"] += before == m.RESTING != host.own.word.state
        return order

    def obey(self, host, order):
        if order == m.START:
            mine = host.own.word.generation
            self.checks.starts_once(host, mine)
            self.checks.a_number_has_one_generation(mine)
            host.rank, host.head, host.order, host.waits_since = mine, None, "", self.tick
        elif order and order != host.order:
            host.order, host.ordered_at = order, self.tick

    # -- the ranks

    def train(self):
        trains = 0
        for mine in {host.rank for host in self.hosts.values() if host.rank}:
            ranks = [self.hosts[name] for name in mine.members]
            here = [host for host in ranks if host.rank == mine]
            linked = not any((a, b) in self.cut for a in mine.members for b in mine.members)
            able = all(self.tick >= max(host.thaws_at, host.unkillable_until) and host.order != m.SAVE for host in here)
            if len(here) == len(ranks) and linked and able:
                self.advance(mine, ranks)
                trains += 1
            else:
                self.hang(here, met=any(host.head for host in here), dead=len(here) < len(ranks))
        self.checks.one_generation_at_once(trains)

    def advance(self, mine, ranks):
        if any(host.head is None for host in ranks):
            self.checks.all_begin_together(ranks)
            best = max(ranks, key=lambda host: host.saved.step).saved
            self.checks.nothing_saved_by_all_is_lost(best)
            for host in ranks:
                host.head = host.saved = best
            self.events["generations trained"] += 1
        sick = next((host for host in ranks if host.sick_at is not None and host.head.step >= host.sick_at), None)
        if sick:
            self.crash(sick)
            return
        self.checks.all_have_the_same_weights(ranks)
        head = Lineage(ranks[0].head, ranks[0].head.step + 1, mine.number)
        over = head.step >= self.last_step
        stop = any(host.order in (m.FINISH_STEP, "sigterm") for host in ranks)
        self.steps += 1
        for host in ranks:
            host.head, host.waits_since = head, self.tick
        if stop or over or head.step % SAVE_EVERY == 0:
            self.checks.everywhere = max(self.checks.everywhere, head.step)
            for host in ranks:
                host.saved = head
        if stop or over:
            self.events["ended in order"] += 1
            for host in ranks:
                self.end_rank(host, m.FINISHED if over else m.STOPPED)

    def hang(self, here, met, dead):
        """Ranks whose peer is not there: they see a closed connection at once, and nothing at all of a cut or a freeze."""
        for host in here:
            if self.tick < host.thaws_at:
                continue
            sees = met and dead and self.random.random() < 0.5
            told = host.order == m.SAVE and self.random.random() < 0.5
            late = host.order and self.tick - host.ordered_at >= END_TICKS
            if self.tick < host.unkillable_until:
                if late and host.runs(self.tick):
                    host.own = m.rank_stuck(host.own, host.clock, "its rank cannot be killed")
            elif sees or told or late or self.tick - host.waits_since > TIMEOUT:
                if host.head and not late and self.random.random() < 0.7:
                    host.saved = host.head
                    self.events["saved when a peer was lost"] += 1
                self.end_rank(host, m.FAILED)

    def end_rank(self, host, how, by_itself=False):
        host.rank, host.head, host.order = None, None, ""
        host.own = m.rank_ended(host.own, host.clock, host.saved.step, how, by_itself=by_itself)

    # -- the end of a schedule

    def prove(self, ticks):
        """So many disturbed seconds, then one of the ends; returns the wait for a step, or None."""
        end = self.random.choices((self.peace, self.user_stops, self.last_steps), (7, 2, 1))[0]
        for dummy in range(ticks):
            self.step(disturbed=True)
        for host in self.hosts.values():
            self.checks.each_step_once(host)
            host.thaws_at = host.deaf_until = host.full_until = host.needed_until = 0
            # One that no signal reaches stays so; its keeper goes on talking.
            host.unkillable_until = EVER if host.rank and self.tick < host.unkillable_until else 0
            host.sick_at = None
        self.cut.clear()
        waited = end()
        for host in self.hosts.values():
            self.checks.each_step_once(host)
        return waited

    @property
    def bound(self):
        rules = self.rules
        return (
            TIMEOUT
            + 2 * (rules.lost + rules.grace + rules.offer + END_TICKS)
            + rules.first_grace
            + 2 * rules.begin
            + 40
        )

    def quiet(self, condition, what):
        """Peace until a condition holds; returns the seconds."""
        begun = self.tick
        while not condition():
            assert self.tick - begun < self.bound, "%s in %d s: %s" % (
                what,
                self.bound,
                [h.own for h in self.hosts.values()],
            )
            self.step(disturbed=False)
        return self.tick - begun

    def user_stops(self):
        """On all hosts that are on: their ranks end, and nothing trains any more."""
        on = [host for host in self.hosts.values() if host.back_at is None and not host.gone and not host.off_at]
        for host in on:
            host.files.add("stop")
        on = [host for host in on if not host.unkillable_until]
        self.quiet(lambda: all(host.over_at is not None for host in on), "not stopped")
        assert not any(host.rank for host in on)
        self.events["stopped"] += 1

    def last_steps(self):
        """The run ends by itself, on all who make the last step."""
        if self.peaceful() is None:
            return
        self.last_step = max(host.saved.step for host in self.hosts.values()) + 8

        def finished():
            states = [host.own.word.state for host in self.hosts.values()]
            return m.FINISHED in states or m.FAILED in states

        self.quiet(finished, "not finished")
        self.events["finished"] += 1

    def peace(self):
        """For a sufficient set, which trains within the bound."""
        stable = self.peaceful()
        if stable is None:
            return None
        begun, steps = self.tick, self.steps

        def trains():
            assert not any(self.hosts[name].own.word.state in (m.STOPPED, m.FINISHED) for name in stable), "over"
            return self.steps > steps + 1 or any(host.own.word.state == m.FAILED for host in self.hosts.values())

        self.quiet(trains, "no progress with %s" % (stable,))
        if self.steps <= steps + 1:
            # Whether it may give up is checked where it does.
            self.events["given up"] += 1
            return None
        return self.tick - begun

    def keeper_to_be(self, host):
        host.was_off = host.was_off or bool(host.off_at)
        return self.next_keeper(host) if host.back_at is not None or host.off_at else host.own

    def peaceful(self):
        """Leave a set of hosts alone which can and must train, and switch off the others; None where there is none."""
        able = [name for name, host in self.hosts.items() if not host.gone and (host.over_at is None or host.off_at)]
        able = [name for name in able if not self.hosts[name].files and self.hosts[name].own.word.state != m.FAILED]
        able = [name for name in able if not self.hosts[name].unkillable_until]
        if self.random.random() < 0.5 and able:
            able = self.random.sample(able, self.random.randint(1, len(able)))
        keepers = [self.keeper_to_be(self.hosts[name]) for name in able]
        left, failed = ({out for name in able for out in self.hosts[name].out[kind]} for kind in ("left", "failed"))
        if not able or not may_train(self.rules, able, tuple(left - set(able))):
            return None
        for own in keepers:
            if own.word.returned and not set(own.last.members if own.last else self.rules.hosts) <= {
                *able,
                *left,
                *failed,
            }:
                return None  # It may wait for those who know whether the run was stopped.
        for name, host in self.hosts.items():
            if name not in able and not host.unkillable_until:
                host.gone, host.rank, host.head = True, None, None
        self.forget_saved()
        return able


OFTEN = {
    World.a_rank_died: 8, World.a_rank_was_told_to_end: 5, World.a_rank_cannot_be_killed: 3, World.a_keeper_died: 8,
    World.a_power_cut: 5, World.a_reboot: 8, World.a_late_network: 3, World.a_spoilt_memory: 2, World.a_new_disk: 2,
    World.a_freeze: 8, World.a_full_disk: 4, World.a_jump_of_the_clock: 5, World.a_cut: 12, World.a_flap: 8, World.a_split: 4,
    World.a_repair: 30, World.a_leave: 4, World.a_join: 20, World.a_need_of_the_owner: 12,
}  # fmt: skip
HEALING = (World.a_repair, World.a_join)


def prove(first, count, ticks=60):
    """Run schedules; returns what happened in them, and how long a sufficient set took to train again."""
    events, waits = collections.Counter(), []
    for seed in range(first, first + count):
        world = World(seed)
        try:
            waited = world.prove(ticks)
        except AssertionError as error:
            raise AssertionError("schedule %d: %s" % (seed, error)) from error
        waits += [] if waited is None else [waited]
        events.update(world.events)
        events["steps"] += world.steps
    return events, waits


if __name__ == "__main__":
    happened, seconds = prove(int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1]))
    for name, times in sorted(happened.items()):
        print("%-28s %8d" % (name, times))
    if seconds:
        print("%-28s %8d (mean %.1f)" % ("longest wait for a step, s", max(seconds), sum(seconds) / len(seconds)))
