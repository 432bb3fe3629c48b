# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Opens a host's firewall for the peers of a job, and closes exactly that again."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, NamedTuple, Sequence, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.every import Backend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    MARK,
    Change,
    FirewallError,
    Forbidden,
    Rule,
    Run,
    Step,
)

MOST_BLOCKING = 3
NOTHING = "nothing on this host blocks incoming connections"


class Request(NamedTuple):
    """The wanted state of a host's firewall."""

    mark: str
    wanted: list[Rule]
    present: bool
    backend: str = "auto"
    check: bool = False
    root: bool = True
    # For state absent without a name: whose rules may be here, and whose stay.
    known: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


class Result(TypedDict):
    """The changes, done or predicted, and what the owner of the host is to know."""

    changed: bool
    backend: str
    active: bool
    rules: list[str]
    commands: list[str]
    if_closed: list[str]
    blocking: list[str]
    foreign: list[str]
    closed: list[str]
    persistent: bool
    needs_root: bool
    message: str
    diff: dict[str, str]


def firewalls_in_force(all_of_them: dict[str, Backend], wanted: Sequence[Rule]) -> list[Backend]:
    """Those that may end the peers' packets, without those whose rules another one writes."""
    found: list[Backend] = []
    for name, backend in all_of_them.items():
        if not any(name in other.writes for other in found) and backend.in_force(wanted):
            found.append(backend)
    return found


def apply(run: Run, request: Request) -> Result:
    """Bring the host's firewall to what is asked and tell what was done."""
    known = ["auto", *Backend.kinds, "none"]
    if request.backend not in known:
        raise FirewallError(f"backend is {request.backend}; it must be one of: {', '.join(known)}")
    return _apply_one(run, request) if request.mark != MARK else close_all(run, request)


def close_all(run: Run, request: Request) -> Result:
    """Remove the rules of all jobs but those that are to stay."""
    backends = Backend.all(run, MARK).values()
    names: Sequence[str] = request.known
    if request.root:
        try:
            names = sorted(set().union(*(backend.names(request.known) for backend in backends)))
        except Forbidden:
            pass
    total = _result("none", False, "this host has no rules from this collection")
    for name in names:
        if name not in request.keep:
            total = _sum_of(total, _apply_one(run, request._replace(mark=MARK + name)), name)
    return total


def _sum_of(total: Result, one: Result, name: str) -> Result:
    """One result for the changes of several jobs."""
    return {
        **one,
        "changed": total["changed"] or one["changed"],
        "persistent": True,
        "commands": list(dict.fromkeys(total["commands"] + one["commands"])),
        "diff": {when: total["diff"][when] + one["diff"][when] for when in ("before", "after")},
        "closed": total["closed"] + ([name] if one["changed"] else []),
    }


def _apply_one(run: Run, request: Request) -> Result:
    """The same for the rules of one job."""
    backends = Backend.all(run, request.mark)
    if request.backend == "none":
        return _result("none", False, NOTHING + " (by your setting)")
    if not request.root:
        return _for_the_owner(backends, request)
    try:
        if not request.present:
            # What is closed may have been opened while another firewall was active.
            asked = list(backends.values()) if request.backend == "auto" else [backends[request.backend]]
            changes = [(backend, backend.change([])) for backend in asked]
            chosen = [backend for backend, change in changes if change.steps or change.before]
            return _carry_out(run, request, chosen, bool(chosen), changes)
        chosen = (
            [backends[request.backend]] if request.backend != "auto" else firewalls_in_force(backends, request.wanted)
        )
        active = bool(chosen) and any(backend.in_force(request.wanted) for backend in chosen)
        changes = [(backend, backend.change(request.wanted)) for backend in chosen]
        result = _carry_out(run, request, chosen, active, changes)
        if not result["commands"]:
            result["foreign"] = foreign_rules(list(backends.values()), request.wanted)
        return result
    except Forbidden as error:
        return {**_for_the_owner(backends, request), "message": str(error)}


def _carry_out(run: Run, request: Request, chosen: list[Backend], active: bool, changes: list[Any]) -> Result:
    steps = [step for dummy, change in changes for step in change.steps]
    blocking = blocking_rules(chosen, request.wanted) if steps and request.present else []
    if not request.check:
        for step in steps:
            carry_out_step(run, step)
        for backend, change in changes:
            _verify(backend, change, request)
    name = "+".join(backend.name for backend in chosen) or "none"
    result = _result(name, active, " ".join(change.note for dummy, change in changes if change.note))
    result["changed"] = bool(steps)
    result["rules"] = [line for dummy, change in changes for line in change.after]
    result["commands"] = [step.shown() for step in steps]
    result["blocking"] = blocking
    result["persistent"] = all(change.persistent for dummy, change in changes)
    result["diff"] = {
        "before": _lines(line for dummy, change in changes for line in change.before),
        "after": _lines(result["rules"]),
    }
    if not result["message"] and not result["rules"]:
        result["message"] = "" if not request.present else NOTHING if not active else "the peers already have access"
    return result


def blocking_rules(chosen: list[Backend], wanted: Sequence[Rule]) -> list[str]:
    """The owner's rules that stand in the way; only told, so a tool that cannot list them is no failure."""
    try:
        return [line for backend in chosen for line in backend.blocking_rules(wanted)][:MOST_BLOCKING]
    except FirewallError:
        return []


def foreign_rules(backends: list[Backend], wanted: Sequence[Rule]) -> list[str]:
    """Rules of other programs that block; they are reported only."""
    try:
        return [line for backend in backends for line in backend.foreign_rules(wanted)][:MOST_BLOCKING]
    except FirewallError:
        return []


def _lines(rules: Any) -> str:
    return "".join(f"{line}\n" for line in rules)


def _verify(backend: Backend, change: Change, request: Request) -> None:
    """A tool that says yes and does nothing is found here and not at the first collective."""
    if not change.steps:
        return
    left = backend.change(request.wanted if request.present else []).steps
    if left:
        raise FirewallError(
            f"{backend.name}: the commands succeeded but had no effect; still missing: {left[0].shown()}"
        )


def carry_out_step(run: Run, step: Step) -> None:
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
    """A file gets its new text whole or not at all, and keeps its mode and owner."""
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


def _for_the_owner(backends: dict[str, Backend], request: Request) -> Result:
    """Without root nothing is changed; the owner gets the commands for what seems to be active."""
    names: Sequence[str] = list(backends) if request.backend == "auto" else [request.backend]
    guessed = [backends[name] for name in names if request.backend != "auto" or backends[name].suspected()][:1]
    if not guessed:
        result = _result("none", False, "no firewall seen; reading its rules needs root")
        # Rules may be loaded of which no file and no service tells.
        unseen = [
            one
            for name, one in backends.items()
            if name in names and one.packet_filter and one.there(one.packet_filter)
        ]
        if unseen and request.present:
            result["if_closed"] = [step.shown() for step in unseen[0].suggested(request.wanted, True)]
        return result
    result = _result(
        guessed[0].name, True, "nothing was changed without root; the owner of this host can run the commands"
    )
    result["commands"] = [step.shown() for step in guessed[0].suggested(request.wanted, request.present)]
    result["needs_root"] = True
    result["persistent"] = False
    return result


def _result(backend: str, active: bool, message: str) -> Result:
    return {
        "changed": False,
        "backend": backend,
        "active": active,
        "rules": [],
        "commands": [],
        "if_closed": [],
        "blocking": [],
        "foreign": [],
        "closed": [],
        "persistent": True,
        "needs_root": False,
        "message": message,
        "diff": {"before": "", "after": ""},
    }
