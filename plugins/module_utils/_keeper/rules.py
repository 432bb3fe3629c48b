# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which hosts may train together, which ones need not be waited for, and when a run's own errors make restarting useless."""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple, Sequence, Tuple

HOUR = 3600.0
# Deaths at one step before giving up: by the rank's own errors, and of any kind.
OWN_AT_ONE_STEP, ALL_AT_ONE_STEP = 3, 20


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


def clique(rules: Rules, me: str, hears: Mapping[str, Sequence[str]]) -> Tuple[str, ...]:
    """This host and those that all hear each other, in plan order; hears: whom each of them hears."""
    chosen = [me]
    for host in rules.hosts:
        if host != me and host in hears and all(other in hears[host] and host in hears[other] for other in chosen):
            chosen.append(host)
    return tuple(host for host in rules.hosts if host in chosen)


class Death(NamedTuple):
    """The end of this host's rank that nobody asked for, while no host was missing."""

    when: float
    step: int
    own: bool  # by its own error or crash, not because another rank or its link was lost


def with_another(deaths: Sequence[Death], newest: Death, restarts: int) -> Tuple[Death, ...]:
    """The deaths that still matter after another one. Those of long ago do, too, where one step kills the rank again."""
    return (*deaths, newest)[-restarts - ALL_AT_ONE_STEP :]


def reason_to_give_up(deaths: Sequence[Death], me: str, restarts: int) -> str:
    """Why this host should not restart after the newest death; empty if it may.

    Each host judges its own rank alone: if one step kills those of several, each of them gives up. The last resort is for ranks that
    only lose each other, again and again.
    """
    newest = deaths[-1]
    own = [death for death in deaths if death.own] if newest.own else []
    if _at_one_step(own[-OWN_AT_ONE_STEP:], OWN_AT_ONE_STEP):
        return "the rank of %s died %d times at step %d" % (me, OWN_AT_ONE_STEP, newest.step)
    if _at_one_step(deaths[-ALL_AT_ONE_STEP:], ALL_AT_ONE_STEP):
        return "the run died %d times at step %d" % (ALL_AT_ONE_STEP, newest.step)
    lately = [death for death in own if newest.when - death.when < HOUR]
    if len(lately) > restarts:
        return "the rank of %s died %d times within an hour, and ddp_restarts is %d" % (me, len(lately), restarts)
    return ""


def _at_one_step(newest: Sequence[Death], count: int) -> bool:
    return len(newest) == count and len({death.step for death in newest}) == 1
