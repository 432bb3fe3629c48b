# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides who trains: every decision of a keeper, as pure functions of its state and the messages it received.

Hosts that train together are a *generation*: a number, and its members in rank order, the first of which is the
master. Keepers only exchange their states (`Word`); nobody commands anybody. From its own state, the messages
and the monotonic clock, `decide` computes the next state and at most one order for this host's rank.

A generation starts in three steps: the first host in plan order that is heard by those it hears offers one (`OFFERED`),
each member promises to join it and no older one (`PROMISED`), and once all have, the offer is effective and ranks start. A
number encodes the host that offers it, and is on disk before it is published, so no two generations share
one; a host joins only the newest that it promised, so it never trains in two.
"""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

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
from .rules import GenerationDeath, Rules, clique, expected, may_train, reason_to_give_up, with_another

# Orders for the host's rank: start; finish the step, save and exit; save what is possible and exit.
START, FINISH_STEP, SAVE = "start", "finish step", "save"


class Generation(NamedTuple):
    """A set of hosts that train together; the first member is the master."""

    number: int
    members: Tuple[str, ...]


class Word(NamedTuple):
    """A keeper's state as published to the others."""

    host: str
    state: str = IDLE
    generation: Optional[Generation] = None  # offered, promised, or the one in which its rank runs or ran last
    go: bool = False  # all members have promised: the offering host starts, and so shall they
    promised: int = 0  # joins no generation below this number
    last: Optional[Generation] = None  # the newest in which it has started a rank
    steps: int = 0  # steps done
    hears: Tuple[str, ...] = ()
    regroup: int = 0  # this generation ends only to begin a new one
    apart: bool = False  # its steps since the split do not count, because the others have more
    outranked: int = 0  # the generation with fewer steps that should yield
    left: Tuple[str, ...] = ()  # hosts that were removed by hand
    failed: Tuple[str, ...] = ()  # hosts that have given up
    crashed: int = 0  # the newest generation in which its rank failed by itself
    missed: int = 0  # the newest that it ended because a host was missing, or that its keeper did not survive
    stopping: bool = False  # a user stops the run: its rank finishes the step, and so do all ranks
    returned: bool = False  # it was off, so the run may have been stopped meanwhile
    why: str = ""

    @property
    def started(self) -> int:
        """The number of `last`."""
        return self.last.number if self.last else 0


class OwnState(NamedTuple):
    """A keeper's state: the published part, and private data."""

    word: Word
    since: float = 0.0  # when the state began
    died: bool = False  # its last rank ended although nobody asked for it and nobody was missing
    failure: str = ""  # what is known of that
    deaths: Tuple[GenerationDeath, ...] = ()
    after_ending: str = IDLE  # the state that ENDING leads to

    def with_word(self, **fields: object) -> OwnState:
        """The same with these fields of the word."""
        return self._replace(word=self.word._replace(**fields))  # type: ignore[arg-type]


class Heard(NamedTuple):
    """Another host's last message, its time, and the start of its uninterrupted sequence."""

    word: Word
    at: float
    since: float


Hearing = Mapping[str, Heard]
Words = Mapping[str, Word]


def hear(heard: Optional[Heard], word: Word, now: float, lost: float) -> Heard:
    """Receive a message."""
    return Heard(word, now, heard.since if heard is not None and now - heard.at <= lost else now)


# -- evaluating messages


def present(own: OwnState, words: Words) -> Dict[str, Word]:
    """Those that also hear us and are not over, so can train with us; a link that works one way does not count."""
    me, out = own.word.host, (ASKING, STUCK, RESTING, *OVER)
    return {host: word for host, word in words.items() if me in word.hears and word.state not in out}


def awaited(rules: Rules, word: Word, there: Iterable[str]) -> Set[str]:
    """The hosts to wait for, besides those that are there."""
    return set(expected(rules, word.left, word.failed)) - set(there)


def clique_around(rules: Rules, own: OwnState, around: Words) -> Tuple[str, ...]:
    """We and the present hosts that all hear each other."""
    hears = {host: word.hears for host, word in around.items()}
    return clique(rules, own.word.host, {**hears, own.word.host: tuple(around)})


def next_number(rules: Rules, own: OwnState, words: Words) -> int:
    """The next number above all known ones that no other host can choose."""
    highest = max([own.word.promised, own.word.started, *(max(w.promised, w.started) for w in words.values())])
    return highest + 1 + (rules.hosts.index(own.word.host) - highest) % len(rules.hosts)


def change(own: OwnState, now: float, state: str, **fields: object) -> OwnState:
    """Change state now; fields are those of the word."""
    return own.with_word(state=state, **fields)._replace(since=now)


def _end(own: OwnState, now: float, **fields: object) -> OwnState:
    """End this host's rank, and be idle afterwards; fields are those of the word."""
    return change(own, now, ENDING, **fields)._replace(after_ending=IDLE)


