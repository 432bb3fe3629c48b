# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether trainer and data are left out: only where every host has them, and the same."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.setup import what_is_there

OURS: dict[str, Any] = {"trainer": {"source": "ours"}}


def seen(part: str = "", **changes: Any) -> dict[str, Any]:
    """setup_info's answer for a host that has everything, with one part changed."""
    packages = {"torch": "2.13.0"}
    host: dict[str, dict[str, Any]] = {
        "files": {"ready": True, "digest": "f"},
        "venv": {"ready": True, "venv": "/v", "python_version": "3.11", "torch": "2.13.0", "packages": packages},
        "data": {"ready": True, "digest": "d"},
    }
    if part:
        host[part].update(changes)
    return host


@pytest.mark.parametrize(
    ("of_laptop", "left_out"),
    [
        (seen(), {"trainer", "data"}),
        (seen("files", ready=False), {"data"}),
        ({**seen(), "venv": {"ready": False}}, {"data"}),
        (seen("venv", torch="2.12.0"), {"data"}),
        (seen("venv", packages={"torch": "2.13.0", "numpy": "2"}), {"trainer", "data"}),
        (seen("venv", packages={"torch": "2.12.0"}), {"data"}),
        (seen("data", ready=False), {"trainer"}),
        (seen("data", digest="of other files"), {"trainer"}),
    ],
)
def test_a_step_is_left_out_where_all_hosts_have_the_same(of_laptop, left_out):
    found = what_is_there(OURS, {"desktop": seen(), "laptop": of_laptop})
    assert {name for name, there in found.items() if there} == left_out


@pytest.mark.parametrize(
    "plan",
    [
        {"trainer": {"source": "path"}},
        {"trainer": {"source": "ours"}, "stage": {"stage": "sft", "conversations": {"path": "/c"}}},
    ],
)
def test_data_with_more_to_it_than_shards_are_left_to_their_step(plan):
    assert not what_is_there(plan, {"desktop": seen()})["data"]
