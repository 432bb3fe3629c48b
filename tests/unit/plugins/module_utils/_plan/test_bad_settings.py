# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever an inventory sets, the plan ends in a plan or in sentences: no traceback, no hang."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import rows
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan, questions
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    laptop,
    nic,
    route,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Of settings together; NANOCHAT_DDP_CASES=3000 tries more.
EXAMPLES = int(os.environ.get("NANOCHAT_DDP_CASES", "300"))
DEEP: Any = json.loads("[" * 900 + "]" * 900)
ODD = st.sampled_from(
    [
        "", " ", "a\0b", "\ud800", "é", "~", "/", "..", "a" * 5000, "-1", "nan", "1e999", "[" * 5000, "{",
        '{"A": ["b"]}', "'", "1" * 5000,
        *["::1", "fe80::1%eth0", "192.168.1.10", "not an address", "40000-40099", "99999-1", "{{ x }}"], 0, -1, 1, 7,
        2**31, 2**63, 10**400, -(10**30), 0.5, 1e308, float("inf"), float("nan"), True, False, None, DEEP, [], {},
        [[]], [{}], [None], [1, "a"], {"A": "b"}, {"A": None}, {"": ""}, {"A\0": "b"}, {"A": {"b": ["c"]}}, {5: 6},
    ]
)  # fmt: skip
CHOSEN = st.dictionaries(st.sampled_from(sorted(rows())), ODD, max_size=3)
REPEATABLE = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """No case may take as long as all of them."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError("no answer")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(280)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def plan(known: list[dict[str, Any]]) -> None:
    """Everything that is made of settings; what is refused is told with the setting's name."""
    for ask in (
        lambda: questions(known),
        lambda: json.dumps(make_plan(known).plan),
        lambda: render(make_plan(known, tolerant=True).plan),
    ):
        try:
            ask()
        except PlanError as error:
            assert error.findings and all(found["seen"] for found in error.findings)
            assert "Traceback" not in str(error)


@pytest.mark.parametrize("name", list(rows()))
def test_each_setting_takes_or_refuses_every_odd_value(name: str) -> None:
    @settings(REPEATABLE, max_examples=max(4, EXAMPLES // 10))
    @given(ODD)
    def check(value: Any) -> None:
        plan(hosts({name: value}))

    check()


@settings(REPEATABLE, max_examples=EXAMPLES)
@given(CHOSEN, CHOSEN, CHOSEN)
def test_odd_settings_together(run: dict[str, Any], one: dict[str, Any], two: dict[str, Any]) -> None:
    plan(hosts(run, one, two))


NAMES = st.sampled_from(
    ["desk", "off", "a b", "a/b", "日本", "..", "h" * 300, "{{ x }}", "10.0.0.1", "::1", "-x", "a\nb"]
)
ADDRESSES = st.sampled_from(
    [
        "192.168.1.10/24", "192.168.1.10/24", "192.168.1.11/24", "10.0.0.1/8", "203.0.113.7/32", "169.254.1.1/16",
        "127.0.0.1/8", *["fd00::1/64", "fd00::1/64", "fd00::2/64", "fe80::1/64", "2001:db8::7/128", "::1/128"],
    ]
)  # fmt: skip
# (name, addresses, which machine it is, whether it is down, whether the others' routes are known)
MEMBERS = st.tuples(
    NAMES | st.text(min_size=1, max_size=12),
    st.lists(ADDRESSES, max_size=3),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)


@settings(REPEATABLE, max_examples=max(4, EXAMPLES // 5))
@given(st.lists(MEMBERS, min_size=1, max_size=9, unique_by=lambda member: member[0]))
def test_odd_inventories(members: list[tuple[str, list[str], int, bool, bool]]) -> None:
    """Names of any kind, the same address twice, IPv6, hosts without an address, of one machine, or down."""
    known = []
    for name, addresses, machine, is_down, has_routes in members:
        cards = [nic(f"eth{number}", "wired", address) for number, address in enumerate(addresses)]
        others = [other.partition("/")[0] for member in members if member[0] != name for other in member[1]]
        own = addresses[0].partition("/")[0] if addresses else ""
        routes = [route(other, "eth0", own) for other in others] if has_routes and own else []
        seen = laptop(nics=cards, routes=routes)
        seen["host"] = {**seen["host"], "boot_id": f"boot-{machine}", "hostname": name}
        host: dict[str, Any] = {"name": name, "settings": {}, "probe": seen, "reach": None}
        known.append({**host, "probe": None, "error": "no route to host"} if is_down else host)
    plan(known)
