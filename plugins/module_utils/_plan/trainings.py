# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chooses which of the trainings in the hosts' run folders to resume.

The newest wins, whatever its step: a host that was away while another one began has an older one, which
may have reached a higher step. Older ones are set aside at the start, and the plan says so before.
"""

from __future__ import annotations

import time
from typing import Iterator, Mapping, NamedTuple, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.training import Launched, training_of
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host

UNKNOWN = ""  # the id of output from an older version or another program


class HeldTraining(NamedTuple):
    """A training, the hosts that have it, and the step of its newest checkpoint."""

    id: str
    number: int
    begun: int
    step: Optional[int]
    hosts: tuple[str, ...]

    def in_words(self) -> str:
        when = time.strftime(", begun %Y-%m-%d %H:%M", time.localtime(self.begun)) if self.begun else ""
        come = "without a checkpoint" if self.step is None else f"to step {self.step}"
        return f"{self.id or 'one of an unknown age'} on {' and '.join(self.hosts)} ({come}{when})"


class TrainingChoice(NamedTuple):
    """The training to resume (None: there is none), the others, and the highest known number."""

    taken: Optional[HeldTraining]
    others: tuple[HeldTraining, ...] = ()
    highest: int = 0
    problem: Optional[Finding] = None


def held_by(hosts: Sequence[Host], fact: str) -> list[HeldTraining]:
    """The trainings on these hosts, newest first."""
    found: dict[str, HeldTraining] = {}
    for host in hosts:
        known, steps = training_of(host.fact(fact, "training")), host.fact(fact, "checkpoints") or []
        if not known and not steps:
            continue
        name, number, begun = (known["id"], known["number"], known["begun"]) if known else (UNKNOWN, 0, 0)
        old = found.get(name, HeldTraining(name, number, begun, None, ()))
        reached = max([*steps, *([] if old.step is None else [old.step])], default=None)
        found[name] = HeldTraining(name, max(number, old.number), begun or old.begun, reached, (*old.hosts, host.name))
    return sorted(found.values(), key=lambda one: one.number, reverse=True)


def choose(hosts: Sequence[Host], run: str, asked: Optional[str], fact: str = "run") -> TrainingChoice:
    """The newest training, or the requested one; if two are equally new, the user must choose."""
    held = held_by(hosts, fact)
    highest = held[0].number if held else 0
    listed = "; ".join(one.in_words() for one in held)
    if asked and asked not in {one.id for one in held}:
        seen = f"ddp_training is {asked}, but no host has that training of the run {run}; available: {listed or 'none'}"
        return TrainingChoice(None, (), highest, finding("setting-refused", "", seen))
    newest = [one for one in held if (one.id == asked if asked else one.number == highest)]
    if len(newest) > 1:
        seen = f"The run {run} has {len(newest)} trainings, and none is newer: {listed}"
        return TrainingChoice(None, (), highest, finding("trainings-differ", newest[0].hosts[0], seen))
    taken = newest[0] if newest else None
    return TrainingChoice(taken, tuple(one for one in held if one is not taken), highest)


def problems(run: TrainingChoice, base: TrainingChoice, fresh: bool) -> list[Finding]:
    """Choices that the user must make first; none between trainings that are both set aside."""
    return [one.problem for one in (TrainingChoice(None) if fresh else run, base) if one.problem is not None]


def without_others(hosts: Sequence[Host], choice: TrainingChoice, fact: str = "run") -> list[Host]:
    """The hosts as if those with another training had only their session."""
    names = {name for one in choice.others for name in one.hosts}
    kept = ("path", "exists", "session")
    left = [{**host.probe, fact: {key: host.fact(fact, key) for key in kept}} for host in hosts]
    return [host._replace(probe=probe) if host.name in names else host for host, probe in zip(hosts, left)]


def remarks(choice: TrainingChoice, run: str) -> Iterator[Finding]:
    """Findings about trainings that the start sets aside."""
    if choice.taken is None:
        return
    newer = choice.taken.in_words()
    for one in choice.others:
        for host in one.hosts:
            seen = f"{host} holds another training of the run {run}: {one.in_words()}; {newer} resumes"
            yield finding("training-older", host, seen)


def begins(hosts: Sequence[Host], plan: Mapping[str, object], choice: TrainingChoice, fresh: bool) -> bool:
    """Whether the start begins a new training."""
    if fresh or choice.taken is None:
        return True
    if choice.taken.step is not None and not lineage.resumes(plan):
        return True
    mine = [host for host in hosts if host.name in choice.taken.hosts]
    return any(lineage.differences(host.fact("run", "lineage") or {}, plan) for host in mine)


def launched(choice: TrainingChoice, base: TrainingChoice, begins_again: bool) -> Launched:
    """The training for every host's run folder; the caller draws id and time of a new one. A resumed training
    becomes the newest even if another one is as new."""
    of_base = (base.taken.id or None) if base.taken else None
    taken = None if begins_again else choice.taken
    if taken is None:
        return {"id": UNKNOWN, "number": choice.highest + 1, "begun": 0, "goes_on": None, "base": of_base}
    newest = taken.number and all(one.number < taken.number for one in choice.others)
    number = taken.number if newest else choice.highest + 1
    return {"id": taken.id, "number": number, "begun": taken.begun, "goes_on": taken.id, "base": of_base}
