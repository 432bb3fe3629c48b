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


def is_text(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression is, or holds, one of the texts."""
    parts = [part for part in ast.walk(node) if isinstance(part, (ast.Constant, ast.Name))]
    return any(part.value in TEXTS if isinstance(part, ast.Constant) else part.id in known for part in parts)


def names_of_texts(function: ast.AST) -> set[str]:
    """The local names to which a text is given."""
    known: set[str] = set()
    for part in ast.walk(function):
        if isinstance(part, ast.Assign):
            for target in part.targets:
                pairs = [(target, part.value)]
                if isinstance(target, ast.Tuple) and isinstance(part.value, ast.Tuple):
                    pairs = list(zip(target.elts, part.value.elts, strict=True))
                known |= {name.id for name, value in pairs if isinstance(name, ast.Name) and is_text(value, set())}
    return known


def questions(source: str) -> Iterator[str]:
    """Every place where something is asked of a text."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        known = names_of_texts(function)
        for part in ast.walk(function):
            asked: list[ast.expr] = []
            if isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.In, ast.NotIn)):
                asked = list(part.comparators)
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                if part.func.attr in PATTERNS and part.args:
                    asked = list(part.args)
                if part.func.attr in ASKING:
                    asked.append(part.func.value)
            if any(is_text(one, known) for one in asked):
                yield f"line {part.lineno}: {ast.unparse(part)}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [path for path in FILES if path not in EXEMPT])
def test_nothing_is_derived_from_a_sentence(path: str) -> None:
    assert list(questions((PLUGINS / path).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(entry):\n    return ' is taken on ' in entry['seen']",
        "def f(found):\n    return found['remedy'].startswith('Nothing')",
        "def f(run):\n    text = run.get('end_error') or ''\n    return WORDS.search(text)",
        "def f(entry):\n    seen, code = str(entry.get('seen')), 1\n    return re.findall(r'process (\\d+)', seen)",
        "def f(entry, host):\n    return host in entry['seen'].split()",
    ],
)
def test_what_the_test_looks_for_is_found(source: str) -> None:
    assert list(questions(source))


def test_a_finding_carries_its_facts_beside_the_sentence() -> None:
    found = finding("port-held", "desktop", "port 29500 is taken", facts={"pids": [4711]})
    assert found["facts"] == {"pids": [4711]} and found["severity"] == "error"
    assert finding("healthy", "desktop", "All is well")["facts"] == {}
    asked = finding("setting-refused", "desktop", "did you mean x?")
    assert sentence(asked) == "did you mean x?" and sentence({**asked, "seen": "it is x"}) == "it is x."
