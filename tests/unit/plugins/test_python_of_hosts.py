# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All that runs on hosts does so under Python 3.9, told from the sources, so that a newer Python is enough to find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
FILES = sorted([*(PLUGINS / "module_utils").rglob("*.py"), *(PLUGINS / "modules").glob("*.py")])
TYPES = {"None", "bool", "bytes", "dict", "float", "int", "list", "set", "str", "tuple"}
# What came later than 3.9, as attributes and as keyword arguments of calls.
ATTRIBUTES = {"bit_count", "hardlink_to", "pairwise"}
KEYWORDS = {("zip", "strict"), ("dataclass", "slots"), ("dataclass", "kw_only")}


def annotated(tree: ast.AST) -> set[int]:
    """The nodes that are not evaluated under `from __future__ import annotations`."""
    parts = []
    for node in ast.walk(tree):
        parts += [getattr(node, name, None) for name in ("annotation", "returns")]
    return {id(inner) for part in parts if isinstance(part, ast.AST) for inner in ast.walk(part)}


def too_new(source: str) -> Iterator[str]:
    """The lines that Python 3.9 would stop at."""
    tree = ast.parse(source, feature_version=(3, 9))
    lazy = annotated(tree) if "from __future__ import annotations" in source else set()
    for node in ast.walk(tree):
        if id(node) in lazy:
            continue
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            if {ast.unparse(node.left), ast.unparse(node.right)} & TYPES:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if any((called, word.arg) in KEYWORDS for word in node.keywords):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_host_with_python_3_9_can_run_it(path):
    assert list(too_new(path.read_text(encoding="utf-8"))) == []


FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    "line",
    [
        "Name = Union[int, None] | None",
        "def f(x):\n    return x.bit_count()",
        "def f(x):\n    return zip(x, x, strict=True)",
    ],
)
def test_what_came_later_is_found(line):
    assert len(list(too_new(FUTURE + line))) >= 1


@pytest.mark.parametrize("line", ["match x:\n    case 1: pass", "try:\n    f()\nexcept* OSError:\n    pass"])
def test_syntax_that_came_later_is_found(line):
    with pytest.raises(SyntaxError):
        list(too_new(line))


def test_annotations_may_be_new_where_they_are_not_evaluated():
    line = "def f(x: list[str] | None) -> dict[str, int]:\n    y: set[int] = set()\n    return y"
    assert list(too_new(FUTURE + line)) == []
    assert len(list(too_new(line))) >= 1
