# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The training in the hosts' run folders, which a start resumes: one for all of them.

A host that was away while another training began holds an older one, which may have reached a higher step. Nobody but the user
knows which one is wanted, so the plan refuses, and says how to set one aside.
"""

from __future__ import annotations

import os
import shlex
import time
from typing import Iterator, Mapping, NamedTuple, Optional, Sequence

from .._contract import lineage
from .._contract.document import items, section, value_at
from .._contract.findings import Finding, finding
from .._contract.lineage import Launched, training_of
from .hosts import Host

UNKNOWN = ""  # the id of output from an older version or another program


class HeldTraining(NamedTuple):
    """A training, the run folders that hold it by host, and the step of its newest checkpoint."""

    id: str
    number: int
    begun: int
    step: Optional[int]
    folders: Mapping[str, str]

    def in_words(self) -> str:
        when = time.strftime(", begun %Y-%m-%d %H:%M", time.localtime(self.begun)) if self.begun else ""
        come = "without a checkpoint" if self.step is None else f"to step {self.step}"
        places = " and ".join(f"{folder} on {host}" for host, folder in self.folders.items())
        return f"{self.id or 'one without an id'} in {places} ({come}{when})"


def held_by(hosts: Sequence[Host], fact: str) -> list[HeldTraining]:
    """The trainings on these hosts, newest first."""
    found: dict[str, HeldTraining] = {}
    for host in hosts:
        known, steps = training_of(host.fact(fact, "training")), host.fact(fact, "checkpoints") or []
        if not known and not steps:
            continue
        name, number, begun = (known["id"], known["number"], known["begun"]) if known else (UNKNOWN, 0, 0)
        old = found.get(name, HeldTraining(name, number, begun, None, {}))
        reached = max([*steps, *([] if old.step is None else [old.step])], default=None)
        folders = {**old.folders, host.name: str(host.fact(fact, "path") or "its run folder")}
        found[name] = HeldTraining(name, max(number, old.number), begun or old.begun, reached, folders)
    return sorted(found.values(), key=lambda one: one.number, reverse=True)


def differing(held: Sequence[HeldTraining], run: str) -> Iterator[Finding]:
    """Why the user must choose first, if the hosts hold several trainings of a run; to those who only look the newest counts."""
    if len(held) < 2:
        return
    [(host, folder), *dummy] = held[-1].folders.items()
    aside = f"{os.path.dirname(os.path.dirname(folder))}/{run}-set-aside"
    command = shlex.quote(shlex.join(["mv", folder, aside]))
    seen = f"The hosts hold {len(held)} trainings of the run {run}: {'; '.join(one.in_words() for one in held)}"
    remedy = (
        f"Keep one of them. To set aside that of {host}: ansible {host} -i INVENTORY -m ansible.builtin.command -a {command}. "
        "Or start over with -e ddp_fresh=true, which keeps all of them in previous/ of their folders."
    )
    yield finding("trainings-differ", host, seen, remedy=remedy)


def launched(
    hosts: Sequence[Host],
    plan: Mapping[str, object],
    taken: Optional[HeldTraining],
    base: Optional[HeldTraining],
    fresh: bool,
) -> Launched:
    """The training for every host's run folder, which resumes `taken`; the caller draws id and time of a new one."""
    of_base = (base.id or None) if base else None
    # The plan may be unable to resume from these checkpoints, or not want to.
    differs = (taken and taken.step is not None and not lineage.resumes(plan)) or any(
        lineage.differences(host.fact("run", "lineage") or {}, plan)
        for host in hosts
        if taken and host.name in taken.folders
    )
    if taken is None or fresh or differs:
        number = taken.number + 1 if taken else 1
        return {"id": UNKNOWN, "number": number, "begun": 0, "goes_on": None, "base": of_base}
    return {"id": taken.id, "number": taken.number or 1, "begun": taken.begun, "goes_on": taken.id, "base": of_base}


def so_far(digest: str, probes: Mapping[str, object], fresh: bool) -> dict[str, bool]:
    """Whether a session of the run is alive on any host, and whether this plan has been completed, and the trainer set up, on all; a run
    to be started from scratch is not done."""
    running, done, deployed = False, not fresh, True
    for probe in probes.values():
        deployed &= bool(value_at(probe, "python", "venv", "exists") and value_at(probe, "trainer"))
        run, session = section(probe, "run"), value_at(probe, "run", "session") or {}
        mine = [one for one in items(probe, "processes") if one.get("session") == session.get("id")]
        running |= bool(session.get("id") and mine)
        # A stopped run also exits with 0, but has steps left.
        done &= run.get("plan_digest") == digest and session.get("exit_code") == 0 and not session.get("stopped")
    return {"running": running, "done": done, "deployed": deployed}
