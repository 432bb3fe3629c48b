# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes of machines as the tests of the plan need them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import flag_words
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, PlanError, sentence
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import PlanOutcome, make_plan

GIGA = 10**9
# Those of the pins.
MACHINES = json.loads(
    (Path(__file__).resolve().parents[4] / "pins/data/given/machines.json").read_text(encoding="utf-8")
)


def nic(
    name: str, kind: str = "wired", address: str | None = None, up: bool = True, speed: int | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "up": up,
        "speed_mbit": speed,
        "enslaved": False,
        "ipv4": [address] if address and ":" not in address else [],
        "ipv6": [address] if address and ":" in address else [],
    }


LOOPBACK = nic("lo", "loopback", "127.0.0.1/8")


def route(peer: str, name: str, source: str) -> dict[str, Any]:
    return {"peer": peer, "nic": name, "source": source}


def probe(
    name: str, nics: list[dict[str, Any]], routes: list[dict[str, Any]], user: str = "lzw", **changes: Any
) -> dict[str, Any]:
    """A healthy machine of its own; changes replace whole parts."""
    facts = desktop(nics=[LOOPBACK, *nics], routes=routes, base_dir=f"/home/{user}/nanochat-ddp", **changes)
    own = {"hostname": name, "boot_id": f"boot-{name}", "user": user, "home": f"/home/{user}"}
    return {**facts, "host": {**facts["host"], **own, **changes.get("host", {})}}


def desktop(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({**MACHINES["desktop"], **changes})


def laptop(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({**MACHINES["laptop"], **changes})


def hosts(
    run: dict[str, Any] | None = None, one: dict[str, Any] | None = None, two: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The two machines at home; run: settings of the group, one and two: probe changes and settings of each."""
    both = []
    for name, make, more in (("desktop", desktop, one or {}), ("laptop", laptop, two or {})):
        settings = {**(run or {}), **{key: value for key, value in more.items() if key.startswith("ddp_")}}
        changes = {key: value for key, value in more.items() if not key.startswith("ddp_")}
        both.append({"name": name, "settings": settings, "probe": make(**changes), "reach": None})
    return both


def lan(count: int, run: dict[str, Any] | None = None, speeds: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    """Machines on one network; speeds: tokens per second as measured on them, in turn."""
    found = []
    for number in range(count):
        address = f"192.168.1.{10 + number}"
        others = [f"192.168.1.{10 + other}" for other in range(count) if other != number]
        measured = {"tokens_per_second": speeds[number % len(speeds)]} if speeds else None
        seen = probe(
            f"h{number}",
            [nic("eth0", "wired", f"{address}/24", speed=1000)],
            [route(other, "eth0", address) for other in others],
            measured=measured,
        )
        found.append({"name": f"h{number}", "settings": dict(run or {}), "probe": seen})
    return found


def one_machine(count: int = 2, run: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Nodes that share one machine, each with its own folder."""
    found = []
    for number in range(1, count + 1):
        seen = desktop()
        base = f"/home/lzw/node{number}"
        seen.update(base_dir=base, disk={**seen["disk"], "real_path": base})
        found.append({"name": f"node{number}", "settings": {**(run or {}), "ddp_base_dir": base}, "probe": seen})
    return found


def planned(
    run: dict[str, Any] | None = None, one: dict[str, Any] | None = None, two: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The plan of the two machines at home."""
    return make_plan(hosts(run, one, two)).plan  # type: ignore[return-value]


def refusal(known: list[dict[str, Any]], **options: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        make_plan(known, **options)
    return [sentence(found) for found in caught.value.findings]


def findings_with(outcome: PlanOutcome, code: str) -> list[Finding]:
    return [found for found in outcome.findings if found["code"] == code]


def flag(node: dict[str, Any], name: str) -> object:
    """A flag of the trainer, as the command has it, too."""
    value = node["flags"].get(name)
    words = flag_words({name: value}) if value is not None else []
    assert words == [word for word in node["argv"] if word.split("=")[0] == f"--{name}"], name
    return value
