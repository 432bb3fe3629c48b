# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults that are known before a start; tests/pins has each of their codes and sentences."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import judge
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.evidence import PreflightEvidence, peers_of
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.links import ways_to
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, nic

GLOO = {"ok": True, "phase": "done", "error": "", "torch": "2.13.0+cpu", "python": "3.11", "trainer": "07fca3ee"}
ADDRESS = {"desktop": "192.168.1.10", "laptop": "192.168.1.11"}
CARD = {"desktop": "enp4s0", "laptop": "enx00e04c680001"}


def port(number: int, error: str = "") -> dict[str, Any]:
    return {"port": number, "error": error, "words": ""}


def link(host: str, peer: str, closed: str = "", **changes: Any) -> dict[str, Any]:
    """The checks from `host` to `peer`; closed: how its data ports fail."""
    measured = {
        "host": peer,
        "address": ADDRESS[peer],
        "ports": [port(29500), port(32768, closed), port(60999, closed)],
        "latency_ms": 0.2,
        "bandwidth_mbit": 930.0,
        "nic": CARD[host],
        "error": "",
    }
    return {**measured, **changes}


def evidence(one: dict[str, Any] | None = None, two: dict[str, Any] | None = None, **changes: Any) -> PreflightEvidence:
    """Two healthy machines at home; one and two change their probes and settings, changes whatever else is known."""
    known = hosts(changes.pop("run", None), one, two)
    outcome = make_plan(known, tolerant=True)
    tries = {
        "desktop": {"responder": {"pid": 1}, "is_held": False, "error": "", "links": [link("desktop", "laptop")]},
        "laptop": {"responder": {"pid": 2}, "is_held": False, "error": "", "links": [link("laptop", "desktop")]},
    }
    for host, more in changes.pop("tried", {}).items():
        tries[host].update(more)
    whole = {
        "plan": outcome.plan,
        "plan_findings": outcome.findings,
        "probes": {host["name"]: host["probe"] for host in known},
        "tries": tries,
        "firewalls": {host: {"backend": "none", "commands": [], "rules": [], "needs_root": False} for host in tries},
        "gloo": {"desktop": GLOO, "laptop": GLOO},
        "rehearsal": True,
        **changes,
    }
    return PreflightEvidence(**whole)


def only(known: PreflightEvidence) -> dict[str, Any]:
    findings = judge.judge(known)
    assert len(findings) == 1, findings
    return findings[0]


WALL = {"backend": "ufw", "commands": ["sudo ufw prepend allow x"], "rules": [], "needs_root": False}
BLOCKED = {"desktop": {"links": [link("desktop", "laptop", "dropped")]}}


# Ports and firewalls


FOREIGN = {"commands": [], "backend": "none", "foreign": ["iptables chain f2b-x"]}
OPENED = {"commands": [], "rules": ["tcp from 192.168.1.10 to port 29500"]}


def test_field_01_a_port_that_stays_closed_is_for_the_owner_or_something_else_stops_its_packets():
    one = only(evidence(tried=BLOCKED, firewalls={"laptop": WALL}))
    assert (one["code"], one["remedy"]) == ("port-blocked", "On laptop: sudo ufw prepend allow x")
    one = only(evidence(tried=BLOCKED, firewalls={"laptop": {**WALL, **OPENED}}))
    assert "ufw on laptop lets it in, so an outgoing rule of desktop or a router" in one["seen"]


def test_field_02_without_sudo_an_open_way_is_no_finding():
    assert judge.judge(evidence(firewalls={"laptop": dict(WALL, needs_root=True)})) == []


@pytest.mark.parametrize(
    ("tries", "host", "unreached"),
    [
        ({"desktop": {"links": [link("desktop", "laptop")]}, "laptop": {}}, "laptop", []),
        ({"desktop": {"links": [link("desktop", "laptop")]}, "laptop": {}}, "desktop", ["laptop"]),  # away
        ({"desktop": {"links": [link("desktop", "laptop", "stranger")]}}, "laptop", []),
        ({"desktop": {"links": [link("desktop", "laptop", ports=[])]}}, "laptop", ["desktop"]),
        ({"desktop": {"links": [link("desktop", "laptop", "dropped")]}}, "laptop", ["desktop"]),
    ],
)
def test_the_ways_that_need_a_rule_are_those_that_are_closed_or_were_not_tried(tries, host, unreached):
    assert ways_to(evidence().plan, tries, host)["unreached"] == [ADDRESS[peer] for peer in unreached]


