# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sentences are for people: no code, host or pid is ever derived from one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import finding, sentence

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
# The texts of findings, verdicts and results.
TEXTS = {"seen", "why", "remedy", "sentence", "end_error"}
ASKING = {"startswith", "endswith", "find", "index", "count", "split", "rsplit", "partition", "rpartition"}
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "split", "sub"}
# Finding a mark at the end of a sentence is no decision.
EXEMPT = {"module_utils/_contract/findings.py"}
FILES = sorted(str(path.relative_to(PLUGINS)) for path in PLUGINS.rglob("*.py"))


def is_text(node: ast.AST) -> bool:
    """Whether an expression reads one of the texts."""
    keys = [part.slice for part in ast.walk(node) if isinstance(part, ast.Subscript)]
    keys += [
        part.args[0] for part in ast.walk(node) if isinstance(part, ast.Call) and part.args and name_of(part) == "get"
    ]
    return any(isinstance(key, ast.Constant) and key.value in TEXTS for key in keys)


def name_of(call: ast.Call) -> str:
    """The name of a method that is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def questions(source: str) -> Iterator[str]:
    """Every place where something is asked of a text."""
    for part in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.In, ast.NotIn)):
            asked = list(part.comparators)
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            asked = [
                *(part.args if name_of(part) in PATTERNS else []),
                *([part.func.value] if name_of(part) in ASKING else []),
            ]
        if any(map(is_text, asked)):
            yield f"line {part.lineno}: {ast.unparse(part)}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [path for path in FILES if path not in EXEMPT])
def test_nothing_is_derived_from_a_sentence(path: str) -> None:
    assert list(questions((PLUGINS / path).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(entry):\n    return ' is taken on ' in entry['seen']",
        "def f(found):\n    return found['remedy'].startswith('Nothing')",
        "def f(run):\n    return WORDS.search(run.get('end_error') or '')",
        "def f(entry, host):\n    return host in entry['seen'].split()",
    ],
)
def test_what_the_test_looks_for_is_found(source: str) -> None:
    assert list(questions(source))


def test_a_question_stays_one() -> None:
    asked = finding("setting-refused", "desktop", "did you mean x?")
    assert sentence(asked) == "did you mean x?" and sentence({**asked, "seen": "it is x"}) == "it is x."
