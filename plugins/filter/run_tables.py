# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that turn results of run_info and run_watch into text or data."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils._kit import words
from ..module_utils._kit.printable import printable
from ..module_utils._preflight.predict import comparison_text
from ..module_utils._run import table as run_table
from ..module_utils._run.state import EMPTY, RUNNING


def width() -> int:
    """The terminal's width as the display found it, without its indentation; 0 if there is none."""
    told = os.environ.get("NANOCHAT_DDP_COLUMNS", "")
    return max(0, int(told) - 2) if told.isdigit() else 0


def why_no_answer(result: Mapping[str, Any]) -> str:
    """Why a task's result is missing, in one line."""
    if "timedout" in result:
        return f"it did not answer within {(result['timedout'] or {}).get('period', 'some')} s; check that it is on and not frozen"
    return words.plain_reason(str(result.get("msg") or "it did not answer")).splitlines()[0]


def rows_of(results: Any) -> list[run_table.Row]:
    """The results of several hosts as rows, whatever happened to the task."""
    if not isinstance(results, Mapping):
        raise AnsibleFilterError(f"a dictionary from host to result is wanted, not {type(results).__name__}")
    rows: list[run_table.Row] = []
    for host, told in results.items():
        result = told or {}
        run = dict(result.get("run") or {})
        if run.get("state") is None:
            run = {**EMPTY, **run, "state": None}
        reachable = not result.get("unreachable") and result.get("reachable", True)
        problem = None if result.get("run") else why_no_answer(result)
        rows.append({**result, "host": str(host), "run": run, "reachable": reachable, "problem": problem})
    return rows


def closing_table(results: Any, prediction: Mapping[str, Any] | None = None) -> str:
    """The closing table, followed by the prediction compared with the result."""
    rows = rows_of(results)
    happened = {row["host"]: row["run"] for row in rows}
    beside = comparison_text(prediction, happened) if prediction else ""
    return printable("\n".join([run_table.closing_table(rows, width()), *([beside] if beside else [])]))


def status_table(results: Any) -> str:
    """The status screen."""
    return printable(run_table.status_table(rows_of(results), width()))


def last_lines(results: Any, hostvars: Mapping[str, Any]) -> str:
    """The last lines of all logs, and the commands that follow those of the running ranks."""
    rows = rows_of(results)
    wide = max(len(row["host"]) for row in rows)
    said, follow = [], []
    for row in rows:
        host, run = row["host"], row["run"]
        nothing = row["problem"] or "no log yet: " + (str(run["log"]) if run["log"] else "no run was started here")
        said += [f"{host:<{wide}} | {line}" for line in run["last_lines"] or [nothing]]
        if run["state"] == RUNNING:
            follow.append("  " + by_hand(host, hostvars[host], ["tail", "-F", str(run["log"])]))
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


def status_data(results: Any) -> dict[str, object]:
    """The same for programs."""
    return run_table.status_data(rows_of(results))


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "closing_table": closing_table,
            "status_table": status_table,
            "status_data": status_data,
            "last_lines": last_lines,
            "why_no_answer": why_no_answer,
        }
