# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every finding has the same form: the observation, and separately the remedy."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError, finding, sentence
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings_table import CATALOGUE

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


def test_a_refusal_says_what_was_seen_and_what_to_do():
    own = finding("disk-short", "laptop", "laptop has 3 GB free", remedy="Use another disk.")
    assert sentence(own) == "laptop has 3 GB free; use another disk."
    usual = finding("folder-refused", "laptop", "it cannot be written")
    assert (
        sentence(usual)
        == "it cannot be written; set ddp_base_dir to a folder of this host's own that only this user can write to."
    )
    # The sentence about a setting already says what it must be.
    setting = finding("setting-refused", "", "ddp_depth is x; it must be a whole number")
    assert sentence(setting) == "ddp_depth is x; it must be a whole number."
    assert str(PlanError([own, setting])).splitlines()[1:] == ["- " + sentence(own), "- " + sentence(setting)]
