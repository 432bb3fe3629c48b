# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which run a command means, and which host has its newest checkpoint, by what run_info returned on each host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..module_utils._contract.document import number


def seen(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Host and run of every answer of run_info that found one, also of a loop or of run_models, without silent hosts."""
    for host, result in results.items():
        told = result or {}
        for one in told.get("results") or told.get("models") or [told]:
            if one and one.get("run") and one["run"].get("run"):
                yield str(host), dict(one["run"])


def age(run: Mapping[str, Any]) -> tuple[int, float]:
    """Sort key: the newest training last; within a training, the last start last."""
    return number(run.get("training"), "number"), run.get("started") or 0.0


def one_run(results: Mapping[str, Any]) -> str:
    """The name of the run started last on any host, which a command means on all of them; empty if there is none."""
    found = (run for dummy, run in seen(results))
    return str(max(found, key=lambda run: run.get("started") or 0.0, default={"run": ""})["run"])


def newest_model(results: Mapping[str, Any]) -> dict[str, str]:
    """The host with the newest checkpoint of the newest training, with run and folder; empty if there is none.

    A fine-tuned model comes before its base.
    """
    having = [
        (run["run"].endswith("-sft"), age(run)[0], run["saved"], -(run["rank"] or 0), host, run)
        for host, run in seen(results)
        if run.get("saved") is not None
    ]
    if not having:
        return {}
    *dummy, host, run = max(having, key=lambda one: one[:4])
    return {"host": host, "run": run["run"], "run_dir": run["run_dir"]}