@pytest.mark.parametrize(
    ("how", "firewall", "seen"),
    [
        ("dropped", {}, "no answer (dropped); an outgoing rule of desktop or a router between them stops the packets."),
        ("dropped", {**WALL, **OPENED}, "(dropped), though ufw on laptop lets it in; an outgoing rule of desktop"),
        ("dropped", FOREIGN, "which were left alone, can drop packets: iptables chain f2b-x."),
        ("forbidden", {}, "; an outgoing firewall rule on desktop forbids it."),
    ],
)
def test_a_way_that_stays_closed_names_what_can_be_the_cause(how, firewall, seen):
    tries = {"desktop": {"links": [link("desktop", "laptop", how)]}, "laptop": {"links": [link("laptop", "desktop")]}}
    [way] = ways_to(evidence().plan, tries, "laptop", firewall)["closed"]
    assert way["address"] == ADDRESS["desktop"]
    assert way["text"].startswith("desktop cannot connect to laptop (192.168.1.11) on port 32768, 60999: ")
    assert seen in way["text"]


# Routes


def test_field_05_the_interface_that_really_carries_the_route():
    cards = [nic(CARD["desktop"], "wired", "192.168.1.10/24", speed=1000), nic("other0", "wired")]
    routes = [{"peer": "laptop", "address": ADDRESS["laptop"], "nic": "enp4s0", "source": ADDRESS["desktop"]}]
    tried = {"desktop": {"links": [link("desktop", "laptop", nic="other0")]}}
    one = only(evidence({"nics": cards, "routes": routes}, tried=tried))
    assert (one["code"], one["host"], one["peer"]) == ("route-differs", "desktop", "laptop")
    assert "other0" in one["seen"]


# Who is there already


def test_field_06_a_port_that_only_the_test_finds_taken_is_told_unless_the_run_has_it():
    tried = {"desktop": {"is_held": True}}
    assert only(evidence(tried=tried))["code"] == "port-held"
    run = {"session": {"id": "s1", "ended": None}, "checkpoints": []}
    assert judge.judge(evidence({"run": run}, tried=tried)) == []


# Hosts that do not fit


WIDE = {"nofile": 1024, "nproc": 4096, "address_space": 1 << 40, "file_size": 1 << 40, "cpu_seconds": None}


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"limits": {**WIDE, "nproc": 100}}, ["ulimit-low"]),
        ({"limits": {**WIDE, "address_space": 100 << 20}}, ["ulimit-low"]),
        ({"limits": {**WIDE, "file_size": 1 << 20}}, ["ulimit-low"]),
        ({"limits": {**WIDE, "cpu_seconds": 3600}}, ["ulimit-low"]),
        ({"limits": WIDE}, []),
        ({"logout": {"kills": True, "lingers": True}}, []),
        ({"logout": {"kills": False, "lingers": False}}, []),
        ({"logout": None}, []),
    ],
)
def test_limits_of_a_user(change, codes):
    assert [one["code"] for one in judge.judge(evidence(change))] == codes


def test_field_09_a_build_for_cuda_computes_the_same_on_cpus():
    other = {**GLOO, "torch": "2.13.0+cu130"}
    assert judge.judge(evidence(gloo={"desktop": GLOO, "laptop": other})) == []


# Order, pairs, text


def test_who_answers_is_tried_from_the_next_rank_on_at_the_address_of_the_plan():
    plan = {"nodes": [{"host": name, "address": f"address of {name}"} for name in "abcd"]}
    answering = {"responder": {"ports": [40000], "token": "x", "pid": 1, "started": 2}}
    tries = {"a": answering, "b": {"responder": None}, "c": answering, "d": {}}
    wanted = {"ports": [40000], "token": "x"}
    assert peers_of(plan, tries, "a") == {"c": {**wanted, "address": "address of c"}}
    # So that in each moment every host measures towards a different one.
    assert list(peers_of(plan, {**tries, "d": answering}, "c")) == ["d", "a"]
