# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Opens a host's firewall to the peers of a job, and closes exactly that again.

It does not work out whether a rule set lets a packet through. The rules go wherever a packet can be dropped; whether
they help is found out by trying the connections again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from typing import Any, NamedTuple, Sequence

from .._kit.files import write_whole
from .backend import Change, FirewallBackend
from .firewalld import Firewalld
from .iptables import Iptables
from .nftables import Nftables
from .rules import FirewallError, FirewallStep, Forbidden, Rule, Run
from .ufw import Ufw

# In the order in which they are tried.
BACKENDS: dict[str, type[FirewallBackend]] = {one.name: one for one in (Ufw, Firewalld, Nftables, Iptables)}
NOTHING = "no firewall on this host can drop incoming connections"


class FirewallRequest(NamedTuple):
    """The wanted state of a host's firewall."""

    job: str  # empty for all jobs, with state absent
    wanted: list[Rule]
    needed: list[str]  # the peers for whom a missing rule is added
    present: bool
    check: bool = False
    root: bool = True
    # For state absent without a name: jobs that may have rules here, and live ones, whose rules stay.
    known: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclasses.dataclass
class Result:
    """The changes, done or predicted, and messages for the owner of the host."""

    backend: str = "none"
    message: str = ""
    changed: bool = False
    rules: list[str] = dataclasses.field(default_factory=list)
    commands: list[str] = dataclasses.field(default_factory=list)
    if_closed: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    persistent: bool = True
    needs_root: bool = False
    diff: dict[str, str] = dataclasses.field(default_factory=lambda: {"before": "", "after": ""})

    def add(self, backend: str, change: Change) -> None:
        """Add the change of one firewall."""
        self.backend = backend if self.backend == "none" else f"{self.backend}+{backend}"
        self.message = " ".join(filter(None, [self.message, change.note]))
        self.persistent = self.persistent and not change.note
        self.changed = self.changed or bool(change.steps)
        self.rules += change.after
        self.commands += [step.shown() for step in change.steps]
        for when, lines in (("before", change.before), ("after", change.after)):
            self.diff[when] += "".join(f"{line}\n" for line in lines)


def apply(run: Run, request: FirewallRequest) -> dict[str, Any]:
    """Bring the host's firewall to the requested state and report it."""
    return dataclasses.asdict(_apply_one(run, request) if request.job else _close_all(run, request))


def _close_all(run: Run, request: FirewallRequest) -> Result:
    """Remove the rules of all jobs except those to keep."""
    names: Sequence[str] = request.known
    try:
        if request.root:
            names = sorted(set().union(*(one.names(request.keep) for one in _all(run, request).values())))
    except Forbidden:
        pass
    total = Result(message="this host has no rules from this collection")
    for name in (name for name in names if name not in request.keep):
        one = _apply_one(run, request._replace(job=name))
        total = dataclasses.replace(
            one,
            changed=total.changed or one.changed,
            persistent=True,
            commands=list(dict.fromkeys(total.commands + one.commands)),
            diff={when: total.diff[when] + one.diff[when] for when in ("before", "after")},
        )
    return total


def _all(run: Run, request: FirewallRequest) -> dict[str, FirewallBackend]:
    """The firewalls with their rules as they are now; without those that another one in force manages."""
    found: dict[str, FirewallBackend] = {}
    for name, kind in BACKENDS.items():
        managed = any(name in other.writes for other in found.values() if request.present and other.in_force())
        if not managed:
            found[name] = kind(run, request.job)
            found[name].read()
    return found


def _apply_one(run: Run, request: FirewallRequest) -> Result:
    """Apply one job's rules."""
    if not request.root:
        return _for_the_owner(run, request)
    wanted = request.wanted if request.present else []
    try:
        backends = list(_all(run, request).values())
        in_force = [one for one in backends if one.in_force()]
        result = Result(message=NOTHING if request.present and not in_force else "")
        # Rules to be removed may be those of a firewall that was active earlier.
        for one in in_force if request.present else backends:
            change = one.change(wanted, request.needed)
            if change.steps and not request.check:
                for step in change.steps:
                    carry_out_step(run, step)
                # Detect a tool that reports success without effect now, not at the first collective.
                one.read()
                left = one.change(wanted, request.needed).steps
                if left:
                    said = "the commands succeeded but had no effect; still missing"
                    raise FirewallError(f"{one.name}: {said}: {left[0].shown()}")
            if change.steps or request.present:
                result.add(one.name, change)
        # Of other programs, also beside a front end; only reported, so a tool that cannot list them is no error.
        for one in [kind(run, request.job) for kind in BACKENDS.values() if kind.packet_filter and request.present]:
            with contextlib.suppress(FirewallError):
                one.read()
                result.foreign += one.foreign()
        return result
    except Forbidden as error:
        return dataclasses.replace(_for_the_owner(run, request), message=str(error))


def carry_out_step(run: Run, step: FirewallStep) -> None:
    """Run a command, or replace a file, keeping its mode and owner."""
    if step.path:
        try:
            old = os.stat(step.path)
            write_whole(step.path, step.text, stat.S_IMODE(old.st_mode), durable=True)
            os.chown(step.path, old.st_uid, old.st_gid)
        except OSError as error:
            raise FirewallError(f"cannot write {step.path}: {error.strerror}") from error
        return
    code, out, err = run(step.argv)
    if code != 0:
        raise FirewallError(f"`{' '.join(step.argv)}` failed: {(err or out).strip() or f'exit code {code}'}")


def _for_the_owner(run: Run, request: FirewallRequest) -> Result:
    """Without root nothing is changed; the owner gets commands for the firewall that seems active."""
    backends = [kind(run, request.job) for kind in BACKENDS.values()]
    wanted = [rule for rule in request.wanted if rule.peer in request.needed]
    guessed = next((one for one in backends if one.suspected()), None)
    if guessed is None:
        # Rules may be loaded without any file or service showing it.
        unseen = [one for one in backends if one.packet_filter and one.has_program(one.packet_filter)][:1]
        shown = [
            FirewallStep(argv).shown() for one in unseen if request.present for argv in one.suggested(wanted, True)
        ]
        return Result(message="no firewall seen; reading its rules needs root", if_closed=shown)
    return Result(
        guessed.name,
        "nothing was changed without root; the owner of this host can run the commands",
        commands=[FirewallStep(argv).shown() for argv in guessed.suggested(wanted, request.present)],
        needs_root=True,
        persistent=False,
    )
