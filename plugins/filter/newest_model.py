# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that choose between hosts: the run that a command means, and the host with its newest model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._run import find
from ansible_collections.nanochat.ddp.plugins.module_utils._run.collected import collected_model


def seen(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Host and run of every answer of run_info, also of a loop, without silent hosts."""
    for host, result in results.items():
        for one in (result or {}).get("results") or [result]:
            if one and one.get("run"):
                yield str(host), dict(one["run"])


def one_run(results: Mapping[str, Any]) -> str:
    """The name of the run started last on any host; empty if there is none."""
    return find.one_run(seen(results)) or ""


def newest_plans(results: Mapping[str, Any]) -> list[Any]:
    """The plans returned by run_info with the runs, that of the newest training first."""
    told = [result for result in results.values() if result.get("plan") is not None and result.get("run")]
    return [result["plan"] for result in sorted(told, key=lambda result: find.age(result["run"]), reverse=True)]


def newest_model(results: Mapping[str, Any]) -> dict[str, str]:
    """The host with the newest checkpoint of the newest training, with run and folder; empty if there is none."""
    found = find.newest_model(seen(results))
    return found._asdict() if found else {}


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "one_run": one_run,
            "newest_model": newest_model,
            "newest_plans": newest_plans,
            "collected_model": lambda results, run="": collected_model(str(results), str(run)) or "",
        }
