# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The part of a keeper's state that outlives its process: saved, and loaded by the next one."""

from __future__ import annotations

from typing import Any, Dict, Mapping

from .._contract import keeper_states as states
from .membership import Death, Generation, KeeperState, OwnState, Received, change


def to_remember(own: OwnState) -> Dict[str, object]:
    """Everything that outlives a keeper. It is on disk before it is published."""
    public = own.public
    return {
        "promised": public.promised, "last": public.last, "deaths": own.deaths,
        "left": public.left, "failed": public.failed, "returned": public.returned,
    }  # fmt: skip


def awake(
    host: str, kept: Mapping[str, Any], now: float, steps: int, returned: bool, same_boot: bool = True
) -> OwnState:
    """A keeper that starts with an earlier one's state from disk (as JSON).

    returned: its host was off, or its keeper for an unknown time, so the run may have been stopped meanwhile. An earlier keeper may have
    learnt that, too, and not yet what became of the run.
    same_boot: the clock has run on since then; otherwise nobody knows how long ago the ranks died.
    ArithmeticError, LookupError, TypeError or ValueError if `kept` did not come from `to_remember`.
    """
    last = kept["last"] and Generation(int(kept["last"][0]), tuple(map(str, kept["last"][1])))
    left, failed = (tuple(map(str, kept[name])) for name in ("left", "failed"))
    public = KeeperState(
        host, generation=last or None, promised=int(kept["promised"]), last=last or None, steps=steps, left=left, failed=failed,
        returned=returned or bool(kept.get("returned")), restarted=True,
    )  # fmt: skip
    died = [Death(float(when), int(step)) for when, step, *dummy in kept["deaths"]]
    return OwnState(public, since=now, deaths=tuple(died) if same_boot else ())


def slept(own: OwnState, now: float, seconds: float) -> OwnState:
    """A keeper whose host was suspended: the run may have been stopped meanwhile, and an offer made or promised is void."""
    if own.public.state in (states.OFFERED, states.PROMISED):
        own = change(own, now, states.IDLE, generation=own.public.last)
    # The clock of `now` did not run meanwhile.
    earlier = tuple(death._replace(when=death.when - seconds) for death in own.deaths)
    return own.with_fields(returned=True)._replace(deaths=earlier)


def woken(own: OwnState, received: Mapping[str, Received], since: float) -> OwnState:
    """A keeper that was suspended until `since`: it has missed nothing if all members report that they train with it."""
    mine, public = own.public.generation, own.public
    if not public.returned or public.state != states.TRAINING or mine is None:
        return own
    others = [received.get(host) for host in mine.members if host != public.host]
    recent = [one.public for one in others if one is not None and one.at > since]
    trained_in = {(one.state, one.generation) for one in recent}
    all_train = len(recent) == len(others) and trained_in == {(states.TRAINING, mine)}
    return own.with_fields(returned=False) if all_train else own


def forgetful(host: str, now: float, wall: float, steps: int) -> OwnState:
    """A keeper whose state was damaged. Seconds since 1970 are above all numbers that it may have promised."""
    return OwnState(KeeperState(host, promised=int(wall), steps=steps, returned=True), since=now)
