# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Invalid arguments are refused in one sentence that names their place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import arguments


def nested(levels):
    value = []
    for dummy in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"env": {"A": ["b", "c\0"]}}, "env.A[1] contains a NUL byte"),
        ({"wait": float("inf")}, "wait is inf; it must be a finite number"),
        ({"rank": 2**63}, "rank is a number beyond 64 bits"),
        ({"rank": -(2**63) - 1}, "rank is a number beyond 64 bits"),
        ({"plan": {"a\0": 1}}, "a name in plan contains a NUL byte"),
        ({"plan": nested(50)}, "plan[0]"),
        (float("nan"), "the arguments is nan"),
        ({"rank": 2**63 - 1, "least": -(2**63), "path": "\udcff", "x": None, "plan": nested(48), "on": True}, ""),
    ],
)
def test_what_no_program_can_hold_is_named_by_its_place(given, said):
    told = list(arguments.problems(given))
    assert [problem[: len(said)] for problem in told] == [said] * bool(said)


def test_numbers_have_bounds_also_one_within_another():
    bounds = {"port": (1, 65535), "wait.timeout": (0, 600)}
    for port, timeout in ((1, 0), (65535, 600), (None, None)):
        assert list(arguments.beyond({"port": port, "wait": {"timeout": timeout}}, bounds)) == []
    assert list(arguments.beyond({"port": 1, "wait": None}, bounds)) == []
    told = list(arguments.beyond({"port": 0, "wait": {"timeout": 601}}, bounds))
    assert told == ["port is 0; it must be between 1 and 65535.", "wait.timeout is 601; it must be between 0 and 600."]


def test_a_module_is_asked_for_no_more_than_it_can_hold(run_module):
    asked = []

    def main():
        module = arguments.checked_module({"rank": {"type": "int"}, "name": {"type": "str"}}, {"rank": (0, 9)})
        asked.append(module.params)
        module.exit_json()

    assert not run_module(SimpleNamespace(main=main), rank="3").get("failed") and asked == [{"rank": 3, "name": None}]
    assert run_module(SimpleNamespace(main=main), rank=10)["msg"] == "rank is 10; it must be between 0 and 9."
    assert run_module(SimpleNamespace(main=main), name="a\0")["msg"].startswith("name contains a NUL byte")
    assert run_module(SimpleNamespace(main=main), rank=float("inf"))["msg"].startswith("rank is inf")
    assert len(asked) == 1
