# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the run is in progress or done, by the probes."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.so_far import so_far


def probe(digest: str = "d1", exit_code: int | None = 0, alive: bool = False, stopped: bool = False) -> dict[str, Any]:
    processes = [{"session": "s1"}] if alive else [{"session": "of another run"}, {"session": None}]
    return {
        "run": {"plan_digest": digest, "session": {"id": "s1", "exit_code": exit_code, "stopped": stopped}},
        "processes": processes,
    }


@pytest.mark.parametrize(
    ("of_laptop", "running", "done"),
    [
        (probe(), False, True),
        (probe(exit_code=None, alive=True), True, False),
        (probe(exit_code=1), False, False),
        (probe(exit_code=None), False, False),
        (probe("d2"), False, False),
        (probe(stopped=True), False, False),
        ({"run": None, "processes": [{"session": None}]}, False, False),
        (None, False, False),
    ],
)
def test_a_run_is_in_progress_with_any_host_and_done_with_all(of_laptop, running, done):
    probes = {"desktop": probe(), "laptop": of_laptop}
    assert so_far("d1", probes, fresh=False) == {"running": running, "done": done}
    assert so_far("d1", probes, fresh=True) == {"running": running, "done": False}
