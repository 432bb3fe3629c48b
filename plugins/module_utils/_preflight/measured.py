# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rehearsal's measurements as stored on a host. Pure functions."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Mapping, Sequence

from .._contract.decode import decode
from .._contract.document import Document
from .._contract.plan import Plan
from .._contract.probe import Measured
from .._contract.validate import InvalidHostData
from .._plan.step_model import subject
from .._run.metrics import finite
from .rates import slowest_link


def measured_step(result: Mapping[str, Any], key: str) -> Document:
    """The result of scripts.measure_step with what was measured; empty if it failed."""
    found = last_object(result)
    with contextlib.suppress(InvalidHostData):
        return {"key": key, **decode(Measured, found)} if found and finite(found.get("tokens_per_second")) else {}
    return {}


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
