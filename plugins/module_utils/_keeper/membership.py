# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who trains: every decision of a keeper, as pure functions of what it knows and what it has heard.

The hosts that train together are a *generation*: a number, and its members in rank order, the first of which is the
master. Keepers only ever tell each other how they are (`Word`); nobody commands anybody. From its own state, the words
heard and the monotonic clock, `decide` makes the next state and at most one order for this host's own rank.

A generation begins in three looks: the first host in plan order that is heard by those it hears offers one (`OFFERED`),
each member promises to join it and no older one (`PROMISED`), and once all have, the offer counts and ranks start. A
number holds the index of the host that offers it, and is kept on disk before it is told, so no two generations share
one; a host joins only the newest that it promised, so it never trains in two.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, TypedDict

# On the way to training or in it, and on the way out of it.
IDLE, OFFERED, PROMISED, TRAINING, ENDING = "idle", "offered", "promised", "training", "ending"
ASKING = "asking"  # its rank ended because some host was asked to stop, and it looks for the reason
STUCK = "stuck"  # its rank was to end and cannot be killed, so it takes part in nothing until that is gone
# The keeper ends. AWAY: its host goes down and comes back by itself.
FINISHED, STOPPED, LEFT, FAILED, AWAY = "finished", "stopped", "left", "failed", "away"
OVER = (FINISHED, STOPPED, LEFT, FAILED, AWAY)

# Orders for the host's own rank: start it; finish the step, save and end; save what can be saved and end.
START, FINISH_STEP, SAVE = "start", "finish step", "save"

HOUR = 3600.0
ALIKE = 3  # deaths at one step after which nobody tries again


class Rules(NamedTuple):
    """What the plan says; times in seconds."""

    hosts: Tuple[str, ...]  # in plan order
    least: int  # ddp_min_hosts
    grace: float  # ddp_grace: how long a missing host is waited for
    first_grace: float  # the same before the first generation, for which all hosts are needed
    restarts: int = 3  # deaths in an hour that are started again
    lost: float = 6.0  # a host that was not heard for so long (two looks and more) is missing
    offer: float = 10.0  # how long an offer waits for its promises
    begin: float = 30.0  # how long a promised member may take until it has started its rank
    settle: float = 20.0  # how long a generation trains at least before somebody is let in


class Generation(NamedTuple):
    """Who trains together; the first member is the master."""

    number: int
    members: Tuple[str, ...]


class Word(NamedTuple):
    """What a keeper tells the others."""

    host: str
    state: str = IDLE
    generation: Optional[Generation] = None  # offered, promised, or the one in which its rank runs or ran last
    go: bool = False  # all members have promised: whoever offered it starts, and so shall they
    promised: int = 0  # it joins no generation below this number
    started: int = 0  # the newest generation in which it has started a rank
    steps: int = 0  # steps done
    hears: Tuple[str, ...] = ()
    regroup: int = 0  # this generation is ended only to begin a new one
    over: int = 0  # the generation that has fewer steps than this host's and is to give way
    left: Tuple[str, ...] = ()  # hosts that were taken out by hand
    stopping: bool = False  # a user stops the run: its rank finishes the step, as all ranks then do
    why: str = ""


class Own(NamedTuple):
    """What a keeper knows of itself: its word, and what concerns nobody else."""

    word: Word
    since: float = 0.0  # when the state began
    returned: bool = False  # started by itself after a reboot: others may know that the run was stopped
    last: Optional[Generation] = None  # in which this host trained last
    clean: bool = True  # that one ended because it was asked to
    deaths: Tuple[Tuple[float, int], ...] = ()  # (when, at which step) a generation died though all hosts were there
    apart: bool = False  # what was trained since the last generation began lost against another part
    then: str = IDLE  # what ENDING leads to


class Remembered(TypedDict):
    """What a keeper writes down of itself, for the one after it."""

    promised: int
    started: int
    last: Optional[Generation]
    clean: bool
    deaths: Tuple[Tuple[float, int], ...]
    left: Tuple[str, ...]


class Heard(NamedTuple):
    """The newest word of another host, when it came, and since when they have come without a gap."""

    word: Word
    at: float
    since: float


Hearing = Mapping[str, Heard]


