# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rehearsal's measurements as stored on a host. Pure functions."""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.products import CLEARLY
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import subject
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.rates import by_peer, slowest_link
from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import finite


def best_of_all(results: Sequence[Mapping[str, Any]], key: str) -> Document:
    """The result for the first precision that was timed, with those of each set of processors (items [set, products]), and
    with several precisions, each one's; key: what was measured."""
    by_products: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        cores, matmul = result.get("item") or [{}, ""]
        by_products.setdefault(str(matmul), []).append({**result, "item": cores})
    best = {matmul: best_of_sets(timed) for matmul, timed in by_products.items()}
    products = {matmul: found for matmul, found in best.items() if found}
    if not products:
        return {}
    kept = {"key": key, **next(iter(products.values()))}
    return {**kept, "products": products} if len(by_products) > 1 else kept


def best_of_sets(results: Sequence[Mapping[str, Any]]) -> Document:
    """The fastest of the timed sets {name, cpus}, with each one's result."""
    timed = [(result["item"], found) for result in results if (found := measured_step(result)) is not None]
    if not timed:
        return {}
    item, best = timed[0]
    for other, found in timed[1:]:
        if speed_of(found) > CLEARLY * speed_of(best):
            item, best = other, found
    if len(results) == 1:
        return best
    sets = {str(one["name"]): speed_of(found) for one, found in timed}
    return {**best, "cores": list(item["cpus"]), "cores_name": item["name"], "sets": sets}


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
    names = host_by_address(plan)
    peers = by_peer({**one, "host": names[one["address"]]} for one in links if one.get("address") in names)
    kept = {"link": link._asdict(), "links": {peer: list(one) for peer, one in peers.items()}} if link else {}
    return {**measured, **kept, **measured_of(plan), "subject": subject(plan["model"], training["device_batch"])}


def measured_of(plan: Plan) -> Document:
    """The model that was measured, so that other depths can be told from it."""
    return {"model": dict(plan["model"]), "device_batch": plan["training"]["device_batch"]}


def host_by_address(plan: Plan) -> dict[str, str]:
    """The hosts with an address of their own."""
    places = [str(node.get("address")) for node in plan["nodes"]]
    return {place: node["host"] for place, node in zip(places, plan["nodes"]) if places.count(place) == 1}
