# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds files and functions in plugins/ that no longer fit on a screen: tools/check_sizes.py [FILE...].

A function that has grown too long does two things, and each of them has a name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
FILE, FUNCTION, MAIN = 450, 50, 35  # lines at most


def problems(text: str) -> Iterator[tuple[int, str]]:
    """(line, problem) of everything too long in a Python file."""
    if (lines := len(text.splitlines())) > FILE:
        yield 1, f"the file has {lines} lines, more than {FILE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines, most = (node.end_lineno or node.lineno) - node.lineno + 1, MAIN if node.name == "main" else FUNCTION
            if lines > most:
                yield node.lineno, f"{node.name}() has {lines} lines, more than {most}"


def main(names: list[str]) -> int:
    """Print all problems; 1 if there are any."""
    bad = 0
    for path in [Path(name) for name in names] or sorted(PLUGINS.rglob("*.py")):
        for number, problem in problems(path.read_text(encoding="utf-8")):
            print(f"{path}:{number}: {problem}")
            bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