def decide(rules: Rules, own: OwnState, heard: Hearing, now: float) -> Tuple[OwnState, str]:
    """The next state, and an order for this host's rank ("" for none)."""
    words = {host: one.word for host, one in heard.items() if now - one.at <= rules.lost}
    own = _learn_who_is_out(own, words)
    state = own.word.state
    if state in OVER or state == STUCK:
        return own, ""
    if state == ENDING:
        # A rank that should end cleanly cannot once another is lost.
        return own, SAVE if _missing(rules, own, heard, now) else ""
    if state == TRAINING:
        return _train(rules, own, heard, words, now)
    for word in words.values():
        if word.state == STOPPED or word.stopping:
            return change(own, now, STOPPED, why="%s was stopped" % word.host), ""
        if word.state == FINISHED:
            return change(own, now, FINISHED, why="%s has finished" % word.host), ""
    if not may_train(rules, expected(rules, own.word.left, own.word.failed), own.word.left):
        reasons = [words[host].why for host in own.word.failed if host in words and words[host].why]
        why = "%s gave up%s" % (" and ".join(own.word.failed), ": " + reasons[0] if reasons else "")
        return change(own, now, FAILED, why=why), ""
    if state in (ASKING, RESTING):
        return _ask(rules, own, words, now) if state == ASKING else own, ""
    return _gather(rules, own, heard, words, now)


def _learn_who_is_out(own: OwnState, words: Words) -> OwnState:
    """Learn about hosts removed by hand or given up; a host's own message takes precedence."""
    all_words = (own.word, *words.values())

    def known(state: str, named: Iterable[Tuple[str, ...]]) -> Tuple[str, ...]:
        out = {host for hosts in named for host in hosts if host not in words and host != own.word.host}
        return tuple(sorted(out | {host for host, word in words.items() if word.state == state}))

    left, failed = known(LEFT, (w.left for w in all_words)), known(FAILED, (w.failed for w in all_words))
    return own.with_word(hears=tuple(sorted(words)), left=left, failed=failed)


# -- before a generation


def _gather(rules: Rules, own: OwnState, heard: Hearing, words: Words, now: float) -> Tuple[OwnState, str]:
    """While idle, or between offer and start."""
    me, around = own.word.host, present(own, words)
    if own.word.state == OFFERED:
        return _offering(rules, own, words, now)
    started = _begin_promised(own, words, now)
    if started is not None:
        return started, START
    if own.word.state == PROMISED:
        if _still_offered(own, words) and now - own.since <= rules.begin:
            return own, ""
        own = change(own, own.since, IDLE)
    first = next(host for host in rules.hosts if host == me or host in around)
    if first != me:
        return _promise(rules, own, words, around[first], now), ""
    members = clique_around(rules, own, around)
    busy = any(word.state in (TRAINING, ENDING) for word in around.values())
    if busy or not may_form(rules, own, heard, members, now):
        return own, ""
    return _join(rules, own, words, Generation(next_number(rules, own, words), members), now, OFFERED), ""


def may_form(rules: Rules, own: OwnState, heard: Hearing, members: Tuple[str, ...], now: float) -> bool:
    """Whether the host in charge may offer a generation of these members now."""
    if not may_train(rules, members, own.word.left):
        return False
    missing = awaited(rules, own.word, members)
    if not missing:
        return True
    known = [own.word, *(heard[host].word for host in members if host in heard)]
    if may_be_stopped(rules, known, missing):
        return False
    states = {heard[host].word.state if host in heard else "" for host in missing}
    if states == {RESTING}:
        return True
    if not any(word.started for word in known):
        # Nothing was trained yet, so a missing host has never been there.
        return now - own.since >= rules.first_grace
    # A host that announced its shutdown is not back before it is heard again.
    return now - own.since >= rules.grace or states == {AWAY}


def may_be_stopped(rules: Rules, known: Sequence[Word], missing: Set[str]) -> bool:
    """Whether a missing host of the newest generation may know that the run was stopped, since the others of it were off."""
    newest = max((word.last for word in known if word.last), default=Generation(0, rules.hosts))
    # One that only took part in an older one may have been off at the time, and have gone on by itself.
    witnesses = [word for word in known if word.started >= newest.number]
    return bool(missing & set(newest.members)) and all(word.returned for word in witnesses)


def _join(rules: Rules, own: OwnState, words: Words, offer: Generation, now: float, state: str) -> OwnState:
    """Offer or promise a generation, unless the last one died once too often."""
    before, own = own.deaths, _count_death(own, words, now)
    why = reason_to_give_up(own.deaths, own.word.host, rules.restarts, now)
    if why and own.deaths != before:
        return change(own, now, FAILED, why="%s (%s)" % (why, own.failure) if own.failure else why)
    return change(own, now, state, generation=offer, promised=offer.number, go=False)


