# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A world in which everything goes wrong: hosts with keepers and ranks, and links between them, one second a tick.

Ranks die, hosts freeze, keepers die and start again, links are cut in one direction or both, words are late, clocks
jump. The keepers are the real decisions of membership.py; ranks and network are the least that behaves alike. Every
tick checks what must never happen; `prove` ends a schedule by leaving a sufficient set alone, which must then train.

    python membership_world.py 10000        # so many random schedules, and what happened in them
"""

from __future__ import annotations

import collections
import random
import sys

from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import memory

SAVE_EVERY = 5
END_TICKS = 5  # how long a rank that hangs may take to end


class Lineage:
    """One step of training, and the steps before it."""

    __slots__ = ("before", "number", "step")

    def __init__(self, before, step, number):
        self.before, self.step, self.number = before, step, number


class Host:
    """One machine: its disk, its clock, its keeper and its rank."""

    def __init__(self, name, clock):
        self.name, self.clock = name, clock
        self.own = memory.awake(name, {}, clock, 0, returned=False)
        self.disk = {}  # what its keepers remember
        self.heard = {}
        self.back_at = None  # when the keeper starts again
        self.gone = False  # for good
        self.thaws_at = 0
        self.saved = Lineage(None, 0, 0)
        self.rank = None  # the generation it trains in
        self.head = None  # what it has trained, once all ranks have met
        self.order, self.ordered_at = "", 0

    def runs(self, tick):
        return self.back_at is None and not self.gone and tick >= self.thaws_at


class World:
    """All hosts and links of one schedule."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        size = rng.choice((2, 2, 3, 3, 3, 4, 5))
        names = tuple("abcde"[:size])
        least = rng.choice((size, size, size // 2 + 1, max(1, size // 2), 1))
        self.rules = m.Rules(names, least, grace=rng.choice((0, 4, 10)), first_grace=15, restarts=10**6, settle=5)
        self.hosts = {name: Host(name, rng.uniform(0, 1000)) for name in names}
        self.cut = set()  # (from, to)
        self.post = []  # (when it arrives, to, word)
        self.tick = 0
        self.members = {}  # number -> members, forever
        self.trained = collections.Counter()
        self.everywhere = 0  # newest step that all members of a generation have saved
        self.events = collections.Counter()
        self.steps = 0

    # -- what goes wrong

    def disturb(self):
        rng, names = self.random, self.rules.hosts
        what = rng.random()
        host = self.hosts[rng.choice(names)]
        if what < 0.02 and host.rank:
            self.events["rank died"] += 1
            self.end_rank(host, m.FAILED)
        elif what < 0.04 and not host.gone and host.back_at is None:
            self.events["keeper died"] += 1
            host.rank = host.head = None
            host.back_at = self.tick + rng.randint(1, 15)
        elif what < 0.06:
            self.events["host froze"] += 1
            host.thaws_at = self.tick + rng.randint(2, 25)
        elif what < 0.10 and len(names) > 1:
            self.events["link cut"] += 1
            one, other = rng.sample(names, 2)
            self.cut.add((one, other))
            if rng.random() < 0.6:
                self.cut.add((other, one))
        elif what < 0.11:
            self.events["split"] += 1
            side = set(rng.sample(names, rng.randint(1, len(names) - 1)))
            self.cut |= {(a, b) for a in names for b in names if (a in side) != (b in side)}
        elif what < 0.16 and self.cut:
            self.cut.discard(rng.choice(sorted(self.cut)))
        elif what < 0.18:
            self.cut.clear()
        elif what < 0.20:
            self.events["clock jumped"] += 1
            host.clock += rng.uniform(0, 60)

    # -- one second

    def step(self, disturbed):
        self.tick += 1
        if disturbed:
            self.disturb()
        for host in self.hosts.values():
            host.clock += 1
            if host.back_at is not None and self.tick >= host.back_at:
                self.awaken(host)
        self.train()
        self.deliver()
        for host in self.hosts.values():
            if host.runs(self.tick):
                self.keep(host)

    def awaken(self, host):
        rng = self.random
        host.back_at, host.heard, host.order = None, {}, ""
        if rng.random() < 0.5:
            host.clock = rng.uniform(0, 50)  # a reboot
        host.own = memory.awake(host.name, host.disk, host.clock, host.saved.step, returned=rng.random() < 0.5)

    def deliver(self):
        late = []
        for when, to, word in self.post:
            host = self.hosts[to]
            if when > self.tick:
                late.append((when, to, word))
            elif host.runs(self.tick):
                host.heard[word.host] = m.hear(host.heard.get(word.host), word, host.clock, self.rules.lost)
        self.post = late

    def keep(self, host):
        if host.rank and host.head:
            host.own = host.own._replace(word=host.own.word._replace(steps=host.head.step))
        before = host.own.word
        host.own, order = m.decide(self.rules, host.own, host.heard, host.clock)
        assert host.own.word.promised >= before.promised and host.own.word.started >= before.started
        host.disk = memory.to_remember(host.own)
        if order == m.START:
            self.start(host)
        elif order:
            host.order, host.ordered_at = order, self.tick
        word = host.own.word
        for name in self.rules.hosts:
            if name != host.name and (host.name, name) not in self.cut:
                self.post.append((self.tick + self.random.choice((0, 1, 1, 1, 2, 3)), name, word))

    def start(self, host):
        mine = host.own.word.generation
        assert host.rank is None, "a rank runs already"
        assert host.name in mine.members
        assert self.members.setdefault(mine.number, mine.members) == mine.members, "one number, two generations"
        assert m.may_train(self.rules, mine.members), "not enough to train"
        host.rank, host.head, host.order = mine, None, ""
        self.trained[mine.number, host.name] += 1
        assert self.trained[mine.number, host.name] == 1, "started twice in one generation"

    # -- the ranks

    def train(self):
        trains = 0
        for mine in {host.rank for host in self.hosts.values() if host.rank}:
            ranks = [self.hosts[name] for name in mine.members]
            here = [host for host in ranks if host.rank == mine]
            linked = not any((a, b) in self.cut for a in mine.members for b in mine.members)
            if len(here) == len(ranks) and linked and all(host.runs(self.tick) for host in ranks):
                self.advance(mine, ranks)
                trains += 1
            else:
                self.hang(here, met=any(host.head for host in here), dead=len(here) < len(ranks))
        if 2 * self.rules.least > len(self.rules.hosts):
            assert trains <= 1, "two generations train at once"

    def advance(self, mine, ranks):
        if any(host.head is None for host in ranks):
            assert all(host.head is None for host in ranks), "ranks of one generation did not begin together"
            best = max(ranks, key=lambda host: host.saved.step).saved
            if 2 * self.rules.least > len(self.rules.hosts):
                assert best.step >= self.everywhere, "a step that a whole generation had saved is lost"
            for host in ranks:
                host.head = host.saved = best
            self.events["generations trained"] += 1
        head = Lineage(ranks[0].head, ranks[0].head.step + 1, mine.number)
        assert all(host.head is ranks[0].head for host in ranks), "ranks of one generation have different weights"
        stop = any(host.order == m.FINISH_STEP for host in ranks)
        self.steps += 1
        for host in ranks:
            host.head = head
        if stop or head.step % SAVE_EVERY == 0:
            self.everywhere = max(self.everywhere, head.step)
            for host in ranks:
                host.saved = head
        if stop:
            self.events["ended to let in"] += 1
            for host in ranks:
                self.end_rank(host, m.STOPPED)

    def hang(self, here, met, dead):
        """Ranks whose peer is not there: they see a closed connection at once, and nothing at all of a cut or a freeze."""
        for host in here:
            if not host.runs(self.tick):
                continue
            sees = met and dead and self.random.random() < 0.5
            told = host.order == m.SAVE and self.random.random() < 0.5
            late = host.order and self.tick - host.ordered_at >= END_TICKS
            if sees or told or late:
                if host.head and not late and self.random.random() < 0.7:
                    host.saved = host.head
                    self.events["saved when a peer was lost"] += 1
                self.end_rank(host, m.FAILED)

    def end_rank(self, host, how):
        steps = host.saved.step
        host.rank, host.head, host.order = None, None, ""
        host.own = m.rank_ended(host.own, host.clock, steps, how)

    # -- the end of a schedule

    def check_lineages(self):
        for host in self.hosts.values():
            one = host.head or host.saved
            while one.before is not None:
                assert one.step == one.before.step + 1, "a step was counted twice or left out"
                assert one.number >= one.before.number or 2 * self.rules.least <= len(self.rules.hosts)
                one = one.before

    def prove(self, ticks):
        """So many disturbed seconds, then peace for a sufficient set, which trains within the bound; returns the wait."""
        for dummy in range(ticks):
            self.step(disturbed=True)
        self.check_lineages()
        self.cut.clear()
        stable = self.stable_set()
        for host in self.hosts.values():
            host.thaws_at = 0
            if host.name not in stable:
                host.gone, host.rank, host.head = True, None, None
        rules, begun, steps = self.rules, self.tick, self.steps
        bound = 2 * (rules.lost + rules.grace + rules.offer + END_TICKS) + rules.first_grace + rules.begin + 20
        while self.tick - begun < bound:
            self.step(disturbed=False)
            failed = [h for h in self.hosts.values() if h.own.word.state == m.FAILED]
            if failed:
                assert "3 times at step" in failed[0].own.word.why, failed[0].own
                self.events["given up"] += 1
                return 0
            assert not any(h.own.word.state in (m.STOPPED, m.FINISHED) for h in self.hosts.values())
            if self.steps > steps + 1:
                self.check_lineages()
                return self.tick - begun
        raise AssertionError("no progress in %d s with %s: %s" % (bound, stable, [h.own for h in self.hosts.values()]))

    def stable_set(self):
        """All hosts, or some that are enough."""
        names = self.rules.hosts
        if self.random.random() < 0.5:
            some = set(self.random.sample(names, self.random.randint(1, len(names))))
            returned = any(self.hosts[name].own.returned or self.hosts[name].back_at for name in some)
            asking = any(self.hosts[name].own.word.state == m.ASKING for name in some)
            if m.may_train(self.rules, some) and not returned and not asking:
                return some
        return set(names)


def prove(first, count, ticks=45):
    """Run schedules; returns what happened in them, and how long a sufficient set took to train again."""
    events, waits = collections.Counter(), []
    for seed in range(first, first + count):
        world = World(seed)
        try:
            waits.append(world.prove(ticks))
        except AssertionError as error:
            raise AssertionError("schedule %d: %s" % (seed, error)) from error
        events.update(world.events)
        events["steps"] += world.steps
    return events, waits


if __name__ == "__main__":
    happened, seconds = prove(0, int(sys.argv[1]))
    for name, times in sorted(happened.items()):
        print("%-28s %8d" % (name, times))
    print("%-28s %8d (mean %.1f)" % ("longest wait for a step, s", max(seconds), sum(seconds) / len(seconds)))