def hear(heard: Optional[Heard], word: Word, now: float, lost: float) -> Heard:
    """Take in a word."""
    gap = heard is None or now - heard.at > lost
    return Heard(word, now, now if gap or heard is None else heard.since)


# -- what the words say


def fresh(rules: Rules, heard: Hearing, now: float) -> Dict[str, Word]:
    """The words of all hosts that were heard lately."""
    return {host: one.word for host, one in heard.items() if now - one.at <= rules.lost}


def present(own: Own, words: Mapping[str, Word]) -> Dict[str, Word]:
    """Those among them that hear us too, are not over, and so can train with us; a link that is cut one way is none."""
    me, out = own.word.host, (ASKING, STUCK, *OVER)
    return {host: word for host, word in words.items() if me in word.hears and word.state not in out}


def circle(rules: Rules, own: Own, around: Mapping[str, Word]) -> Tuple[str, ...]:
    """Us and those of the present who all hear each other, in plan order."""
    me = own.word.host
    hears = {me: tuple(around), **{host: word.hears for host, word in around.items()}}
    chosen = [me]
    for host in rules.hosts:
        if host in around and all(other in hears[host] and host in hears[other] for other in chosen):
            chosen.append(host)
    return tuple(host for host in rules.hosts if host in chosen)


def wanted(rules: Rules, left: Sequence[str]) -> Tuple[str, ...]:
    """The hosts of the plan that nobody has taken out by hand."""
    return tuple(host for host in rules.hosts if host not in left)


def may_train(rules: Rules, members: Sequence[str], left: Sequence[str] = ()) -> bool:
    """Whether these are enough, and the others cannot think the same of themselves.

    A part needs ddp_min_hosts, and the majority or the half with the first host. Where ddp_min_hosts is at most half of
    the hosts, the user has said that each part may go on by itself.
    """
    hosts = wanted(rules, left)
    least = min(rules.least, len(hosts))
    if not members or len(members) < least:
        return False
    twice = 2 * len(members)
    return twice > len(hosts) or (twice == len(hosts) and hosts[0] in members) or 2 * least <= len(hosts)


