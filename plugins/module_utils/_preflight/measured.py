# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rehearsal's measurements as stored on a host. Pure functions."""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import subject
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.rates import slowest_link
from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import finite


def by_precision(results: Sequence[Mapping[str, Any]], key: str) -> Document:
    """The first measured precision of matrix products (the results' item); with several, each one's in `products`.
    key: what was measured."""
    timed = {str(result.get("item")): measured_step(result) for result in results}
    products = {matmul: found for matmul, found in timed.items() if found}
    if not products:
        return {}
    kept = {"key": key, **next(iter(products.values()))}
    return {**kept, "products": products} if len(timed) > 1 else kept


def measured_step(result: Mapping[str, Any]) -> Document | None:
    """A measured step's result; None if it failed."""
    found = last_object(result)
    return found if found and speed_of(found) else None


def speed_of(found: Document) -> float:
    """Tokens per second; 0 if unknown."""
    return finite(found.get("tokens_per_second")) or 0.0


def last_object(result: Mapping[str, Any]) -> Document | None:
    """The JSON object in the last line of a successful program."""
    lines = str(result.get("stdout") or "").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if result.get("rc") == 0 and lines else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def with_link(
    measured: Mapping[str, Any], plan: Plan, links: Sequence[Mapping[str, Any]], gloo: Mapping[str, Any]
) -> Document:
    """A host's measured step with its slowest link and the model: what the plan needs to choose
    the best ddp_sync."""
    training, rate = plan["training"], finite((last_object(gloo) or {}).get("bandwidth_mbit"))
    link = slowest_link({"": {"links": links}}, rate)
    kept = {"link": link._asdict()} if link else {}
    return {**measured, **kept, **measured_of(plan), "subject": subject(plan["model"], training["device_batch"])}


def measured_of(plan: Plan) -> Document:
    """The model that was measured, so that other depths can be told from it."""
    return {"model": dict(plan["model"]), "device_batch": plan["training"]["device_batch"]}
