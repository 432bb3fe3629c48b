# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides who trains: every decision of a keeper, as pure functions of its state and the messages it received.

Hosts that train together are a *generation*: a number, and its members in rank order, the first of which is the
master. Keepers only exchange their states (`KeeperState`); nobody commands anybody. From its own state, the messages
and the monotonic clock, `decide` computes the next state and at most one order for this host's rank.

A generation starts in three steps: the first host in plan order that is heard by those it hears offers one (`OFFERED`),
each member promises to join it and no older one (`PROMISED`), and once all have, the offer is effective and ranks start. A
number encodes the host that offers it, and is on disk before it is published, so no two generations share
one; a host joins only the newest that it promised, so it never trains in two.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .._contract.keeper_states import (
    ASKING,
    AWAY,
    ENDING,
    FAILED,
    FINISHED,
    IDLE,
    LEFT,
    OFFERED,
    OVER,
    PROMISED,
    RESTING,
    STOPPED,
    STUCK,
    TRAINING,
)

# Orders for the host's rank: start; finish the step, save and exit; save what is possible and exit.
START, FINISH_STEP, SAVE = "start", "finish step", "save"
HOUR = 3600.0
DEATHS_AT_ONE_STEP = 3  # deaths at one step before giving up
STALLS_AT_ONE_STEP = 10  # the same of ranks that only lose each other while all hosts are there


class Rules(NamedTuple):
    """The plan's rules; times in seconds."""

    hosts: Tuple[str, ...]  # in plan order
    least: int  # ddp_min_hosts
    grace: float  # ddp_grace: how long to wait for a missing host
    first_grace: float  # the same before the first generation, which needs all hosts
    restarts: int = 3  # deaths per hour before giving up
    lost: float = 6.0  # a host silent for this long (two messages and more) is missing
    offer: float = 10.0  # how long an offer waits for promises
    begin: float = 30.0  # time for a promised member to start its rank
    joinable_after: float = 20.0  # minimum training time of a generation before a host may join


class Generation(NamedTuple):
    """A set of hosts that train together; the first member is the master."""

    number: int
    members: Tuple[str, ...]


class KeeperState(NamedTuple):
    """A keeper's state as published to the others."""

    host: str
    state: str = IDLE
    generation: Optional[Generation] = None  # offered, promised, or the one in which its rank runs or ran last
    promised: int = 0  # joins no generation below this number
    last: Optional[Generation] = None  # the newest in which it has started a rank
    steps: int = 0  # steps done
    hears: Tuple[str, ...] = ()
    regroup: int = 0  # this generation ends only to begin a new one
    apart: bool = False  # its steps since the split do not count, because the others have more
    outranked: int = 0  # the generation with fewer steps that should yield
    left: Tuple[str, ...] = ()  # hosts that were removed by hand
    failed: Tuple[str, ...] = ()  # hosts that have given up
    stopping: bool = False  # a user stops the run: its rank finishes the step, and so do all ranks
    returned: bool = False  # it was off, so the run may have been stopped meanwhile
    restarted: bool = False  # its keeper has not survived the last generation
    why: str = ""

    @property
    def started(self) -> int:
        """The number of `last`."""
        return self.last.number if self.last else 0


class Death(NamedTuple):
    """The end of this host's rank by an error or crash of its own, not because another rank or its link was lost."""

    when: float
    step: int


class OwnState(NamedTuple):
    """A keeper's state: the public part, and private data."""

    public: KeeperState
    since: float = 0.0  # when the state began
    deaths: Tuple[Death, ...] = ()
    stalls: Tuple[int, int] = (0, 0)  # a step, and how often its rank lost another one there while all hosts were there
    after_ending: str = IDLE  # the state that ENDING leads to

    def with_fields(self, **fields: object) -> OwnState:
        """The same with other values in these public fields."""
        return self._replace(public=self.public._replace(**fields))  # type: ignore[arg-type]


class Received(NamedTuple):
    """Another host's last message, its time, and the start of its uninterrupted sequence."""

    public: KeeperState
    at: float
    since: float


Messages = Mapping[str, Received]
States = Mapping[str, KeeperState]