def _count_death(own: OwnState, words: Words, now: float) -> OwnState:
    """The last generation died by itself if a rank failed by itself, or for no known reason with nobody missing."""
    died, last, own = own.died, own.word.last, own._replace(died=False)
    if last is None or not died:
        return own
    known = [own.word, *(words[host] for host in last.members if host in words)]
    crashed = tuple(sorted(word.host for word in known if word.crashed == last.number))
    # Or some continued without this host, or never started a rank in it because their keeper died first.
    missed = any(word.missed == last.number or word.started != last.number for word in known)
    if not crashed and (missed or len(known) < len(last.members)):
        return own
    return own._replace(deaths=with_another(own.deaths, now, own.word.steps, crashed))


def _promise(rules: Rules, own: OwnState, words: Words, caller: Word, now: float) -> OwnState:
    """Join the first host's offer, if it is newer than all that this host has promised."""
    offer = caller.generation
    if caller.state != OFFERED or offer is None or own.word.host not in offer.members:
        return own
    return _join(rules, own, words, offer, now, PROMISED) if offer.number > own.word.promised else own


def _current_generation(own: OwnState) -> Generation:
    """The generation of a state that must have one."""
    if own.word.generation is None:
        raise ValueError(f"{own.word.host} is {own.word.state} without a generation")
    return own.word.generation


def _still_offered(own: OwnState, words: Words) -> bool:
    """Whether the host that made our promised offer still offers it (a silent one may)."""
    caller = words.get(_current_generation(own).members[0])
    return caller is None or (caller.promised == own.word.promised and caller.state in (OFFERED, TRAINING))


def _begin_promised(own: OwnState, words: Words, now: float) -> Optional[OwnState]:
    """Start in the newest promised generation, once it is effective."""
    mine = own.word.generation
    if mine is None or mine.number != own.word.promised or own.word.started >= mine.number:
        return None
    caller = words.get(mine.members[0])
    if caller is None or caller.generation != mine or not caller.go or caller.state != TRAINING:
        return None
    return _started(own, mine, now)


def _started(own: OwnState, generation: Generation, now: float, go: bool = False) -> OwnState:
    fresh_start = {"regroup": 0, "outranked": 0, "returned": False, "apart": False, "why": ""}
    return change(own, now, TRAINING, last=generation, go=go, **fresh_start)._replace(died=False)


def _offering(rules: Rules, own: OwnState, words: Words, now: float) -> Tuple[OwnState, str]:
    """Start when all have promised; give up if one has promised a newer one, or not in time, or if all have slept since."""
    offer = _current_generation(own)
    others = [words.get(host) for host in offer.members if host != own.word.host]
    if any(word is not None and word.promised > offer.number for word in others) or now - own.since > rules.offer:
        # Missing hosts have been waited for already.
        return change(own, now - max(rules.grace, rules.first_grace), IDLE), ""
    ready = [word for word in others if word and word.state == PROMISED and word.promised == offer.number]
    if len(ready) < len(others):
        return own, ""
    if may_be_stopped(rules, [own.word, *ready], awaited(rules, own.word, offer.members)):
        return change(own, now, IDLE), ""
    return _started(own, offer, now, go=True), START


# -- in a generation


def _train(rules: Rules, own: OwnState, heard: Hearing, words: Words, now: float) -> Tuple[OwnState, str]:
    """Continue, unless a member is missing, a host wants to join, or another part has more steps."""
    mine = _current_generation(own)
    why = _missing(rules, own, heard, now)
    if why:
        return _end(own, now, why=why, missed=mine.number), SAVE
    why = _ended_elsewhere(own, heard)
    if why:
        return _end(own, now, why=why)._replace(died=True), SAVE
    for word in words.values():
        if word.regroup == mine.number:
            # Each host ends its own rank, so that a rank whose peers are already gone does not hang.
            return _end(own, now, regroup=mine.number, apart=word.apart, why=word.why), FINISH_STEP
    if mine.members[0] == own.word.host:
        return _lead(rules, own, heard, present(own, words), now)
    return own, ""


def _missing(rules: Rules, own: OwnState, heard: Hearing, now: float) -> str:
    """The member of this generation that is missing, or never started; empty if all are there."""
    mine = _current_generation(own)
    for host in mine.members:
        if host == own.word.host:
            continue
        one = heard.get(host)
        if now - max(one.at if one else 0.0, own.since) > rules.lost:
            return "%s is not heard" % host
        if one is None or _goes_with_all(one.word):
            continue
        if one.word.started > mine.number or one.word.promised > mine.number:
            return "%s is in another generation" % host
        if one.word.state in (RESTING, STUCK) and one.word.started < mine.number == one.word.promised:
            return "%s: %s" % (host, one.word.why)
        if one.word.started < mine.number and now - own.since > rules.begin:
            return "%s has not started its rank" % host
    return ""


