# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Counts a run's own errors and decides when restarting is useless. Lost hosts and links do not count."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

HOUR = 3600.0
DEATHS_AT_ONE_STEP = 3  # deaths at one step before giving up


class GenerationDeath(NamedTuple):
    """The end of a generation whose hosts all stayed."""

    when: float
    step: int
    hosts: Tuple[str, ...]  # whose ranks failed by themselves; none if each blames another


def with_another(
    deaths: Sequence[GenerationDeath], when: float, step: int, hosts: Tuple[str, ...]
) -> Tuple[GenerationDeath, ...]:
    """The deaths that still matter after another one."""
    earlier, newest = deaths[: 1 - DEATHS_AT_ONE_STEP], deaths[1 - DEATHS_AT_ONE_STEP :]
    return (*(one for one in earlier if when - one.when < HOUR), *newest, GenerationDeath(when, step, hosts))


def reason_to_give_up(deaths: Sequence[GenerationDeath], me: str, restarts: int, now: float) -> str:
    """Why this host should not restart; empty if it may.

    A host whose rank alone fails repeatedly gives up alone. If one step kills several hosts' ranks, or nobody knows whose, the run
    is at fault.
    """
    newest = deaths[-DEATHS_AT_ONE_STEP:]
    if len(newest) == DEATHS_AT_ONE_STEP and len({death.step for death in newest}) == 1:
        if {death.hosts for death in newest} == {(me,)}:
            return "the rank of %s died %d times at step %d" % (me, DEATHS_AT_ONE_STEP, newest[0].step)
        if len({host for death in newest for host in death.hosts}) != 1:
            return "the run died %d times at step %d" % (DEATHS_AT_ONE_STEP, newest[0].step)
    lately = [death for death in deaths if me in death.hosts and now - death.when < HOUR]
    if len(lately) > restarts:
        return "the rank of %s died %d times within an hour, and ddp_restarts is %d" % (me, len(lately), restarts)
    return ""
