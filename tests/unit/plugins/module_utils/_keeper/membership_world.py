# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulates hosts with keepers and ranks, and the links between them, under random faults, one second a tick.

The keepers are the real ones (simulated_host.py); ranks, network and sessions are minimal imitations. `Checks` asserts the
invariants in every second. Each schedule ends with peace for some hosts (which must then train), with a user's stop, or with the
last step. A schedule that fails prints its seed and each keeper's log; `prove(SEED, 1)` runs it alone.
"""

from __future__ import annotations

import collections
import json
import random
import signal

from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership as m
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import talk
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.membership import Rules, may_train
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.causes import Cause
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._keeper.simulated_host import (
    END_SECONDS,
    LEAVE,
    LINGER,
    MEMORY,
    STOP,
    WALL,
    WALL_SECONDS,
    Host,
    Lineage,
    plan_of,
    simulated,
)

SAVE_EVERY = 5
TIMEOUT = 25  # how long a rank waits for another one
EVER = 10**9


class Checks:
    """Invariants, by name."""

    def __init__(self, rules):
        self.rules = rules
        self.members = {}  # number -> members, for ever
        self.begun = set()
        self.last = {}  # host -> the generation in which it was last
        self.stopped = set()  # where the user stopped the run
        self.gave_up = set()  # hosts whose own errors ended it there
        self.everywhere = 0  # newest step that all members of a generation have saved
        self.parts = 2 * rules.least <= len(rules.hosts)  # parts may train apart

    def starts(self, host, mine):
        """A keeper starts its rank."""
        assert host.rank is None, "a rank runs already"
        once = host.name in mine.members and (host.name, mine.number) not in self.begun
        assert once, "started twice in one generation"
        self.begun.add((host.name, mine.number))
        # A host that was off while the user stopped a host of the newest generation does not continue.
        before = max((self.last[name] for name in mine.members if name in self.last), default=None)
        assert before is None or not self.stopped & set(before.members), "it went on, though a user had stopped it"
        self.last[host.name] = mine
        assert self.members.setdefault(mine.number, mine.members) == mine.members, "one number, two generations"

    def turned(self, before, host, hosts):
        """A keeper has had its turn."""
        public = host.own.public
        assert public.promised >= before.promised and public.started >= before.started, "a promise was taken back"
        if public.state == m.OFFERED != before.state:
            assert may_train(self.rules, public.generation.members, public.left), "not enough to train"
        if public.state == m.STOPPED:
            assert any(STOP in one.disk for one in hosts.values()), "stopped, though no user asked for it"
        if public.state == m.FAILED:
            self.only_own_errors_end_it(host, hosts)

    def only_own_errors_end_it(self, host, hosts):
        """Lost hosts and signals never do, however many, nor do the errors of one host where the others are enough."""
        if host.crashes >= 3:
            self.gave_up.add(host.name)
            return
        crashed = [one for one in hosts.values() if one.crashes]
        several = len(crashed) > 1 and sum(one.crashes for one in crashed) >= 3
        # Also those of whose leaving this host has not heard; it may have heard of one who gave up for that.
        left = [*host.own.public.left, *(name for name, one in hosts.items() if one.own.public.state == m.LEFT)]
        too_few = self.gave_up and not may_train(self.rules, set(self.rules.hosts) - {*self.gave_up, *left}, left)
        assert several or too_few, "one host's errors ended the run for another"

    def each_step_once(self, host):
        one = (host.rank and host.rank.head) or host.saved
        while one.before is not None:
            assert one.step == one.before.step + 1, "a step was counted twice or left out"
            assert one.number >= one.before.number or self.parts, "an older generation followed a newer one"
            one = one.before


class World:
    """All hosts and links of one schedule."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        size = rng.choice((2, 2, 3, 3, 3, 4, 5))
        names = tuple("abcde"[:size])
        least = rng.choice((size, size, size // 2 + 1, max(1, size // 2), 1))
        restarts = rng.choice((3, 10**6))
        self.rules = Rules(names, least, rng.choice((0, 4, 10)), first_grace=15, restarts=restarts, joinable_after=5)
        plan = plan_of(self.rules, TIMEOUT)
        self.hosts = {name: Host(name, rng.uniform(0, 1000), plan, self) for name in names}
        self.checks = Checks(self.rules)
        self.cut = {}  # (from, to) -> until when
        self.post = collections.defaultdict(list)  # when it arrives -> (to, word)
        self.arrives = collections.Counter()  # (from, to) -> when the last message arrives
        self.tick = self.steps = 0
        self.last_step = EVER
        self.has_heard_lies = False
        self.trouble = rng.choice((0.05, 0.12, 0.25))
        # Some schedules have few kinds of faults, so that combinations of two are not hidden by the others.
        share = rng.choice((0.2, 0.5, 1.0, 1.0))
        self.faults = {fault: often for fault, often in OFTEN.items() if fault in HEALING or rng.random() < share}
        self.events = collections.Counter()
        if rng.random() < 0.1:
            self.events["a host is sick"] += 1
            self.hosts[rng.choice(names)].sick_at = rng.randint(1, 12)
        for host in self.hosts.values():
            host.boot()

    # -- what goes wrong

    def disturb(self):
        """Maybe one fault; it returns False where it cannot happen."""
        rng = self.random
        host = self.hosts[rng.choice(self.rules.hosts)]
        if rng.random() < self.trouble and not host.gone:
            fault = rng.choices(list(self.faults), list(self.faults.values()))[0]
            if fault(self, host) is not False:
                self.events[name_of(fault)] += 1

    def a_rank_died(self, host):
        return bool(host.rank) and self.crash(host)

    def a_rank_cannot_start(self, host):
        """For a while or for good: its Python is broken, or memory too short to load anything."""
        host.broken_until = self.tick + self.random.choice((2, 15, EVER))

    def a_rank_was_told_to_end(self, host):
        if not host.rank or host.rank.told:
            return False
        host.rank.told = True
        return True

    def a_rank_was_frozen(self, host):
        if not host.rank:
            return False
        host.rank.stopped = True
        return True

    def a_keeper_says_nonsense(self, host):
        host.lies_until, self.has_heard_lies = self.tick + self.random.choice((1, 5, 30)), True

    def a_rank_cannot_be_killed(self, host):
        host.unkillable_until = self.tick + self.random.randint(5, 40)
        return bool(host.rank)

    def a_keeper_died(self, host):
        return self.switch_off(host, self.random.randint(1, 15), was_off=self.random.random() < 0.3)

    def a_keeper_was_told_to_end(self, host):
        """Its session starts it again."""
        host.keeper.signals.add(signal.SIGTERM)
        return host.runs()

    def a_power_cut(self, host):
        return self.switch_off(host, self.random.randint(8, 30), was_off=True)

    def a_reboot(self, host):
        if not host.runs() or host.over_at is not None or host.off_at:
            return False
        host.keeper.signals.add(signal.SIGTERM)
        host.off_at = self.tick + self.random.randint(1, 10)
        return True

    def a_late_network(self, host):
        host.deaf_until = self.tick + self.random.randint(2, 30)
        return self.switch_off(host, self.random.randint(8, 20), was_off=True)

    def a_spoilt_memory(self, host):
        host.disk[MEMORY] = "{}"
        return self.switch_off(host, self.random.randint(1, 15), was_off=self.random.random() < 0.5)

    def a_new_disk(self, host):
        """It belongs to another start of the run, or to none, so nobody hears it any more."""
        if self.random.random() < 0.8:
            return False
        host.gone, host.process, host.saves = True, None, {}
        self.forget_saved()
        return True

    def a_full_disk(self, host):
        host.full_until = self.tick + self.random.choice((3, 10, 40, EVER))

    def a_freeze(self, host):
        host.thaws_at, host.is_suspended = self.tick + self.random.randint(2, 25), False

    def a_suspend(self, host):
        """Its clock stands still, too."""
        host.thaws_at, host.is_suspended = self.tick + self.random.randint(2, 40), True

    def a_need_of_the_owner(self, host):
        """For minutes or for a moment: also in the middle of a start, and again as soon as it is back."""
        host.needed_until = self.tick + self.random.choice((1, 2, 5, 30))

    def a_jump_of_the_clock(self, host):
        host.clock += self.random.uniform(0, 60)

    def a_cut(self, host, until=EVER):
        other = self.random.choice([name for name in self.rules.hosts if name != host.name])
        self.cut[host.name, other] = until
        if self.random.random() < 0.6:
            self.cut[other, host.name] = until

    def a_flap(self, host):
        return self.a_cut(host, self.tick + self.random.randint(3, 12))

    def a_split(self, host):
        names = self.rules.hosts
        side = set(self.random.sample(names, self.random.randint(1, len(names) - 1)))
        self.cut.update({(a, b): EVER for a in names for b in names if (a in side) != (b in side)})

    def a_repair(self, host):
        if self.random.random() < 0.3:
            self.cut.clear()
        elif self.cut:
            del self.cut[self.random.choice(sorted(self.cut))]

    def a_leave(self, host):
        if not host.runs() or host.over_at is not None:
            return False
        host.disk[LEAVE] = ""
        return True

    def a_join(self, host):
        """A user lets in a host whose keeper has ended."""
        if host.over_at is None or host.off_at or host.back_at is not None:
            return False
        host.disk.pop(LEAVE, None)
        # It knows only who had left before it; hosts that all left, and are let in one by one, may train apart.
        self.checks.parts = self.checks.parts or bool(host.own.public.left)
        return self.switch_off(host, 1, was_off=True)

    def switch_off(self, host, seconds, was_off):
        if host.back_at is not None:
            return False
        host.process = None
        host.back_at, host.restarted = self.tick + seconds, not was_off
        return True

    def crash(self, host):
        host.crashes += 1
        host.rank.end(1)

    def forget_saved(self):
        """Steps are gone if only hosts had them that a user removed."""
        here = [host.saved.step for host in self.hosts.values() if not host.gone and LEAVE not in host.disk]
        self.checks.everywhere = min(self.checks.everywhere, max(here, default=0))

    # -- one second

    def step(self, disturbed):
        self.tick += 1
        if disturbed:
            self.disturb()
        if any(until <= self.tick for until in self.cut.values()):
            self.cut = {link: until for link, until in self.cut.items() if until > self.tick}
        for host in self.hosts.values():
            self.pass_time(host)
        self.train()
        self.deliver()
        for host in self.hosts.values():
            if host.runs():
                self.keep(host)

    def pass_time(self, host):
        if self.tick < host.thaws_at and host.is_suspended:
            host.suspended += 1
        else:
            host.clock += 1
        host.wall += WALL_SECONDS
        host.is_full, host.is_used = self.tick < host.full_until, self.tick < host.needed_until
        host.unkillable = self.tick < host.unkillable_until
        if host.off_at and self.tick >= host.off_at:
            host.off_at, host.over_at = 0, None
            self.switch_off(host, self.random.randint(5, 20), was_off=True)
        if host.back_at is not None and self.tick >= host.back_at:
            self.awaken(host)

    def awaken(self, host):
        host.back_at, host.mail = None, {}
        if host.is_asked():
            # A host that was removed or stopped does not start again by itself.
            host.over_at = self.tick - LINGER
            return
        host.over_at = None
        if not host.restarted and self.random.random() < 0.8:
            host.clock, host.boots = self.random.uniform(0, 50), host.boots + 1
        host.boot()

    def deliver(self):
        for to, public in self.post.pop(self.tick, ()):
            host = self.hosts[to]
            if host.runs() and self.tick >= host.deaf_until:
                host.keeper.talk.received.put(public)
            elif self.tick < host.thaws_at:
                # The answer to its last question waits in its socket.
                host.mail.setdefault(public.host, public)

    def keep(self, host):
        """One turn of a keeper."""
        if host.mail:
            for public in host.mail.values():
                host.keeper.talk.received.put(public)
            host.mail = {}
        if host.over_at is None:
            self.turn(host)
        public = host.keeper.talk.public(host.clock)
        if self.tick < host.deaf_until or public is None:
            return
        for name in self.rules.hosts:
            if name != host.name and (host.name, name) not in self.cut:
                late = self.tick + 1 + int(self.random.random() * 3) * (self.random.random() < 0.6)
                # Late, but in order: a host waits for each answer before it asks again.
                late = self.arrives[host.name, name] = max(late, self.arrives[host.name, name])
                # Reading takes a third of the time, and what no lie has touched fits.
                said = self.read(public, host) if self.has_heard_lies else public
                if said is not None:
                    self.post[late].append((name, said))

    def read(self, public, host):
        """A word where it is read; None if it is refused there."""
        lie = self.random.choice(NONSENSE) if self.tick < host.lies_until else {}
        text = json.dumps({**public._asdict(), **lie})
        try:
            return talk.to_state(text, self.rules.hosts, host.wall)
        except (ValueError, KeyError, TypeError):
            return None

    def turn(self, host):
        before = host.own.public
        host.turn()
        public = host.own.public
        self.events["guests came back"] += before.state == m.RESTING != public.state
        self.events["hosts gave up"] += before.state != m.FAILED == public.state
        self.checks.turned(before, host, self.hosts)
        if host.keeper.over():
            self.forget_saved()
            if public.state == m.AWAY and not host.off_at:
                self.switch_off(host, 2, was_off=False)
            else:
                host.over_at = self.tick

    # -- the ranks

    def train(self):
        trains = 0
        for host in self.hosts.values():
            if host.rank and host.rank.head is None and self.tick < host.broken_until:
                self.crash(host)
        for mine in {host.rank.generation for host in self.hosts.values() if host.rank}:
            ranks = [self.hosts[name] for name in mine.members]
            here = [host for host in ranks if host.rank and host.rank.generation == mine]
            linked = not any((a, b) in self.cut for a in mine.members for b in mine.members)
            able = all(self.tick >= host.thaws_at and host.can_compute() for host in here)
            if len(here) == len(ranks) and linked and able:
                self.advance(mine, ranks)
                trains += 1
            else:
                self.hang(here, met=any(host.rank.head for host in here), dead=len(here) < len(ranks))
        assert trains <= 1 or self.checks.parts, "two generations train at once"

    def advance(self, mine, ranks):
        if any(host.rank.head is None for host in ranks):
            assert all(host.rank.head is None for host in ranks), "ranks of one generation did not begin together"
            best = max(ranks, key=lambda host: host.saved.step).saved
            kept = best.step >= self.checks.everywhere or self.checks.parts
            assert kept, "a step that a whole generation had saved is lost"
            for host in ranks:
                host.save(best)
                host.rank.head = best
                host.write_event("start", resumed_from=best.step)
                host.write_beat(host.rank, "step")
            self.events["generations trained"] += 1
        sick = next((host for host in ranks if host.sick_at is not None and host.rank.head.step >= host.sick_at), None)
        if sick:
            self.crash(sick)
            return
        same = all(host.rank.head is ranks[0].rank.head for host in ranks)
        assert same, "ranks of one generation have different weights"
        head = Lineage(ranks[0].rank.head, ranks[0].rank.head.step + 1, mine.number)
        over = head.step >= self.last_step
        stop = any(host.rank.told for host in ranks)
        self.steps += 1
        for host in ranks:
            host.rank.head, host.rank.waits_since = head, self.tick
            host.write_event("step", step=head.step - 1)
        if stop or over or head.step % SAVE_EVERY == 0:
            self.checks.everywhere = max(self.checks.everywhere, head.step)
            for host in ranks:
                host.save(head)
        if stop or over:
            self.events["ended in order"] += 1
            for host in ranks:
                # It may hang while it exits.
                host.rank.end(0 if self.random.random() < 0.7 else None, reason="finished" if over else "stopped")

    def hang(self, here, met, dead):
        """Ranks whose peer is missing: they notice a closed connection at once, but neither a cut link nor a frozen host."""
        for host in here:
            if self.tick < host.thaws_at or not (host.can_compute() or host.hung_up()):
                continue
            sees = met and dead and self.random.random() < 0.5
            told = host.hung_up() and self.random.random() < 0.5
            if sees or told or self.tick - host.rank.waits_since > TIMEOUT:
                if host.rank.head and self.random.random() < 0.7:
                    host.save(host.rank.head)
                    self.events["saved when a peer was lost"] += 1
                host.rank.end(1, reason="failed", cause=Cause.PEER_LOST.value)

    # -- the end of a schedule

    def prove(self, ticks):
        """Disturb for this many seconds, then end the schedule in one of three ways; returns the wait for a step, or None."""
        end = self.random.choices((self.peace, self.user_stops, self.last_steps), (7, 2, 1))[0]
        for dummy in range(ticks):
            self.step(disturbed=True)
        for host in self.hosts.values():
            self.checks.each_step_once(host)
            host.thaws_at = host.deaf_until = host.needed_until = host.lies_until = 0
            # What lasts for good is no reason for the others to wait.
            host.broken_until, host.full_until = (
                until if until >= EVER else 0 for until in (host.broken_until, host.full_until)
            )
            # An unkillable rank remains unkillable; its keeper continues to answer.
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
        twice = rules.lost + rules.grace + rules.offer + rules.begin + int(END_SECONDS)
        return TIMEOUT + 2 * twice + rules.first_grace + 40

    def quiet(self, condition, what):
        """Peace until a condition holds; returns the seconds."""
        begun = self.tick
        while not condition():
            owns = [host.own for host in self.hosts.values()]
            assert self.tick - begun < self.bound, "%s in %d s: %s" % (what, self.bound, owns)
            self.step(disturbed=False)
        return self.tick - begun

    def user_stops(self):
        """On all hosts that are on: their ranks end. Hosts that were off or asleep come back, and do not continue."""
        for host in self.hosts.values():
            if self.random.random() < 0.3:
                self.random.choice((World.a_suspend, World.a_power_cut))(self, host)
        # A host that sleeps only for a moment is stopped when it wakes.
        soon = self.tick + self.rules.lost + self.rules.grace
        on = [host for host in self.hosts.values() if host.back_at is None and not host.gone and not host.off_at]
        on = [host for host in on if host.thaws_at <= soon]
        keeperless = [host for host in self.hosts.values() if host.back_at is not None and host.restarted]
        for host in on + keeperless:
            host.disk[STOP] = ""
        # A host that was off takes one that was taken out before, and let in since, for out.
        out = {name for host in self.hosts.values() if host not in on for name in host.own.public.left}
        self.checks.stopped = {host.name for host in on if host.over_at is None} - out
        on = [host for host in on if not host.unkillable_until]
        self.quiet(lambda: all(host.over_at is not None for host in on), "not stopped")
        assert not any(host.rank for host in on)
        for dummy in range(80):
            self.step(disturbed=False)
        self.events["stopped"] += 1

    def last_steps(self):
        """The run ends by itself on all hosts that make the last step."""
        if self.peaceful() is None:
            self.events["not enough were left"] += 1
            return
        self.last_step = max(host.saved.step for host in self.hosts.values()) + 8

        def finished():
            states = [host.own.public.state for host in self.hosts.values()]
            return m.FINISHED in states or m.FAILED in states

        self.quiet(finished, "not finished")
        self.events["finished"] += 1

    def peace(self):
        """For a sufficient set, which trains within the bound."""
        stable = self.peaceful()
        if stable is None:
            self.events["not enough were left"] += 1
            return None
        begun, steps = self.tick, self.steps

        def trains():
            assert not any(host.own.public.state in (m.STOPPED, m.FINISHED) for host in self.hosts.values()), "over"
            return self.steps > steps + 1 or any(self.hosts[name].own.public.state == m.FAILED for name in stable)

        self.quiet(trains, "no progress with %s" % (stable,))
        beside = [host for name, host in self.hosts.items() if name not in stable and not host.gone]
        for what in ("broken", "full"):
            self.events["trained beside a host that is %s" % what] += sum(
                bool(getattr(host, what + "_until")) for host in beside
            )
        if self.steps <= steps + 1:
            # Checks.only_own_errors_end_it tells whether it may give up.
            self.events["given up"] += 1
            return None
        return self.tick - begun

    def own_to_be(self, host):
        """The state of its next keeper, or of this one if it goes on; a suspend that it has not noticed yet counts."""
        host.restarted = host.restarted and not host.off_at
        if host.back_at is not None or host.off_at:
            return host.next_own()
        slept = host.clock + host.suspended + 1 - host.keeper.awake > self.rules.lost + self.rules.grace
        return host.own.with_fields(returned=host.own.public.returned or slept)

    def known_to_be_out(self, name, kind):
        """The hosts that this host remembers as left or failed."""
        return json.loads(self.hosts[name].disk.get(MEMORY, "{}")).get(kind, ())

    def peaceful(self):
        """Choose hosts that can and must train, and switch off the others; None if there are no such hosts."""
        able = [name for name, host in self.hosts.items() if host.may_train_again()]
        if self.random.random() < 0.5 and able:
            able = self.random.sample(able, self.random.randint(1, len(able)))
        keepers = [self.own_to_be(self.hosts[name]) for name in able]
        left, failed = (
            {out for name in able for out in self.known_to_be_out(name, kind)} for kind in ("left", "failed")
        )
        if not able or not may_train(self.rules, able, tuple(left - set(able))):
            return None
        for public in (own.public for own in keepers):
            witnesses = set(public.last.members if public.last else self.rules.hosts)
            if public.returned and not witnesses <= {*able, *left, *failed}:
                return None  # It may wait for those who know whether the run was stopped.
        for name, host in self.hosts.items():
            if name not in able and not host.is_hindered():
                host.gone, host.process = True, None
                for messages in self.post.values():
                    messages[:] = [(to, public) for to, public in messages if public.host != name]
        self.forget_saved()
        return able


OFTEN = {
    World.a_rank_died: 8, World.a_rank_was_told_to_end: 5, World.a_rank_was_frozen: 5, World.a_rank_cannot_be_killed: 3,
    World.a_keeper_died: 8, World.a_keeper_was_told_to_end: 4, World.a_power_cut: 5, World.a_reboot: 8,
    World.a_late_network: 3, World.a_spoilt_memory: 2, World.a_new_disk: 2, World.a_freeze: 8, World.a_suspend: 8,
    World.a_full_disk: 4, World.a_jump_of_the_clock: 5, World.a_cut: 12, World.a_flap: 8, World.a_split: 4, World.a_repair: 30,
    World.a_leave: 4, World.a_join: 20, World.a_need_of_the_owner: 12, World.a_rank_cannot_start: 4,
    World.a_keeper_says_nonsense: 4,
}  # fmt: skip
HEALING = (World.a_repair, World.a_join)
NONSENSE = (
    {"promised": 2**53 - 1}, {"last": [2**53 - 1, ["a"]]}, {"generation": [WALL + 10**8, ["a", "b"]]}, {"state": "king"}, {"steps": -1},
    {"outranked": 10**30}, {"hears": ["z"]}, {"regroup": "all"}, {"last": [1]}, {"apart": None}, {"left": 5}, {"generation": []},
)  # fmt: skip


def name_of(fault):
    return fault.__name__.partition("_")[2].replace("_", " ")


def prove(first, count, ticks=60):
    """Run schedules; returns what happened in them, and how long a sufficient set took to train again."""
    events, waits = collections.Counter(), []
    with simulated():
        for seed in range(first, first + count):
            world = World(seed)
            try:
                waited = world.prove(ticks)
            except AssertionError as error:
                logs = "".join("%s\n  %s\n" % (host.name, "\n  ".join(host.log)) for host in world.hosts.values())
                raise AssertionError("schedule %d, second %d: %s\n%s" % (seed, world.tick, error, logs)) from error
            waits += [] if waited is None else [waited]
            events.update(world.events)
            events["steps"] += world.steps
    return events, waits