# -- who may train


def wanted(rules: Rules, left: Sequence[str]) -> Tuple[str, ...]:
    """The hosts of the plan that were not removed by hand."""
    return tuple(host for host in rules.hosts if host not in left)


def expected(rules: Rules, left: Sequence[str], failed: Sequence[str]) -> Tuple[str, ...]:
    """The hosts to wait for: neither removed by hand nor given up."""
    return tuple(host for host in wanted(rules, left) if host not in failed)


def may_train(rules: Rules, members: Iterable[str], left: Sequence[str] = ()) -> bool:
    """Whether these are enough: ddp_min_hosts, or all that were not removed.

    If ddp_min_hosts is at most half of the hosts, the user allows both parts of a split to continue; with
    more, only one part can be large enough.
    """
    return 0 < len(set(members)) >= min(rules.least, len(wanted(rules, left)))


# -- evaluating messages


def present(own: OwnState, states: States) -> Dict[str, KeeperState]:
    """Those that also hear us and are not over, so can train with us; a link that works one way does not count."""
    me, out = own.public.host, (ASKING, STUCK, RESTING, *OVER)
    return {host: other for host, other in states.items() if me in other.hears and other.state not in out}


def awaited(rules: Rules, public: KeeperState, there: Iterable[str]) -> Set[str]:
    """The hosts to wait for, besides those that are there."""
    return set(expected(rules, public.left, public.failed)) - set(there)


def clique_around(rules: Rules, own: OwnState, around: States) -> Tuple[str, ...]:
    """We and the present hosts that all hear each other, in plan order."""
    chosen: List[str] = []
    for host in rules.hosts:
        if host in around and all(other in around[host].hears and host in around[other].hears for other in chosen):
            chosen.append(host)
    return tuple(host for host in rules.hosts if host in (*chosen, own.public.host))


def next_number(rules: Rules, own: OwnState, states: States) -> int:
    """The next number above all known ones that no other host can choose."""
    highest = max([own.public.promised, own.public.started, *(max(w.promised, w.started) for w in states.values())])
    return highest + 1 + (rules.hosts.index(own.public.host) - highest) % len(rules.hosts)


def change(own: OwnState, now: float, state: str, **fields: object) -> OwnState:
    """Change state now; fields are those of the public part."""
    return own.with_fields(state=state, **fields)._replace(since=now)


def _end(own: OwnState, now: float, **fields: object) -> OwnState:
    """End this host's rank, and be idle afterwards; fields are those of the public part."""
    return change(own, now, ENDING, **fields)._replace(after_ending=IDLE)


def decide(rules: Rules, own: OwnState, received: Messages, now: float) -> Tuple[OwnState, str]:
    """The next state, and an order for this host's rank ("" for none)."""
    states = {host: one.public for host, one in received.items() if now - one.at <= rules.lost}
    own = _learn_who_is_out(own, states)
    others = [host for host in (own.public.last.members if own.public.last else ()) if host != own.public.host]
    if any(host not in states or states[host].restarted for host in others):
        own = own._replace(stalls=(0, 0))
    state = own.public.state
    if state in OVER or state == STUCK:
        return own, ""
    if state == ENDING:
        # A rank that should end cleanly cannot once another is lost.
        return own, SAVE if _missing(rules, own, received, now) else ""
    if state == TRAINING:
        return _train(rules, own, received, states, now)
    for other in states.values():
        if other.state == STOPPED or other.stopping:
            return change(own, now, STOPPED, why="%s was stopped" % other.host), ""
        if other.state == FINISHED:
            return change(own, now, FINISHED, why="%s has finished" % other.host), ""
    if not may_train(rules, expected(rules, own.public.left, own.public.failed), own.public.left):
        reasons = [states[host].why for host in own.public.failed if host in states and states[host].why]
        why = "%s gave up%s" % (" and ".join(own.public.failed), ": " + reasons[0] if reasons else "")
        return change(own, now, FAILED, why=why), ""
    if state in (ASKING, RESTING):
        return _settle(rules, own, states, now) if state == ASKING else own, ""
    return _gather(rules, own, received, states, now)


