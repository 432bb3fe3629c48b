# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every finding has the same form: the observation, and separately the remedy."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import (
    CATALOGUE,
    MANY_ALIKE,
    finding,
    refusal_text,
    sentence,
    told_once,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import MANY_HOSTS

PLUGINS = Path(__file__).resolve().parents[5] / "plugins"
ADVICE = re.compile(r"[;.] (use|set|name|give|take|make|install|end|lower|see|check|remove|train) ", re.I)


def calls():
    for path in sorted(PLUGINS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "finding":
                yield f"{path.name}:{node.lineno}", node


def literals(node):
    return "".join(str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))


def test_what_was_seen_gives_no_advice():
    found = {place: literals(call.args[2]) for place, call in calls() if len(call.args) > 2}
    assert len(found) > 80
    assert {place: seen for place, seen in found.items() if ADVICE.search(seen)} == {}


def test_every_code_that_is_used_is_in_the_registry_with_what_to_do():
    codes = {call.args[0].value for dummy, call in calls() if isinstance(call.args[0], ast.Constant)}
    assert codes and codes <= set(CATALOGUE)
    for code, kind in CATALOGUE.items():
        assert kind.title and kind.why and kind.remedy, code


def short_of_memory(count):
    hosts = [f"node{number:03}" for number in range(1, count + 1)]
    return [finding("memory-tight", host, f"{host} has {number}.5 GB of memory") for number, host in enumerate(hosts)]


def test_what_was_seen_of_many_hosts_alike_is_told_once():
    many, own = short_of_memory(100), finding("no-tmux", "node007", "node007 has no tmux")
    told = list(told_once([many[0], own, *many[1:]]))
    assert told == [(many[0], "99 more, node002 ... node100"), (own, "")]
    lines = refusal_text([*many, own]).splitlines()
    assert lines[0] == "101 problems; nothing was changed:"
    assert lines[1] == f"- {sentence(many[0])} Also: 99 more, node002 ... node100."
    assert lines[2:] == [f"- {sentence(own)}"]


def test_many_are_as_many_as_where_hosts_share_a_row():
    assert MANY_ALIKE == MANY_HOSTS


def test_of_few_hosts_each_is_told():
    few = short_of_memory(16)
    assert list(told_once(few)) == [(found, "") for found in few]


def test_other_words_or_another_code_are_another_finding():
    many = short_of_memory(17)
    many[3] = finding("memory-tight", "node004", "node004 has no memory at all")
    many[5] = finding("no-tmux", "node006", many[5]["seen"])
    assert [more for dummy, more in told_once(many)] == [""] * 17


def test_a_refusal_says_what_was_seen_and_what_to_do():
    own = finding("disk-short", "laptop", "laptop has 3 GB free", remedy="Use another disk.")
    assert sentence(own) == "laptop has 3 GB free; use another disk."
    usual = finding("folder-read-only", "laptop", "it cannot be written")
    assert sentence(usual) == "it cannot be written; set ddp_base_dir to a folder that this user can write to."
    # The sentence about a setting already says what it must be.
    setting = finding("setting-refused", "", "ddp_depth is x; it must be a whole number")
    assert sentence(setting) == "ddp_depth is x; it must be a whole number."
    assert refusal_text([own, setting]).splitlines()[1:] == ["- " + sentence(own), "- " + sentence(setting)]
