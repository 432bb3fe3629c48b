# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Opens a host's firewall to the peers of a job, and closes exactly that again."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from typing import Any, Callable, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.every import FirewallBackend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    MARK,
    Change,
    FirewallError,
    FirewallStep,
    Forbidden,
    Rule,
    Run,
)

MOST_BLOCKING = 3
NOTHING = "nothing on this host blocks incoming connections"


class FirewallRequest(NamedTuple):
    """The wanted state of a host's firewall."""

    mark: str
    wanted: list[Rule]
    present: bool
    backend: str = "auto"
    check: bool = False
    root: bool = True
    # For state absent without a name: jobs that may have rules here, and jobs to keep.
    known: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclasses.dataclass
class Result:
    """The changes, done or predicted, and messages for the owner of the host."""

    backend: str
    active: bool
    message: str
    changed: bool = False
    rules: list[str] = dataclasses.field(default_factory=list)
    commands: list[str] = dataclasses.field(default_factory=list)
    if_closed: list[str] = dataclasses.field(default_factory=list)
    blocking: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    closed: list[str] = dataclasses.field(default_factory=list)
    persistent: bool = True
    needs_root: bool = False
    diff: dict[str, str] = dataclasses.field(default_factory=lambda: {"before": "", "after": ""})


def firewalls_in_force(all_of_them: dict[str, FirewallBackend], wanted: Sequence[Rule]) -> list[FirewallBackend]:
    """Active firewalls that may drop the peers' packets, without those managed by another one."""
    found: list[FirewallBackend] = []
    for name, backend in all_of_them.items():
        if not any(name in other.writes for other in found) and backend.in_force(wanted):
            found.append(backend)
    return found


def apply(run: Run, request: FirewallRequest) -> dict[str, Any]:
    """Bring the host's firewall to the requested state and report it."""
    known = ["auto", *FirewallBackend.kinds, "none"]
    if request.backend not in known:
        raise FirewallError(f"backend is {request.backend}; it must be one of: {', '.join(known)}")
    return dataclasses.asdict(_apply_one(run, request) if request.mark != MARK else _close_all(run, request))


def _close_all(run: Run, request: FirewallRequest) -> Result:
    """Remove the rules of all jobs except those to keep."""
    backends = FirewallBackend.all(run, MARK).values()
    names: Sequence[str] = request.known
    if request.root:
        try:
            names = sorted(set().union(*(backend.names(request.known) for backend in backends)))
        except Forbidden:
            pass
    total = Result("none", False, "this host has no rules from this collection")
    for name in names:
        if name not in request.keep:
            total = _sum_of(total, _apply_one(run, request._replace(mark=MARK + name)), name)
    return total


def _sum_of(total: Result, one: Result, name: str) -> Result:
    """Combine the results of several jobs."""
    return dataclasses.replace(
        one,
        changed=total.changed or one.changed,
        persistent=True,
        commands=list(dict.fromkeys(total.commands + one.commands)),
        diff={when: total.diff[when] + one.diff[when] for when in ("before", "after")},
        closed=total.closed + ([name] if one.changed else []),
    )


def _apply_one(run: Run, request: FirewallRequest) -> Result:
    """Apply one job's rules."""
    backends = FirewallBackend.all(run, request.mark)
    if request.backend == "none":
        return Result("none", False, NOTHING + " (by your setting)")
    if not request.root:
        return _for_the_owner(backends, request)
    try:
        if not request.present:
            # They may have been opened while another firewall was active.
            asked = list(backends.values()) if request.backend == "auto" else [backends[request.backend]]
            changes = [(backend, backend.change([])) for backend in asked]
            changes = [(backend, change) for backend, change in changes if change.steps or change.before]
            return _carry_out(run, request, changes, bool(changes))
        if request.backend == "auto":
            chosen = firewalls_in_force(backends, request.wanted)
            active = bool(chosen)
        else:
            chosen = [backends[request.backend]]
            active = chosen[0].in_force(request.wanted)
        result = _carry_out(run, request, [(one, one.change(request.wanted)) for one in chosen], active)
        if not result.commands:
            result.foreign = _first_lines([one.foreign_rules for one in backends.values()], request.wanted)
        return result
    except Forbidden as error:
        return dataclasses.replace(_for_the_owner(backends, request), message=str(error))