def _goes_with_all(word: Word) -> bool:
    """Whether its rank and this host's end in the same step: it has announced its stop, or has ended."""
    return word.state in (FINISHED, STOPPED) or word.stopping


def _ended_elsewhere(own: OwnState, heard: Hearing) -> str:
    """How another member's rank has ended; empty if none has."""
    mine = _current_generation(own)
    for word in (heard[host].word for host in mine.members if host in heard):
        goes_on = word.state in (TRAINING, ASKING) or _goes_with_all(word)
        if not goes_on and word.started == mine.number != word.regroup:
            return word.why or "the rank of %s has ended" % word.host
    return ""


def _lead(rules: Rules, own: OwnState, heard: Hearing, around: Words, now: float) -> Tuple[OwnState, str]:
    """The first member also watches outsiders: another part, or a host that wants to join."""
    mine, me = _current_generation(own), own.word.host
    for host, word in around.items():
        theirs = word.generation
        if word.state != TRAINING or theirs is None or theirs.members[0] != host or host in mine.members:
            continue
        if rules.hosts.index(me) < rules.hosts.index(host):
            if word.steps <= own.word.steps:
                own = own.with_word(outranked=theirs.number)
                continue
        elif word.outranked != mine.number:
            continue
        return _end(own, now, regroup=mine.number, apart=True, why="%s has more steps" % host), FINISH_STEP
    members = clique_around(rules, own, around)
    waiting = [host for host in members if host not in mine.members and around[host].state in (IDLE, OFFERED)]
    comers = [host for host in waiting if now - heard[host].since >= rules.lost]
    if comers and set(mine.members) <= set(members) and now - own.since >= rules.joinable_after:
        return _end(own, now, regroup=mine.number, why="%s comes in" % " and ".join(comers)), FINISH_STEP
    return own, ""


def _ask(rules: Rules, own: OwnState, words: Words, now: float) -> OwnState:
    """The rank ended cleanly before the last step: to restart with others, or because a user stopped the run?

    Nobody stopped it if no member knows of a stop; a silent one may know, and is waited for.
    """
    mine = _current_generation(own)
    regrouping = [word for word in words.values() if word.regroup == mine.number]
    if regrouping or any(word.started > mine.number for word in words.values()):
        return change(own, now, IDLE, regroup=mine.number, apart=any(word.apart for word in regrouping))
    others = [words[host] for host in mine.members if host in words]
    ended = [word.state for word in others if word.started == mine.number and word.state not in (TRAINING, ENDING)]
    if len(ended) == len(mine.members) - 1 or set(ended) - {ASKING} or now - own.since > rules.begin:
        return change(own, now, IDLE)
    return own


# -- events of this host


def rank_ended(
    own: OwnState, now: float, steps: int, how: str, lasting_error: str = "", by_itself: bool = False, failure: str = ""
) -> OwnState:
    """This host's rank has exited. how: FINISHED (all steps), STOPPED (asked to) or FAILED.

    lasting_error: the cause, if a restart would not change it.
    by_itself: it failed by its own error or crash (failure: which), not because another rank or its link was lost.
    """
    own = own.with_word(steps=steps, go=False)
    if how == FINISHED:
        return change(own, now, FINISHED)
    mine = own.word.generation
    if own.word.state in (ENDING, STUCK):
        return change(own, now, own.after_ending)
    if how == STOPPED:
        return change(own, now, IDLE if mine and own.word.regroup == mine.number else ASKING)
    if by_itself:
        own = own.with_word(crashed=own.word.started)
    if lasting_error:
        return change(own, now, FAILED, why=lasting_error)
    return change(own, now, IDLE, why="the rank of %s died" % own.word.host)._replace(
        died=True, failure=failure if by_itself else ""
    )


def asked_to_end(own: OwnState, now: float, state: str, why: str) -> Tuple[OwnState, str]:
    """A user stops the run (STOPPED) or removes this host (LEFT), or the host shuts down (AWAY)."""
    if own.word.state in (TRAINING, ENDING, STUCK):
        order = FINISH_STEP if own.word.state == TRAINING else ""
        into = STUCK if own.word.state == STUCK else ENDING
        regroup, stopping = 0 if state == STOPPED else own.word.started, state == STOPPED
        return change(own, now, into, why=why, regroup=regroup, stopping=stopping)._replace(after_ending=state), order
    return change(own, now, state, why=why), ""


def rank_stuck(own: OwnState, now: float, why: str) -> OwnState:
    """The rank survived even SIGKILL: nobody waits for this host until `rank_ended`."""
    return own if own.word.state == STUCK else change(own, now, STUCK, why=why, missed=own.word.started)
