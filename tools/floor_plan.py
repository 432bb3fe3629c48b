# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Draws the floor plan of the code from the table in docs/architecture.md, for tools/generate_docs.py."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\d) \| `(_\w+)` \| (.+?) \|$", re.M)
WIDTH, LEFT, GAP = 1000, 20, 10
ROOM_HEIGHT, FLOOR_HEIGHT = 92, 116
LINE = 15
FLOORS = {3: "#dbeafe", 2: "#dcfce7", 1: "#fef3c7", 0: "#fee2e2"}
ABOVE = "plugins, roles, playbooks: drive the hosts, thin; never import torch"
BETWEEN = "the run folder on each host: plan.json, env, run.sh, log, metrics, heartbeats, checkpoints"
BELOW = "trainer/: PyTorch; flags and environment in, log, metrics and checkpoints out; never heard of Ansible"


def rooms() -> dict[int, list[tuple[str, str]]]:
    """The purpose of each room, by floor, the topmost first."""
    found: dict[int, list[tuple[str, str]]] = {}
    for floor, room, what in ROW.findall(PAGE.read_text(encoding="utf-8")):
        found.setdefault(int(floor), []).append((room, what.replace("`", "").split(";")[0]))
    return dict(sorted(found.items(), reverse=True))


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {size} rx="6" fill="{colour}" stroke="#64748b"/>'


def text(x: float, y: float, words: str, size: int = 12, weight: str = "normal") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}"'
    return f'<text {place} fill="#0f172a">{html.escape(words)}</text>'


def band(y: float, words: str, colour: str) -> list[str]:
    """A box over the whole width, with one line in it."""
    return [box(LEFT, y, WIDTH - 2 * LEFT, 40, colour), text(LEFT + 8, y + 25, words, 13, "bold")]


def floor_of(floor: int, found: list[tuple[str, str]], top: float) -> Iterator[str]:
    """The rooms of a floor beside each other."""
    yield text(LEFT, top - 6, f"floor {floor}", 12, "bold")
    width = (WIDTH - 2 * LEFT - GAP * (len(found) - 1)) / len(found)
    for number, (room, what) in enumerate(found):
        x = LEFT + number * (width + GAP)
        yield box(x, top, width, ROOM_HEIGHT, FLOORS[floor])
        yield text(x + 8, top + 18, room, 13, "bold")
        for at, line in enumerate(textwrap.wrap(what, max(12, int(width / 6.7)))):
            yield text(x + 8, top + 36 + LINE * at, line, 11)


def picture() -> str:
    """The house of the collection on the left wall of the run folder, the trainer on its other side; as an SVG."""
    floors = rooms()
    lines = band(20, ABOVE, "#e2e8f0")
    top = 90.0
    for floor, found in floors.items():
        lines += floor_of(floor, found, top)
        top += FLOOR_HEIGHT
    lines += [text(LEFT, top + 2, "a room imports only from the floors below its own", 11)]
    lines += band(top + 20, BETWEEN, "#fce7f3")
    lines += band(top + 80, BELOW, "#ede9fe")
    size = f'viewBox="0 0 {WIDTH} {top + 140:.0f}" width="{WIDTH}" height="{top + 140:.0f}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([begin, '<rect width="100%" height="100%" fill="#ffffff"/>', *lines, "</svg>", ""])
