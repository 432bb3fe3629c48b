# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Draws the table in docs/performance.md, link by share of the hosts' speed, for tools/generate_docs.py."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
LINKS = re.compile(r"(\d+) Mbit/s")
WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 60, 250, 30, 52
MOST = 125  # per cent at the upper edge
COLORS = ("c0", "c1", "c2", "c3", "c4")
# Without a background, in colours that stand out on white; where the reader's page is dark, in lighter ones.
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#57606a}
.grid{stroke:#d0d7de}.all{stroke:#57606a;stroke-dasharray:4 3}
.c0{--c:#0550ae}.c1{--c:#0f7b6c}.c2{--c:#8250df}.c3{--c:#9a6700}.c4{--c:#4d6b8a}.other{--c:#cf222e}
path{fill:none;stroke:var(--c);stroke-width:2.5}.other path{stroke-dasharray:6 4}circle,text.name{fill:var(--c)}
@media(prefers-color-scheme:dark){text{fill:#adbac7}.grid{stroke:#444c56}.all{stroke:#adbac7}
.c0{--c:#6cb6ff}.c1{--c:#57d9c4}.c2{--c:#dcbdfb}.c3{--c:#e3b341}.c4{--c:#8fb0d1}.other{--c:#ff938a}}
"""


class Row(NamedTuple):
    """Measurements on some hosts: Mbit/s and per cent."""

    name: str
    points: list[tuple[int, int]]


def rows(page: str) -> list[Row]:
    """The table: a column for each link, an empty cell where nothing was measured."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    links = [int(found[1]) for cell in lines[0] if (found := LINKS.search(cell))]
    table = [(name.strip(), cells) for name, *cells in lines[2:]]
    return [
        Row(name, [(link, int(cell.strip(" %"))) for link, cell in zip(links, cells, strict=True) if cell.strip()])
        for name, cells in table
    ]


def across(link: float) -> float:
    """Where a link is, from 20 to 1500 Mbit/s, each tenfold equally wide."""
    low, high = math.log(20), math.log(1500)
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(link) - low) / (high - low)


def down(share: float) -> float:
    """Where a share of the speed is."""
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share / MOST)


def words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{html.escape(text)}</text>'


def axes(links: list[int]) -> Iterator[str]:
    """Lines and what they mean."""
    right = WIDTH - RIGHT
    for share in range(0, MOST, 25):
        kind = "all" if share == 100 else "grid"
        yield f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{down(share):.1f}" y2="{down(share):.1f}"/>'
        yield words(LEFT - 8, down(share) + 4, f"{share} %", ' text-anchor="end"')
    for link in links:
        yield words(across(link), HEIGHT - BOTTOM + 20, f"{link:,}", ' text-anchor="middle"')
    yield words(LEFT, 14, "share of twice the speed of one host")
    yield words(right + 8, 14, "model, a step alone")
    yield words((LEFT + right) / 2, HEIGHT - 8, "link between the hosts, Mbit/s", ' text-anchor="middle"')


def spread(wanted: list[float], apart: float) -> list[float]:
    """The same heights, in their order, far enough from each other to be read."""
    found: dict[int, float] = {}
    last = -math.inf
    for at in sorted(range(len(wanted)), key=lambda at: wanted[at]):
        last = found[at] = max(wanted[at], last + apart)
    return [found[at] for at in range(len(wanted))]


def picture() -> str:
    """The plot, as an SVG."""
    found = rows(PAGE.read_text(encoding="utf-8"))
    links = sorted({link for row in found for link, share in row.points})
    lines = list(axes(links))
    heights = spread([down(row.points[-1][1]) for row in found], 17)
    colors = iter(COLORS)
    for row, height in zip(found, heights, strict=True):
        kind = "other" if row.name.startswith("torchrun") else next(colors)
        places = [(across(link), down(share)) for link, share in row.points]
        lines.append(f'<g class="{kind}"><path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
        lines.append(words(WIDTH - RIGHT + 8, height + 4, row.name, ' class="name"') + "</g>")
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    title = "<title>Share of the hosts' speed that a training keeps, by the link between them</title>"
    return "\n".join([begin, title, f"<style>{STYLE}</style>", *lines, "</svg>", ""])