def _learn_who_is_out(own: OwnState, states: States) -> OwnState:
    """Learn about hosts removed by hand or given up; a host's own message takes precedence."""
    all_states = (own.public, *states.values())

    def known(state: str, named: Iterable[Tuple[str, ...]]) -> Tuple[str, ...]:
        out = {host for hosts in named for host in hosts if host not in states and host != own.public.host}
        return tuple(sorted(out | {host for host, other in states.items() if other.state == state}))

    left, failed = known(LEFT, (w.left for w in all_states)), known(FAILED, (w.failed for w in all_states))
    return own.with_fields(hears=tuple(sorted(states)), left=left, failed=failed)


# -- before a generation


def _gather(rules: Rules, own: OwnState, received: Messages, states: States, now: float) -> Tuple[OwnState, str]:
    """While idle, or between offer and start."""
    me, around = own.public.host, present(own, states)
    if own.public.state == OFFERED:
        return _offering(rules, own, states, now)
    mine = own.public.generation
    caller = states.get(mine.members[0]) if mine is not None else None
    # The newest promised generation starts once it is effective.
    is_effective = caller is not None and (caller.generation, caller.state) == (mine, TRAINING)
    if mine is not None and is_effective and own.public.started < mine.number == own.public.promised:
        return _started(own, mine, now), START
    if own.public.state == PROMISED:
        # The host that made our promised offer still offers it; a silent one may.
        offers = caller is None or (caller.promised == own.public.promised and caller.state in (OFFERED, TRAINING))
        if offers and now - own.since <= rules.begin:
            return own, ""
        own = change(own, own.since, IDLE)
    first = next(host for host in rules.hosts if host == me or host in around)
    if first != me:
        # Join the first host's offer, if it is newer than all that this host has promised.
        theirs = around[first].generation if around[first].state == OFFERED else None
        if theirs is not None and me in theirs.members and theirs.number > own.public.promised:
            own = change(own, now, PROMISED, generation=theirs, promised=theirs.number)
        return own, ""
    members = clique_around(rules, own, around)
    busy = any(other.state in (TRAINING, ENDING) for other in around.values())
    if busy or not may_form(rules, own, received, members, now):
        return own, ""
    offer = Generation(next_number(rules, own, states), members)
    return change(own, now, OFFERED, generation=offer, promised=offer.number), ""


def may_form(rules: Rules, own: OwnState, received: Messages, members: Tuple[str, ...], now: float) -> bool:
    """Whether the host in charge may offer a generation of these members now."""
    if not may_train(rules, members, own.public.left):
        return False
    missing = awaited(rules, own.public, members)
    if not missing:
        return True
    known = [own.public, *(received[host].public for host in members if host in received)]
    if may_be_stopped(rules, known, missing):
        return False
    missing_are = {received[host].public.state if host in received else "" for host in missing}
    if missing_are == {RESTING}:
        return True
    if not any(other.started for other in known):
        # Nothing was trained yet, so a missing host has never been there.
        return now - own.since >= rules.first_grace
    # A host that announced its shutdown is not back before it is heard again.
    return now - own.since >= rules.grace or missing_are == {AWAY}


def may_be_stopped(rules: Rules, known: Sequence[KeeperState], missing: Set[str]) -> bool:
    """Whether a missing host of the newest generation may know that the run was stopped, since the others of it were off."""
    newest = max((other.last for other in known if other.last), default=Generation(0, rules.hosts))
    # One that only took part in an older one may have been off at the time, and have gone on by itself.
    witnesses = [other for other in known if other.started >= newest.number]
    return bool(missing & set(newest.members)) and all(other.returned for other in witnesses)


def _current_generation(own: OwnState) -> Generation:
    """The generation of a state that must have one."""
    if own.public.generation is None:
        raise ValueError(f"{own.public.host} is {own.public.state} without a generation")
    return own.public.generation


def _started(own: OwnState, generation: Generation, now: float) -> OwnState:
    fresh_start = {"regroup": 0, "outranked": 0, "returned": False, "restarted": False, "apart": False, "why": ""}
    return change(own, now, TRAINING, last=generation, **fresh_start)


