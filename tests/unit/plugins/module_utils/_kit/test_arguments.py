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


def test_a_module_is_asked_for_no_more_than_it_can_hold(run_module):
    asked = []

    def main():
        spec = {"rank": {"type": "int"}, "name": {"type": "str"}, "wait": {"type": "dict"}}
        module = arguments.checked_module(spec, {"rank": (0, 9), "wait.timeout": (0, 600)})
        asked.append(module.params)
        module.exit_json()

    assert not run_module(SimpleNamespace(main=main), rank="3").get("failed") and asked[0]["rank"] == 3
    assert run_module(SimpleNamespace(main=main), rank=10)["msg"] == "rank is 10; it must be between 0 and 9."
    assert run_module(SimpleNamespace(main=main), wait={"timeout": 601})["msg"].startswith("wait.timeout is 601; it")
    assert run_module(SimpleNamespace(main=main), name="a\0")["msg"].startswith("name contains a NUL byte")
    assert run_module(SimpleNamespace(main=main), rank=float("inf"))["msg"].startswith("rank is inf")
    assert len(asked) == 1