def next_number(rules: Rules, own: Own, words: Mapping[str, Word]) -> int:
    """A number above all that are known, which no other host can choose."""
    highest = max([own.word.promised, own.word.started, *(max(w.promised, w.started) for w in words.values())])
    return (highest // len(rules.hosts) + 1) * len(rules.hosts) + rules.hosts.index(own.word.host)


def ordinal(rules: Rules, number: int) -> int:
    """The number of a generation as people count, without the host's index in it."""
    return number // len(rules.hosts)


# -- changing one's own state


def change(own: Own, now: float, state: str, **fields: object) -> Own:
    """Another state from now on; fields are those of the word."""
    return own._replace(word=own.word._replace(state=state, **fields), since=now)  # type: ignore[arg-type]


def decide(rules: Rules, own: Own, heard: Hearing, now: float) -> Tuple[Own, str]:
    """The next state, and an order for this host's rank ("" for none)."""
    words = fresh(rules, heard, now)
    own = _gossip(own, words)
    state = own.word.state
    if state in OVER or state in (ENDING, STUCK):
        return own, ""
    for word in words.values():
        if word.state == STOPPED and state != TRAINING:
            return change(own, now, STOPPED, why="%s was stopped" % word.host), ""
        if word.state == FAILED and state != TRAINING:
            return change(own, now, FAILED, why="%s gave up: %s" % (word.host, word.why)), ""
        if word.state == FINISHED and state != TRAINING:
            return change(own, now, FINISHED, why="%s has finished" % word.host), ""
    if state == TRAINING:
        return _train(rules, own, heard, now)
    if state == ASKING:
        return _ask(rules, own, words, now), ""
    return _gather(rules, own, words, now)


def _gossip(own: Own, words: Mapping[str, Word]) -> Own:
    """Hear of hosts that were taken out by hand; one that is heard itself knows best."""
    left = {host for word in words.values() for host in word.left} | set(own.word.left)
    left = {host for host in left if host not in words and host != own.word.host}
    left |= {host for host, word in words.items() if word.state == LEFT}
    hears, gone = tuple(sorted(words)), tuple(sorted(left))
    if (hears, gone) == (own.word.hears, own.word.left):
        return own
    return own._replace(word=own.word._replace(hears=hears, left=gone))


# -- before a generation


def _gather(rules: Rules, own: Own, words: Dict[str, Word], now: float) -> Tuple[Own, str]:
    """Idle, or between offer and start."""
    me, around = own.word.host, present(own, words)
    started = _begin_promised(own, words, now)
    if started is not None:
        return started, START
    if own.word.state == PROMISED and _still_offered(own, words) and now - own.since <= rules.begin:
        return own, ""
    busy = any(word.state in (TRAINING, ENDING) for word in around.values())
    if own.word.state == OFFERED:
        return _offering(rules, own, words, now)
    if own.word.state == PROMISED:
        own = change(own, own.since, IDLE)
    order = [host for host in rules.hosts if host == me or host in around]
    if order[0] != me:
        return _promise(rules, own, around[order[0]], now), ""
    members = circle(rules, own, around)
    if busy or not may_form(rules, own, around, members, now):
        return own, ""
    offer = Generation(next_number(rules, own, words), members)
    return _join(rules, own, offer, now, OFFERED), ""


def may_form(rules: Rules, own: Own, around: Mapping[str, Word], members: Tuple[str, ...], now: float) -> bool:
    """Whether whoever holds the roll call may offer a generation of these members now."""
    if set(members) >= set(wanted(rules, own.word.left)):
        return True
    waited = now - own.since
    newest = max([own.word.started, *(around[host].started for host in members if host in around)])
    if newest == 0:
        # Nothing was trained yet, so whoever is missing has never been there.
        return waited >= rules.first_grace and may_train(rules, members, own.word.left)
    if own.returned and own.last is not None and not set(own.last.members) <= set(members):
        # The others may have been stopped while this host was off.
        return False
    return waited >= rules.grace and may_train(rules, members, own.word.left)


def _join(rules: Rules, own: Own, generation: Generation, now: float, state: str) -> Own:
    """Offer or promise a generation, unless what was before it died once too often."""
    own = _count_death(own, generation, now)
    hopeless = verdict(rules, own, now)
    if hopeless:
        return change(own, now, FAILED, why=hopeless)
    return change(own, now, state, generation=generation, promised=generation.number, go=False)


def _count_death(own: Own, generation: Generation, now: float) -> Own:
    """If everybody who was in the last generation is there, nobody left: it died by itself."""
    if own.last is None or own.clean:
        return own
    deaths = own.deaths
    if set(own.last.members) <= set(generation.members):
        deaths = (*deaths, (now, own.word.steps))
    return own._replace(deaths=deaths, clean=True)


def verdict(rules: Rules, own: Own, now: float) -> str:
    """Why there is no use in starting again; empty if there is."""
    steps = [step for dummy, step in own.deaths[-ALIKE:]]
    if len(steps) == ALIKE and len(set(steps)) == 1:
        return "the run died %d times at step %d" % (ALIKE, steps[0])
    lately = [when for when, dummy in own.deaths if now - when < HOUR]
    if len(lately) > rules.restarts:
        return "the run died %d times within an hour, and ddp_restarts is %d" % (len(lately), rules.restarts)
    return ""


def _promise(rules: Rules, own: Own, caller: Word, now: float) -> Own:
    """Join what the first host offers, if it is newer than all that this host has promised."""
    offer = caller.generation
    if caller.state != OFFERED or offer is None or own.word.host not in offer.members:
        return own
    return _join(rules, own, offer, now, PROMISED) if offer.number > own.word.promised else own


def _mine(own: Own) -> Generation:
    """The generation of a state that cannot be without one."""
    if own.word.generation is None:
        raise ValueError(f"{own.word.host} is {own.word.state} without a generation")
    return own.word.generation


def _still_offered(own: Own, words: Mapping[str, Word]) -> bool:
    """Whether the host that offered what we promised does so still (one that is silent may)."""
    caller = words.get(_mine(own).members[0])
    return caller is None or (caller.promised == own.word.promised and caller.state in (OFFERED, TRAINING))


def _begin_promised(own: Own, words: Mapping[str, Word], now: float) -> Optional[Own]:
    """Start in the newest generation that was promised, once it counts."""
    mine = own.word.generation
    if mine is None or mine.number != own.word.promised or own.word.started >= mine.number:
        return None
    caller = words.get(mine.members[0])
    if caller is None or caller.generation != mine or not caller.go or caller.state != TRAINING:
        return None
    return _started(own, mine, now)


def _started(own: Own, generation: Generation, now: float, go: bool = False) -> Own:
    own = change(own, now, TRAINING, started=generation.number, go=go, regroup=0, over=0, why="")
    return own._replace(returned=False, last=generation, clean=False, apart=False)


def _offering(rules: Rules, own: Own, words: Mapping[str, Word], now: float) -> Tuple[Own, str]:
    """Go as soon as all have promised; give up if one has promised more, or not in time."""
    offer = _mine(own)
    others = [words.get(host) for host in offer.members if host != own.word.host]
    if any(word is not None and word.promised > offer.number for word in others) or now - own.since > rules.offer:
        # Whoever is missing has been waited for already.
        return change(own, now - max(rules.grace, rules.first_grace), IDLE), ""
    for word in others:
        if word is None or word.state != PROMISED or word.promised != offer.number:
            return own, ""
    return _started(own, offer, now, go=True), START


# -- in a generation


def _train(rules: Rules, own: Own, heard: Hearing, now: float) -> Tuple[Own, str]:
    """Go on, unless a member is missing, somebody waits to be let in, or another part has more steps."""
    why = broken(rules, own, heard, now)
    if why:
        return change(own, now, ENDING, why=why)._replace(then=IDLE), SAVE
    words, mine = fresh(rules, heard, now), _mine(own)
    for word in words.values():
        if word.regroup == mine.number:
            # Ended by each for itself, so that a rank whose others are gone already does not hang.
            ended = change(own, now, ENDING, regroup=mine.number, why=word.why)
            return ended._replace(then=IDLE, clean=True), FINISH_STEP
    if mine.members[0] == own.word.host:
        return _lead(rules, own, heard, now)
    return own, ""


def broken(rules: Rules, own: Own, heard: Hearing, now: float) -> str:
    """Why this generation cannot go on; empty if it can."""
    mine = _mine(own)
    for host in mine.members:
        if host == own.word.host:
            continue
        one = heard.get(host)
        if now - max(one.at if one else 0.0, own.since) > rules.lost:
            return "%s is not heard" % host
        if one is None or one.word.state in (FINISHED, STOPPED) or one.word.stopping:
            # Its rank has told the others, so this host's ends in the same step, or has ended.
            continue
        word = one.word
        if word.started > mine.number or word.promised > mine.number:
            return "%s is in another generation" % host
        if word.started == mine.number and word.state not in (TRAINING, ASKING) and word.regroup != mine.number:
            return word.why or "the rank of %s has ended" % host
        if word.started < mine.number and now - own.since > rules.begin:
            return "%s has not started its rank" % host
    return ""


def _lead(rules: Rules, own: Own, heard: Hearing, now: float) -> Tuple[Own, str]:
    """The first member also looks at those outside: another part, or somebody who wants to come in."""
    mine, me = _mine(own), own.word.host
    around = present(own, fresh(rules, heard, now))
    for host, word in around.items():
        theirs = word.generation
        if word.state != TRAINING or theirs is None or theirs.members[0] != host or host in mine.members:
            continue
        if rules.hosts.index(me) < rules.hosts.index(host):
            if word.steps <= own.word.steps:
                own = own._replace(word=own.word._replace(over=theirs.number))
                continue
        elif word.over != mine.number:
            continue
        ended = change(own, now, ENDING, regroup=mine.number, why="%s has more steps" % host)
        return ended._replace(then=IDLE, apart=True, clean=True), FINISH_STEP
    waiting = [
        host
        for host, word in around.items()
        if host not in mine.members and word.state in (IDLE, OFFERED) and now - heard[host].since >= rules.lost
    ]
    members = circle(rules, own, around)
    comers = [host for host in waiting if host in members and set(mine.members) <= set(members)]
    if comers and now - own.since >= rules.settle:
        ended = change(own, now, ENDING, regroup=mine.number, why="%s comes in" % " and ".join(comers))
        return ended._replace(then=IDLE, clean=True), FINISH_STEP
    return own, ""


def _ask(rules: Rules, own: Own, words: Mapping[str, Word], now: float) -> Own:
    """The rank ended well before the last step: to begin again with others, or because a user stopped the run?

    Whoever hears nobody that knows waits on: it must not go on alone with a run that was stopped.
    """
    mine = _mine(own)
    asking = 1
    for host, word in words.items():
        if host in mine.members and word.started >= mine.number and word.state not in (TRAINING, ENDING, ASKING, *OVER):
            return change(own, now, IDLE)._replace(clean=True)
        if word.regroup == mine.number or word.started > mine.number:
            return change(own, now, IDLE, regroup=mine.number)._replace(clean=True)
        asking += host in mine.members and word.state == ASKING
    if asking > 1 and now - own.since > rules.begin:
        # Who knew is gone, and it did not stop more than one of us.
        return change(own, now, IDLE)._replace(clean=True)
    return own


# -- what happens to this host


def rank_ended(own: Own, now: float, steps: int, how: str, lasting_error: str = "", by_itself: bool = True) -> Own:
    """This host's rank is gone. how: FINISHED (the last step was made), STOPPED (asked to) or FAILED.

    lasting_error: what it failed by, if starting it again would not change that.
    by_itself: it failed by an error or crash of its own, and not by the loss of another rank or of the link to it.
    """
    own = own._replace(word=own.word._replace(steps=steps, go=False))
    if how == FINISHED:
        return change(own, now, FINISHED)
    mine = own.word.generation
    if own.word.state in (ENDING, STUCK):
        return change(own, now, own.then)
    if mine is not None and own.word.regroup == mine.number and how == STOPPED:
        return change(own, now, IDLE)._replace(clean=True)
    if how == STOPPED:
        return change(own, now, ASKING)
    if lasting_error:
        return change(own, now, FAILED, why=lasting_error)
    return change(own, now, IDLE, why="the rank of %s died" % own.word.host)


def asked_to_end(own: Own, now: float, state: str, why: str) -> Tuple[Own, str]:
    """A user stops the run (STOPPED) or takes this host out of it (LEFT), or the host goes down (AWAY)."""
    if own.word.state in (TRAINING, ENDING, STUCK):
        order = FINISH_STEP if own.word.state == TRAINING else ""
        told = {"regroup": 0 if state == STOPPED else own.word.started, "stopping": state == STOPPED}
        into = STUCK if own.word.state == STUCK else ENDING
        return change(own, now, into, why=why, **told)._replace(then=state, clean=True), order
    return change(own, now, state, why=why), ""


def going_down(own: Own, now: float, why: str = "") -> Tuple[Own, str]:
    """A signal ends this keeper, which no user's stop does: the host leaves for now, and the others go on at once."""
    return asked_to_end(own, now, AWAY, why or "%s goes down" % own.word.host)


def rank_stuck(own: Own, now: float, why: str) -> Own:
    """The rank outlived even SIGKILL: nobody waits for this host until `rank_ended`."""
    return own if own.word.state == STUCK else change(own, now, STUCK, why=why)


def to_remember(own: Own) -> Remembered:
    """All that outlives a keeper. It is on the disk before anybody hears of it."""
    word = own.word
    return {
        "promised": word.promised, "started": word.started, "last": own.last, "clean": own.clean,
        "deaths": own.deaths, "left": word.left,
    }  # fmt: skip


def awake(host: str, kept: Mapping[str, Any], now: float, steps: int, returned: bool) -> Own:
    """A keeper that starts with what an earlier one left on disk (as JSON, which may be spoilt); nothing where there was none.

    returned: its host was off, or nobody knows how long its keeper was, so that the run may have been stopped meanwhile.
    ArithmeticError, LookupError, TypeError or ValueError where `kept` is not what `to_remember` made.
    """
    if not kept:
        return Own(Word(host, steps=steps), since=now)
    last = kept["last"] and Generation(int(kept["last"][0]), tuple(map(str, kept["last"][1])))
    word = Word(
        host,
        promised=int(kept["promised"]),
        started=int(kept["started"]),
        steps=steps,
        left=tuple(map(str, kept["left"])),
    )
    # After a reboot the clock begins again, so what seems to lie ahead is past.
    deaths = tuple((min(float(when), now), int(step)) for when, step in kept["deaths"])
    return Own(word, since=now, returned=returned, last=last or None, clean=bool(kept["clean"]), deaths=deaths)