def _offering(rules: Rules, own: OwnState, states: States, now: float) -> Tuple[OwnState, str]:
    """Start when all have promised; give up if one has promised a newer one, or not in time, or if all have slept since."""
    offer = _current_generation(own)
    others = [states.get(host) for host in offer.members if host != own.public.host]
    if any(other is not None and other.promised > offer.number for other in others) or now - own.since > rules.offer:
        # Missing hosts have been waited for already.
        return change(own, now - max(rules.grace, rules.first_grace), IDLE), ""
    ready = [other for other in others if other and other.state == PROMISED and other.promised == offer.number]
    if len(ready) < len(others):
        return own, ""
    if may_be_stopped(rules, [own.public, *ready], awaited(rules, own.public, offer.members)):
        return change(own, now, IDLE), ""
    return _started(own, offer, now), START


# -- in a generation


def _train(rules: Rules, own: OwnState, received: Messages, states: States, now: float) -> Tuple[OwnState, str]:
    """Continue, unless a member is missing, a host wants to join, or another part has more steps."""
    mine = _current_generation(own)
    why = _missing(rules, own, received, now) or _ended_elsewhere(own, received)
    if why:
        return _end(own, now, why=why), SAVE
    for other in states.values():
        if other.regroup == mine.number:
            # Each host ends its own rank, so that a rank whose peers are already gone does not hang.
            return _end(own, now, regroup=mine.number, apart=other.apart, why=other.why), FINISH_STEP
    if mine.members[0] == own.public.host:
        return _lead(rules, own, received, present(own, states), now)
    return own, ""


def _missing(rules: Rules, own: OwnState, received: Messages, now: float) -> str:
    """The member of this generation that is missing, or never started; empty if all are there."""
    mine = _current_generation(own)
    for host in mine.members:
        if host == own.public.host:
            continue
        one = received.get(host)
        if now - max(one.at if one else 0.0, own.since) > rules.lost:
            return "%s is not heard" % host
        if one is None or _goes_with_all(one.public):
            continue
        if one.public.started > mine.number or one.public.promised > mine.number:
            return "%s is in another generation" % host
        if one.public.state in (RESTING, STUCK) and one.public.started < mine.number == one.public.promised:
            return "%s: %s" % (host, one.public.why)
        if one.public.started < mine.number and now - own.since > rules.begin:
            return "%s has not started its rank" % host
    return ""


def _goes_with_all(other: KeeperState) -> bool:
    """Whether its rank and this host's end in the same step: it has announced its stop, or has ended."""
    return other.state in (FINISHED, STOPPED) or other.stopping


def _ended_elsewhere(own: OwnState, received: Messages) -> str:
    """How another member's rank has ended; empty if none has."""
    mine = _current_generation(own)
    for other in (received[host].public for host in mine.members if host in received):
        goes_on = other.state in (TRAINING, ASKING) or _goes_with_all(other)
        if not goes_on and other.started == mine.number != other.regroup:
            return other.why or "the rank of %s has ended" % other.host
    return ""


def _lead(rules: Rules, own: OwnState, received: Messages, around: States, now: float) -> Tuple[OwnState, str]:
    """The first member also watches outsiders: another part, or a host that wants to join."""
    mine, me = _current_generation(own), own.public.host
    for host, other in around.items():
        theirs = other.generation
        if other.state != TRAINING or theirs is None or theirs.members[0] != host or host in mine.members:
            continue
        if rules.hosts.index(me) < rules.hosts.index(host):
            if other.steps <= own.public.steps:
                own = own.with_fields(outranked=theirs.number)
                continue
        elif other.outranked != mine.number:
            continue
        return _end(own, now, regroup=mine.number, apart=True, why="%s has more steps" % host), FINISH_STEP
    members = clique_around(rules, own, around)
    waiting = [host for host in members if host not in mine.members and around[host].state in (IDLE, OFFERED)]
    comers = [host for host in waiting if now - received[host].since >= rules.lost]
    if comers and set(mine.members) <= set(members) and now - own.since >= rules.joinable_after:
        return _end(own, now, regroup=mine.number, why="%s comes in" % " and ".join(comers)), FINISH_STEP
    return own, ""


