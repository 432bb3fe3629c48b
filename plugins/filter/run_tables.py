# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that turn results of run_info and run_watch into text or data."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ..module_utils._kit import words
from ..module_utils._kit.printable import printable
from ..module_utils._preflight.predict import Outlook, comparison_text
from ..module_utils._run import table as run_table
from ..module_utils._run.health import UNSEEN, Seen, without_cpu
from ..module_utils._run.state import RUNNING


def width() -> int:
    """The terminal's width as the display found it, without its indentation; 0 if there is none."""
    told = os.environ.get("NANOCHAT_DDP_COLUMNS", "")
    return max(0, int(told) - 2) if told.isdigit() else 0


def why_no_answer(result: Mapping[str, Any]) -> str:
    """Why a task's result is missing, in one line."""
    if "timedout" in result:
        return f"it did not answer within {(result['timedout'] or {}).get('period', 'some')} s; check that it is on and not frozen"
    return words.plain_reason(str(result.get("msg") or "it did not answer")).splitlines()[0]


def seen_of(results: Mapping[str, Any]) -> list[Seen]:
    """Several hosts as they were seen last, from their results, whatever happened to the task."""
    return [seen_in(str(host), told or {}) for host, told in results.items()]


def seen_in(host: str, result: Mapping[str, Any]) -> Seen:
    """A host as it was seen last, from its result."""
    run = {**UNSEEN, **(result.get("run") or {})}
    reachable = not result.get("unreachable") and result.get("reachable", True)
    return Seen(
        host,
        run,
        silent=0.0 if reachable else math.inf,
        without_cpu=without_cpu(run),
        verdict=result.get("verdict"),
        sentence=result.get("sentence"),
        problem=None if result.get("run") else why_no_answer(result),
        newest_run=result.get("newest_run"),
    )


def closing_table(results: Any, prediction: Outlook | None = None) -> str:
    """The closing table, followed by the prediction compared with the result."""
    seen = seen_of(results)
    beside = comparison_text(prediction, {one.host: one.run for one in seen}) if prediction else ""
    return printable("\n".join([run_table.closing_table(seen, width()), *([beside] if beside else [])]))


def status_table(results: Any, as_json: bool = False) -> str:
    """The status screen; the same for programs."""
    if as_json:
        return json.dumps(run_table.status_data(seen_of(results)), indent=2, sort_keys=True)
    return printable(run_table.status_screen(seen_of(results), width()))


def last_lines(results: Any, hostvars: Mapping[str, Any]) -> str:
    """The last lines of all logs, and the commands that follow those of the running ranks."""
    seen = seen_of(results)
    wide = max(len(one.host) for one in seen)
    said, follow = [], []
    for one in seen:
        nothing = one.problem or "no log yet: " + (one.run["log"] or "no run was started here")
        said += [f"{one.host:<{wide}} | {line}" for line in one.run["last_lines"] or [nothing]]
        if one.run["state"] == RUNNING:
            follow.append("  " + by_hand(one.host, hostvars[one.host], ["tail", "-F", one.run["log"]]))
    return printable("\n".join([*said, *(["To follow them:", *follow] if follow else [])]))


def by_hand(host: str, known: Mapping[str, Any], argv: list[str]) -> str:
    """The command line for a person who runs a program on a host, by the variables with which Ansible reaches it."""
    if str(known.get("ansible_connection", "ssh")).endswith("local"):
        return shlex.join(argv)
    key = known.get("ansible_ssh_private_key_file") or known.get("ansible_private_key_file")
    port, user = known.get("ansible_port"), known.get("ansible_user")
    more = [str(known[name]) for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args") if known.get(name)]
    target = f"{user}@{known.get('ansible_host') or host}" if user else str(known.get("ansible_host") or host)
    words = [*(["-i", str(key)] if key else []), *(["-p", str(port)] if port else []), *shlex.split(" ".join(more))]
    return shlex.join(["ssh", *words, target, shlex.join(argv)])


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "closing_table": closing_table,
            "status_table": status_table,
            "last_lines": last_lines,
            "why_no_answer": why_no_answer,
        }
