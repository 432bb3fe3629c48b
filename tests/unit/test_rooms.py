# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rooms of module_utils and of the trainer: every file is in one, and a room imports only from the floors below its own."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class House(NamedTuple):
    folder: Path
    package: str
    floors: list[list[str]]  # from the lowest up; rooms of one floor know nothing of each other

    def floor(self, room: str) -> int:
        return next(number for number, rooms in enumerate(self.floors) if room in rooms)

    def room_of(self, path: Path) -> str:
        return path.parent.relative_to(self.folder).as_posix()

    def rooms_imported(self, path: Path) -> set[str]:
        """The rooms that a file imports from, also for the types alone."""
        found = set()
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import):
                assert not any(f"{one.name}.".startswith(self.package) for one in statement.names), (
                    f"{path}: use from ... import"
                )
            if isinstance(statement, ast.ImportFrom):
                module = self.module_of(path, statement)
                if f"{module}.".startswith(self.package):
                    found.add(f"{module}.".removeprefix(self.package).partition(".")[0])
        return found

    def module_of(self, path: Path, statement: ast.ImportFrom) -> str:
        """The whole name of the module that a statement imports from."""
        if not statement.level:
            return str(statement.module)
        folders = path.relative_to(self.folder).parts[: -statement.level]
        assert folders or statement.module, f"{path}: imports name their room"
        return ".".join([self.package.rstrip("."), *folders, *([statement.module] if statement.module else [])])


def house_of(folder: str, package: str) -> House:
    """A house with the floors that CONTRIBUTING.md gives its rooms."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split(f"| `{folder}/` |")[1].split("\n\n")[0]
    rooms = re.findall(r"^\| (\d) \| `(\w+)` \|", table, re.M)
    return House(
        ROOT / folder,
        package,
        [[name for at, name in rooms if at == floor] for floor in sorted({at for at, dummy in rooms})],
    )


COLLECTION = house_of("plugins/module_utils", "ansible_collections.nanochat.ddp.plugins.module_utils.")
TRAINER = house_of("trainer/nanochat", "nanochat.")
HOUSES = [COLLECTION, TRAINER]
FILES = [
    (house, path) for house in HOUSES for path in sorted(house.folder.rglob("*.py")) if path.parent != house.folder
]


@pytest.mark.parametrize("house", HOUSES, ids=["collection", "trainer"])
def test_every_file_is_in_a_room(house):
    rooms = {room for floor in house.floors for room in floor}
    assert {house.room_of(path) for own, path in FILES if own is house} == rooms
    assert {path.name for path in house.folder.glob("*.py")} <= {"__init__.py"}


@pytest.mark.parametrize(("house", "path"), FILES, ids=[path.relative_to(ROOT).as_posix() for dummy, path in FILES])
def test_no_import_goes_upward(house, path):
    room = house.room_of(path)
    for other in house.rooms_imported(path) - {room}:
        assert house.floor(other) < house.floor(room), f"{path}: {room} must not know {other}"


def modules(house):
    """The files that each file of a house imports, also for the types alone."""
    found = {}
    for path in sorted(house.folder.rglob("*.py")):
        name = house.package + path.relative_to(house.folder).with_suffix("").as_posix().replace("/", ".")
        found[name] = {
            target
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            for module in [house.module_of(path, node)]
            for target in (module, *(f"{module}.{one.name}" for one in node.names))
        }
    return {name: imported & found.keys() for name, imported in found.items()}


@pytest.mark.parametrize("house", HOUSES, ids=["collection", "trainer"])
def test_no_imports_go_in_a_circle(house):
    order = graphlib.TopologicalSorter(modules(house)).static_order()
    assert len(list(order)) > len(house.floors)


def test_the_rules_are_one_set_of_files_for_both_houses():
    """Links, since Ansible brings only module_utils to hosts, and files that stand alone, since each house names them differently."""
    real, links = TRAINER.folder / "rules", COLLECTION.folder / "_rules"
    assert {path.name for path in links.glob("*.py")} == {path.name for path in real.glob("*.py")} - {"__init__.py"}
    for link in links.glob("*.py"):
        assert link.is_symlink() and link.resolve() == real / link.name
        imports = [
            node
            for node in ast.walk(ast.parse(link.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        named = [str(one.module) if isinstance(one, ast.ImportFrom) else one.names[0].name for one in imports]
        assert {name.partition(".")[0] for name in named} <= sys.stdlib_module_names, link.name
