# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run_info's answer about a keeper, for tests."""

from __future__ import annotations

from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import Seen, without_cpu
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY


def keeper(state: str = "training", generation: int = 2, *members: str, **more: Any) -> dict[str, Any]:
    """The last record of a keeper, of a run on the desktop and the laptop."""
    usual = {
        "why": "",
        "waits": "",
        "since": 1.7e9,
        "rests_since": None,
        "hears": [],
        "hosts": ["desktop", "laptop"],
        "grace": 30.0,
    }
    kept: dict[str, Any] = {"away": [], "repeated": 0, "gave_way": []}
    return {"state": state, "generation": generation, "members": list(members), **usual, **kept, **more}


def run_of(membership: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A healthy rank that trains, with a keeper's record if given."""
    usual = {"state": "running", "step": 9, "done": 10, "steps": 100, "step_seconds": 2.0, "steps_counted": 9}
    now = {"phase": "sync", "phase_seconds": 1.0, "idle_seconds": 1.0, "heartbeat_age": 0.5, "step_age": 1.0}
    return {**EMPTY, **usual, **now, "membership": membership, **more}


def away(host: str, left: float = 1.7e9, **more: Any) -> dict[str, Any]:
    """An absence, as a keeper records it."""
    return {"host": host, "left": left, "why": "%s is not heard" % host, "back": None, "step": None, **more}


def seen_of(**runs: dict[str, Any]) -> list[Seen]:
    """The hosts of a run, each seen once."""
    return [Seen(host, run, without_cpu=without_cpu(run)) for host, run in runs.items()]
