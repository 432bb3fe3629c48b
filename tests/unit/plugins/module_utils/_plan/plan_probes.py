# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes of machines as the tests of the plan need them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import flag_words
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, PlanError, sentence
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import PlanOutcome, make_plan

GIGA = 10**9


def nic(
    name: str, kind: str = "wired", address: str | None = None, up: bool = True, speed: int | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "up": up,
        "speed_mbit": speed,
        "mtu": 1500,
        "mac": "02:00:00:00:00:01",
        "enslaved": False,
        "ipv4": [address] if address and ":" not in address else [],
        "ipv6": [address] if address and ":" in address else [],
    }


LOOPBACK = nic("lo", "loopback", "127.0.0.1/8")


def route(peer: str, name: str, source: str) -> dict[str, Any]:
    return {"peer": peer, "address": peer, "nic": name, "source": source, "gateway": None}


def probe(
    name: str, nics: list[dict[str, Any]], routes: list[dict[str, Any]], user: str = "lzw", **changes: Any
) -> dict[str, Any]:
    """A healthy machine of its own; changes replace whole parts."""
    home = f"/home/{user}"
    facts: dict[str, Any] = {
        "host": {
            "hostname": name,
            "boot_id": f"boot-{name}",
            "network_namespace": "net:[4026531840]",
            "arch": "x86_64",
            "user": user,
            "home": home,
        },
        "python": {
            "executable": "/usr/bin/python3",
            "version": "3.11.2",
            "candidates": [{"executable": "/usr/bin/python3.11", "version": "3.11.2"}],
            "library": "/usr/lib/python3.11",
            "venv": {"path": f"{home}/nanochat-ddp/venv", "exists": False, "torch": None, "stamp": None},
        },
        "cpu": {
            "logical": 16,
            "physical": 8,
            "available": 16,
            "available_physical": 8,
            "native_bf16": False,
            "flags": ["avx2"],
        },
        "memory": {"total": 32 * GIGA, "available": 30 * GIGA, "limit": None},
        "disk": {
            "path": f"{home}/nanochat-ddp",
            "parent": home,
            "real_path": f"{home}/nanochat-ddp",
            "device": 1,
            "free": 200 * GIGA,
            "writable": True,
            "fstype": "ext4",
            "source": "/dev/nvme0n1p2",
            "network": False,
        },
        "nics": [LOOPBACK, *nics],
        "routes": routes,
        "tmux": {"path": "/usr/bin/tmux", "version": "3.3a"},
        "ports": [],
        "processes": [],
        "ephemeral": {"low": 32768, "high": 60999},
        "gpus": [],
        "base_dir": f"{home}/nanochat-ddp",
        "venv_dir": f"{home}/nanochat-ddp/venv",
        "run": {"exists": False, "session": None, "checkpoints": []},
        "data": [],
        "measured": None,
    }
    facts.update(copy.deepcopy(changes))
    return facts


def desktop(**changes: Any) -> dict[str, Any]:
    cards = [nic("enp4s0", "wired", "192.168.1.10/24", speed=1000), nic("docker0", "bridge", "172.17.0.1/16")]
    settled = {"nics": cards, "routes": [route("laptop", "enp4s0", "192.168.1.10")], **changes}
    return probe("desktop", **settled)


def laptop(**changes: Any) -> dict[str, Any]:
    cards = [nic("enx00e04c680001", "wired", "192.168.1.11/24", speed=1000)]
    settled = {
        "nics": cards,
        "routes": [route("desktop", "enx00e04c680001", "192.168.1.11")],
        "cpu": {"logical": 8, "physical": 4, "available": 8, "available_physical": 4, "native_bf16": False},
        **changes,
    }
    return probe("laptop", user="xiaoxin", **settled)


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
        seen.update(base_dir=base, disk={**seen["disk"], "path": base, "real_path": base})
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


def codes(outcome: PlanOutcome) -> list[tuple[str, str]]:
    return [(found["code"], found["host"]) for found in outcome.findings]


def findings_with(outcome: PlanOutcome, code: str) -> list[Finding]:
    return [found for found in outcome.findings if found["code"] == code]


def flag(node: dict[str, Any], name: str) -> object:
    """A flag of the trainer, as the command has it, too."""
    value = node["flags"].get(name)
    words = flag_words({name: value}) if value is not None else []
    assert words == [word for word in node["argv"] if word.split("=")[0] == f"--{name}"], name
    return value


def node(outcome: PlanOutcome, name: str) -> dict[str, Any]:
    return next(entry for entry in outcome.plan["nodes"] if entry["host"] == name)  # type: ignore[misc]
