# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rooms of module_utils: every file is in one, and a room imports only from the floors below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

UTILS = Path(__file__).resolve().parents[4] / "plugins" / "module_utils"
# docs/architecture.md shows the same floors. Rooms of one floor know nothing of each other.
FLOORS = [
    ["_contract", "_kit"],
    ["_probe", "_plan", "_firewall", "_trainer", "_shards", "_session", "_run"],
    ["_preflight", "_doctor", "_keeper"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(UTILS.rglob("*.py"))


def rooms_imported(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    found = set()
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise AssertionError(f"{path}: relative import; imports name their room")
        if isinstance(statement, ast.ImportFrom) and ".plugins.module_utils" in str(statement.module):
            found.add(str(statement.module).partition(".plugins.module_utils.")[2].partition(".")[0])
    return found


def test_every_file_is_in_a_room():
    assert {path.parent.name for path in FILES} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_import_goes_upward(path):
    room = path.parent.name
    for other in rooms_imported(path) - {room}:
        assert other in FLOOR, f"{path}: there is no room {other}"
        assert FLOOR[other] < FLOOR[room], f"{path}: {room} must not know {other}"
