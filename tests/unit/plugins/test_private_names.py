# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plugins use nothing undocumented of Ansible that docs/architecture.md does not list, since it may go in any release."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible import constants
from ansible.config.manager import ConfigManager

ROOT = Path(__file__).resolve().parents[3]
FILES = [
    path
    for path in sorted((ROOT / "plugins").rglob("*.py"))
    if "import" in path.read_text() and "ansible" in path.read_text()
]
# Of Python's own.
PYTHON = {"_asdict", "_exit", "_fields", "_replace"}
# Documented for authors of plugins, or settings, which Ansible offers as constants.
IMPORTS = (
    "ansible.constants",
    "ansible.context",
    "ansible.errors",
    "ansible.module_utils",
    "ansible.parsing.dataloader",
    "ansible.plugins",
    "ansible.utils.display",
)


def attributes(tree: ast.AST) -> Iterator[str]:
    """The private names that are read of any object, also by getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and isinstance(node.args[1], ast.Constant)
        ):
            yield str(node.args[1].value)


def own(tree: ast.AST) -> set[str]:
    """The names that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def private_names() -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    defined = set().union(*map(own, trees)) - {"_shell", "_task"}
    read = {name for tree in trees for name in attributes(tree) if name.startswith("_") and not name.startswith("__")}
    return read - defined - PYTHON


def listed() -> set[str]:
    """The names in the table of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## What is used of Ansible")[2]
    rows = [line.split("|")[1] for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(_\w+)`", row)}


def test_the_page_lists_every_private_name_and_no_other():
    assert private_names() == listed()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "plugins")))
def test_only_documented_modules_of_ansible_are_imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [one.name for one in node.names if one.name.split(".")[0] == "ansible"]
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".", maxsplit=1)[0] == "ansible":
            for one in node.names:
                assert f"{node.module}.{one.name}".startswith(IMPORTS), f"{node.module}.{one.name}"
                assert "._" not in f"{node.module}.{one.name}"


def test_every_constant_is_a_setting():
    settings = ConfigManager().get_configuration_definitions()
    used = {
        name
        for path in FILES
        for name in re.findall(r"\b(?:C|constants)\.(\w+)", path.read_text())
        if not name.startswith("UTF")
    }
    assert used - set(settings) <= {"config"}
    assert all(hasattr(constants, name) for name in used)