def _settle(rules: Rules, own: OwnState, states: States, now: float) -> OwnState:
    """The rank ended cleanly before the last step: to restart with others, or because a user stopped the run?

    Nobody stopped it if no member knows of a stop; a silent one may know, and is waited for.
    """
    mine = _current_generation(own)
    regrouping = [other for other in states.values() if other.regroup == mine.number]
    if regrouping or any(other.started > mine.number for other in states.values()):
        return change(own, now, IDLE, regroup=mine.number, apart=any(other.apart for other in regrouping))
    others = [states[host] for host in mine.members if host in states]
    ended = [other.state for other in others if other.started == mine.number and other.state not in (TRAINING, ENDING)]
    if len(ended) == len(mine.members) - 1 or set(ended) - {ASKING} or now - own.since > rules.begin:
        return change(own, now, IDLE)
    return own


# -- events of this host


def rank_ended(
    rules: Rules,
    own: OwnState,
    now: float,
    steps: int,
    how: str,
    lasting_error: str = "",
    own_failure: Optional[str] = None,
) -> OwnState:
    """This host's rank has exited. how: FINISHED (all steps), STOPPED (asked to) or FAILED.

    lasting_error: the cause, if a restart would not change it.
    own_failure: how it failed by its own error or crash, as far as known; None if another rank or its link was lost.
    """
    own = own.with_fields(steps=steps)
    if how == FINISHED:
        return change(own, now, FINISHED)
    mine = own.public.generation
    if own.public.state in (ENDING, STUCK):
        return change(own, now, own.after_ending)
    if how == STOPPED:
        return change(own, now, IDLE if mine and own.public.regroup == mine.number else ASKING)
    if lasting_error:
        return change(own, now, FAILED, why=lasting_error)
    if own_failure is not None:
        # Those of long ago matter, too, where one step kills the rank again.
        matter = max(DEATHS_AT_ONE_STEP, rules.restarts + 1)
        own = own._replace(deaths=(*own.deaths, Death(now, steps))[-matter:])
        why = reason_to_give_up(own.deaths, own.public.host, rules.restarts)
        if why:
            return change(own, now, FAILED, why="%s (%s)" % (why, own_failure) if own_failure else why)
    else:
        own = own._replace(stalls=(steps, own.stalls[1] + 1 if own.stalls[0] == steps else 1))
        if own.stalls[1] == STALLS_AT_ONE_STEP:
            return change(own, now, FAILED, why="the run died %d times at step %d" % (STALLS_AT_ONE_STEP, steps))
    return change(own, now, IDLE, why="the rank of %s died" % own.public.host)


def reason_to_give_up(deaths: Sequence[Death], me: str, restarts: int) -> str:
    """Why this host should not restart after the newest death; empty if it may.

    Each host judges its own rank alone: if one step kills those of several, each of them gives up.
    """
    newest = deaths[-DEATHS_AT_ONE_STEP:]
    if len(newest) == DEATHS_AT_ONE_STEP and len({death.step for death in newest}) == 1:
        return "the rank of %s died %d times at step %d" % (me, DEATHS_AT_ONE_STEP, newest[0].step)
    lately = [death for death in deaths if deaths[-1].when - death.when < HOUR]
    if len(lately) > restarts:
        return "the rank of %s died %d times within an hour, and ddp_restarts is %d" % (me, len(lately), restarts)
    return ""


def asked_to_end(own: OwnState, now: float, state: str, why: str) -> Tuple[OwnState, str]:
    """A user stops the run (STOPPED) or removes this host (LEFT), or the host shuts down (AWAY)."""
    if own.public.state in (TRAINING, ENDING, STUCK):
        order = FINISH_STEP if own.public.state == TRAINING else ""
        into = STUCK if own.public.state == STUCK else ENDING
        regroup, stopping = 0 if state == STOPPED else own.public.started, state == STOPPED
        return change(own, now, into, why=why, regroup=regroup, stopping=stopping)._replace(after_ending=state), order
    return change(own, now, state, why=why), ""
