# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which ways between hosts need a rule, and who tries whom; tests/pins has each finding."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.judge import PreflightEvidence, peers_of, ways_to
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.peer_check import FORBIDDEN
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import planned

DROPPED = "no answer (dropped)"
ADDRESS = {"desktop": "192.168.1.10", "laptop": "192.168.1.11"}


def link(peer: str, closed: str = "", ports: tuple[int, ...] = (29500, 32768, 60999)) -> dict[str, Any]:
    """The checks towards a peer; closed: how its data ports fail."""
    tried = [{"port": port, "error": closed if port != 29500 else ""} for port in ports]
    return {"links": [{"host": peer, "address": ADDRESS[peer], "ports": tried}], "error": ""}


def evidence(tries: dict[str, Any], **firewalls: dict[str, Any]) -> PreflightEvidence:
    return PreflightEvidence(planned(), {}, tries, firewalls)


@pytest.mark.parametrize(
    ("tries", "host", "unreached"),
    [
        ({"desktop": link("laptop")}, "laptop", []),
        ({"desktop": link("laptop")}, "desktop", ["laptop"]),  # away
        ({"desktop": link("laptop", ports=())}, "laptop", ["desktop"]),
        ({"desktop": link("laptop", DROPPED)}, "laptop", ["desktop"]),
    ],
)
def test_the_ways_that_need_a_rule_are_those_that_are_closed_or_were_not_tried(tries, host, unreached):
    assert ways_to(evidence(tries), host)["unreached"] == [ADDRESS[peer] for peer in unreached]


OPENED = {"backend": "ufw", "commands": [], "rules": ["tcp from 192.168.1.10 to port 29500"]}
FOREIGN = {"backend": "none", "commands": [], "foreign": ["iptables chain f2b-x"]}


@pytest.mark.parametrize(
    ("how", "firewall", "seen"),
    [
        (DROPPED, OPENED, "(dropped); ufw on laptop lets it in, so an outgoing rule of desktop or a router between"),
        (DROPPED, FOREIGN, "which were left alone, can drop packets: iptables chain f2b-x"),
        (FORBIDDEN, {}, "; an outgoing firewall rule on desktop forbids it"),
    ],
)
def test_a_way_that_stays_closed_names_what_can_be_the_cause(how, firewall, seen):
    tries = {"desktop": link("laptop", how), "laptop": link("desktop")}
    [way] = ways_to(evidence(tries, laptop=firewall), "laptop")["closed"]
    assert way["address"] == ADDRESS["desktop"]
    assert way["text"].startswith("desktop cannot connect to laptop (192.168.1.11) on port 32768, 60999: ")
    assert seen in way["text"]


def test_who_answers_is_tried_from_the_next_rank_on_at_the_address_of_the_plan():
    plan = {"nodes": [{"host": name, "address": f"address of {name}"} for name in "abcd"]}
    answering = {"responder": {"ports": [40000], "token": "x", "pid": 1, "started": 2}}
    tries = {"a": answering, "b": {"responder": None}, "c": answering, "d": {}}
    wanted = {"ports": [40000], "token": "x"}
    assert peers_of(plan, tries, "a") == {"c": {**wanted, "address": "address of c"}}
    # So that in each moment every host measures towards a different one.
    assert list(peers_of(plan, {**tries, "d": answering}, "c")) == ["d", "a"]
