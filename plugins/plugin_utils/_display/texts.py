# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts of the display for a task, a finding, an error and the end of a play. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ...module_utils._contract.findings import Finding
from ...module_utils._kit.words import plain_reason

STORY = ("plan", "preflight", "network", "trainer", "data", "launch", "watch", "collect", "tracker", "doctor")
# Their messages are complete sentences; the task's name adds nothing.
SPEAKING = ("fail", "assert", "ansible.builtin.fail", "ansible.builtin.assert")


def step_of(task: Any) -> str | None:
    """The step of a task: its role, if it is one of ours.

    A role that another one makes use of is a part of that step; a doctor who is called is a step of his own.
    """
    # The private name also tells which role includes it; the public one, which is left if that goes, only its own.
    own = str(task.get_name()).rpartition(" : ")[0].rpartition(".")[2]
    step, role = own if own in STORY else None, getattr(task, "_role", None)
    while role is not None:
        name = str(role.get_name()).rpartition(".")[2]
        if name == "doctor":
            return name
        step = name if name in STORY else step
        role = next(iter(role.get_parents()), None)
    # The role preflight does both; only train.yml's tag tells them apart.
    return "rehearsal" if step == "preflight" and "rehearse" in getattr(task, "tags", ()) else step


def task_name(task: Any) -> str:
    """A task's name without its role's."""
    return str(task.get_name()).strip().rpartition(" : ")[2]


def sentence(text: Any) -> str:
    """A message without surrounding empty lines."""
    return str(text or "").strip("\n").rstrip()


def finding_text(found: Finding) -> str:
    """A finding in two lines: what was seen where, and the remedy."""
    where, seen, remedy = str(found.get("host") or ""), str(found.get("seen")), str(found.get("remedy") or "")
    if found.get("peer"):
        # The sentence says which of them tries to reach which.
        where += f", {found['peer']}"
    text = f"{found['code']}  {where}: {seen}" if where else f"{found['code']}  {seen}"
    if not remedy:
        return text
    return f"{text}\n  {remedy}" if found.get("severity") == "info" else f"{text}\n  do: {remedy}"


def findings_in(result: Mapping[str, object]) -> list[Finding]:
    """The findings in a result."""
    found = result.get("findings")
    if not isinstance(found, list):
        return []
    whole = [item for item in found if isinstance(item, Mapping) and {"code", "severity", "seen"} <= set(item)]
    return cast("list[Finding]", whole)


def unreachable_text(host: str, message: str) -> str:
    """One sentence for a host that cannot be reached."""
    said = sentence(plain_reason(message))
    said = " ".join(line.strip() for line in said.splitlines() if line.strip())
    return f"{host} cannot be reached: {said}\n  do: check that it is on and that `ssh` to it works with the inventory's settings."


def error_text(result: Any, seen: Mapping[str, object], text: str, mark: str) -> str:
    """An error: where, in what task, the error, and other output of the task."""
    lines = _error_lines(result, text, mark)
    for stream in ("stderr", "stdout", "module_stderr"):
        said = sentence(seen.get(stream))
        if said and said not in text:
            lines.append(f"{stream}:\n{said}")
    if text.startswith("Task failed") or "module_stderr" in seen:
        lines.append(f"at {result.task.get_path()}")
    return "\n  ".join("\n".join(lines).split("\n"))


def _error_lines(result: Any, text: str, mark: str) -> list[str]:
    """Leave out the host if a task runs once for all of them."""
    task, host = task_name(result.task), result.host.get_name()
    if not result.task.run_once:
        said = result.task.action in SPEAKING and text.startswith((f"{host}:", f"{host} "))
        return [f"{mark} {text}"] if said else [f"{mark} {host}: {task}", text]
    ours = str(result.task.action).startswith("nanochat.ddp.")
    return [f"{mark} {text}"] if ours or result.task.action in SPEAKING else [f"{mark} {task}", text]


def closing_text(stats: Any, failed: set[str], took: str, checking: bool) -> str:
    """The last line: the duration, failures, and changes."""
    sums = {host: stats.summarize(host) for host in sorted(stats.processed)}
    bad = [host for host, total in sums.items() if total["failures"] or total["unreachable"]]
    where = [host for host in bad if host in failed]
    changed = {host: total["changed"] for host, total in sums.items() if total["changed"]}
    outcome = f"failed on {', '.join(where)}" if where else "failed" if bad else "done"
    return f"{outcome} in {took}; {changes_word(checking)}: {counted_text(changed) or 'nothing'}"


def changes_word(checking: bool) -> str:
    """The changes of the play, done or predicted."""
    return "would change" if checking else "changed"


def counted_text(counts: Mapping[str, int]) -> str:
    """A count per host."""
    return ", ".join(f"{host} {count}" for host, count in sorted(counts.items()))
