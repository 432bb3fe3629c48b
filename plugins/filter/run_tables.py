# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that turn results of run_info and run_watch into text or data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import words
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.printable import printable
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.predict import comparison_text
from ansible_collections.nanochat.ddp.plugins.module_utils._run import table as run_table
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY


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


def status_table(results: Any, stall_factor: float = 5.0) -> str:
    """The status screen."""
    return printable(run_table.status_table(rows_of(results), width(), float(stall_factor)))


def status_data(results: Any, stall_factor: float = 5.0) -> dict[str, object]:
    """The same for programs."""
    return run_table.status_data(rows_of(results), float(stall_factor))


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "closing_table": closing_table,
            "status_table": status_table,
            "status_data": status_data,
            "why_no_answer": why_no_answer,
        }