def _carry_out(
    run: Run, request: FirewallRequest, changes: list[tuple[FirewallBackend, Change]], active: bool
) -> Result:
    steps = [step for dummy, change in changes for step in change.steps]
    listings = [backend.blocking_rules for backend, dummy in changes]
    blocking = _first_lines(listings, request.wanted) if steps and request.present else []
    if not request.check:
        for step in steps:
            carry_out_step(run, step)
        for backend, change in changes:
            _verify(backend, change, request)
    before = [line for dummy, change in changes for line in change.before]
    rules = [line for dummy, change in changes for line in change.after]
    message = " ".join(change.note for dummy, change in changes if change.note)
    if not message and not rules and request.present:
        message = "the peers already have access" if active else NOTHING
    return Result(
        "+".join(backend.name for backend, dummy in changes) or "none",
        active,
        message,
        changed=bool(steps),
        rules=rules,
        commands=[step.shown() for step in steps],
        blocking=blocking,
        persistent=all(change.persistent for dummy, change in changes),
        diff={"before": _lines(before), "after": _lines(rules)},
    )


def _first_lines(listings: Sequence[Callable[[Sequence[Rule]], list[str]]], wanted: Sequence[Rule]) -> list[str]:
    """The first rules that block; only reported, so a tool that cannot list them is no error."""
    try:
        return [line for list_rules in listings for line in list_rules(wanted)][:MOST_BLOCKING]
    except FirewallError:
        return []


def _lines(rules: list[str]) -> str:
    return "".join(f"{line}\n" for line in rules)


def _verify(backend: FirewallBackend, change: Change, request: FirewallRequest) -> None:
    """Detect a tool that reports success without effect now, not at the first collective."""
    if not change.steps:
        return
    left = backend.change(request.wanted if request.present else []).steps
    if left:
        raise FirewallError(
            f"{backend.name}: the commands succeeded but had no effect; still missing: {left[0].shown()}"
        )


def carry_out_step(run: Run, step: FirewallStep) -> None:
    """Run a command or replace a file."""
    if step.path:
        try:
            replace(step.path, step.text)
        except OSError as error:
            raise FirewallError(f"cannot write {step.path}: {error.strerror}") from error
        return
    code, out, err = run(step.argv)
    if code != 0:
        raise FirewallError(f"`{' '.join(step.argv)}` failed: {(err or out).strip() or f'exit code {code}'}")


def replace(path: str, text: str) -> None:
    """Replace a file atomically, keeping its mode and owner."""
    handle, draft = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".nanochat-ddp-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as output:
            output.write(text)
        old = os.stat(path)
        shutil.copystat(path, draft)
        os.chown(draft, old.st_uid, old.st_gid)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise


def _for_the_owner(backends: dict[str, FirewallBackend], request: FirewallRequest) -> Result:
    """Without root nothing is changed; the owner gets commands for the firewall that seems active."""
    names: Sequence[str] = list(backends) if request.backend == "auto" else [request.backend]
    guessed = [backends[name] for name in names if request.backend != "auto" or backends[name].suspected()][:1]
    if not guessed:
        result = Result("none", False, "no firewall seen; reading its rules needs root")
        # Rules may be loaded without any file or service showing it.
        unseen = [
            one
            for name, one in backends.items()
            if name in names and one.packet_filter and one.has_program(one.packet_filter)
        ]
        if unseen and request.present:
            result.if_closed = [step.shown() for step in unseen[0].suggested(request.wanted, True)]
        return result
    return Result(
        guessed[0].name,
        True,
        "nothing was changed without root; the owner of this host can run the commands",
        commands=[step.shown() for step in guessed[0].suggested(request.wanted, request.present)],
        needs_root=True,
        persistent=False,
    )
