# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a stop may take: as long as the run's own steps and saves."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.stopping import stop_seconds

NODES = [{"checkpoint_bytes": 500_000_000}]
PLAN: dict[str, Any] = {"timeout_seconds": 300, "nodes": NODES}
START = {"kind": "start", "time": 1.0}


def step(seconds: Any) -> dict[str, Any]:
    return {"kind": "step", "time": 2.0, "step": 1, "seconds": seconds}


def saved(seconds: Any) -> dict[str, Any]:
    return {"kind": "checkpoint", "time": 2.0, "step": 1, "seconds": seconds}


REPORTED = {"step_seconds": 3.0, "save_seconds": 40.0, "phase": "sync"}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], float, float]] = {
    # This step, the next and the save, also where each takes twice as long as before.
    "field_44: slow steps and a slow disk": ([START, step(100.0), saved(80.0)], {}, 2 * (2 * 100 + 80), 3600),
    "a quick run that hangs": ([START, step(0.5), saved(0.5)], {}, 30, 39.99),
    "the slowest of the latest steps": ([START, step(1.0), step(60.0), step(1.0), saved(1)], {}, 120.01, 3600),
    "an evaluation ends first": ([START, step(1.0), saved(1.0), {"kind": "eval", "seconds": 200.0}], {}, 200.01, 3600),
    "before the first save its size counts": ([START, step(1.0)], {}, 50, 3600),
    "the heartbeat is believed": ([START], REPORTED, 46, 139.99),
    "a first step that takes long": ([START], {"phase": "forward_backward"}, 300, 300),
    **{
        f"in phase {phase} nothing is saved": ([], {"phase": phase}, 10, 10)
        for phase in (None, "start", "rendezvous", "agree", "resume")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_stop_may_take_as_long_as_the_runs_own_steps_and_saves(case: str) -> None:
    events, heartbeat, least, most = CASES[case]
    assert least <= stop_seconds(events, heartbeat, PLAN) <= most


@pytest.mark.parametrize("odd", [None, "x", [], {}, -1, float("nan"), float("inf"), 10**40, 10**400, True])
def test_odd_figures_are_passed_over(odd):
    heartbeat = {"step_seconds": odd, "save_seconds": odd, "phase": odd if isinstance(odd, str) else None}
    plan = {"timeout_seconds": odd, "trainer": odd, "nodes": odd}
    assert 0 < stop_seconds([START, step(odd), saved(odd), {"kind": "eval", "seconds": odd}], heartbeat, plan) < 10**7
