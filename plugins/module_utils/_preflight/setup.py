# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the steps trainer and data have anything to bring, decided once for all hosts from one look at each. Pure functions."""

from __future__ import annotations

from typing import Any, Mapping, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document, section
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.agreement import disagreements


class Setup(TypedDict):
    """Which steps have nothing to bring to any host."""

    trainer: bool
    data: bool


def what_is_there(plan: Document, seen: Mapping[str, Mapping[str, Any]]) -> Setup:
    """From what setup_info returned of every host."""
    return {"trainer": _same_trainer(seen), "data": _brings_shards_only(plan) and _same_data(seen)}


def _same_trainer(seen: Mapping[str, Mapping[str, Any]]) -> bool:
    if not all(one["files"]["ready"] and one["venv"]["ready"] for one in seen.values()):
        return False
    files = {host: one["files"] for host, one in seen.items()}
    venvs = {host: one["venv"] for host, one in seen.items()}
    # Where they disagree the step says how.
    return not list(disagreements(files, venvs))


def _brings_shards_only(plan: Document) -> bool:
    """Fine-tuning brings conversations as well, and another trainer wants names of its own for the data."""
    stage = section(plan, "stage")
    return section(plan, "trainer").get("source") == "ours" and not {"conversations", "held_out"} & set(stage)


def _same_data(seen: Mapping[str, Mapping[str, Any]]) -> bool:
    found = [one["data"] for one in seen.values()]
    return all(one["ready"] for one in found) and len({one["digest"] for one in found}) == 1
