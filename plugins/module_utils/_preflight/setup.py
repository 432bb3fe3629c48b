# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides once for all hosts whether the steps trainer and data have anything to copy. Pure functions."""

from __future__ import annotations

from typing import Any, Mapping

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document, section
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.agreement import disagreements


def what_is_there(plan: Document, seen: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """The steps, and whether each has nothing to copy to any host, by setup_info's results."""
    return {
        "trainer": _is_ready(seen, "files", "venv"),
        "data": _brings_shards_only(plan) and _is_ready(seen, "data"),
    }


def _is_ready(seen: Mapping[str, Mapping[str, Any]], *parts: str) -> bool:
    """Whether every host has these parts, all of them equal; if they differ, the step reports how."""
    if not all(one[part]["ready"] for one in seen.values() for part in parts):
        return False
    found = {part: {host: one[part] for host, one in seen.items()} for part in parts}
    return not any(disagreements(found))


def _brings_shards_only(plan: Document) -> bool:
    """Fine-tuning also copies conversations, and other trainers need their own names for the data."""
    stage = section(plan, "stage")
    return section(plan, "trainer").get("source") == "ours" and not {"conversations", "held_out"} & set(stage)
