# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rehearsal's measurements of a host: its step and its links. Pure functions."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Iterable, Mapping, Optional

from .._contract.decode import decode
from .._contract.document import Document
from .._contract.plan import Plan
from .._contract.probe import Measured
from .._contract.validate import InvalidHostData
from .._plan.step_model import WIRE_SHARE, Link
from .._run.metrics import finite

# Below this the link is the limit, and a short all-reduce would underestimate it; above it, Gloo's copying is.
FAST_LINE = 2000.0


def last_object(result: Mapping[str, Any]) -> Document:
    """The JSON object in the last line of a program's output; empty if there is none."""
    lines = str(result.get("stdout") or "").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def program_answer(result: Mapping[str, Any]) -> Document:
    """The JSON object printed by a trainer program, or its last output if there is none."""
    words = str(result.get("stderr") or result.get("msg") or "no output").strip().splitlines()
    return last_object(result) or {"ok": False, "phase": "start", "error": words[-1] if words else "no output"}


def measured_step(result: Mapping[str, Any], key: str) -> Document:
    """The result of scripts.measure_step with what was measured; empty if it failed."""
    found = last_object(result) if result.get("rc") == 0 else {}
    with contextlib.suppress(InvalidHostData):
        return {"key": key, **decode(Measured, found)} if finite(found.get("tokens_per_second")) else {}
    return {}


def with_link(
    measured: Mapping[str, Any], plan: Plan, links: Iterable[Mapping[str, Any]], gloo: Mapping[str, Any]
) -> Document:
    """A host's measured step with its slowest link and the model: what the plan needs to choose the best ddp_sync, and to tell other
    depths from it."""
    link = slowest_link(links, [last_object(gloo)])
    kept = {"link": link._asdict()} if link else {}
    return {**measured, **kept, "model": dict(plan["model"]), "device_batch": plan["training"]["device_batch"]}


def slowest_link(links: Iterable[Mapping[str, Any]], gloo: Iterable[Mapping[str, Any]]) -> Optional[Link]:
    """The link that every step waits for, by these links and by what the all-reduces on their hosts measured."""
    known, reduced = [link for link in links if link.get("bandwidth_mbit")], list(gloo)
    if not known:
        return None
    rates = [rate for one in reduced if (rate := finite(one.get("bandwidth_mbit"))) and rate > 0]
    by_gloo = min(rates, default=0.0) / WIRE_SHARE
    # Both ends also send in an all-reduce; a busy CPU lowers either measurement, so the better one counts.
    rate = min(max(link["bandwidth_mbit"], by_gloo) for link in known)
    if by_gloo and rate > FAST_LINE:
        rate = min(rate, by_gloo)
    message = max([0.0, *(finite(one.get("message_ms")) or 0.0 for one in reduced)])
    return Link(round(rate, 1), max(link["latency_ms"] or 0.0 for link in known), message)
