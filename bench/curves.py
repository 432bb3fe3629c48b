# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SVG of training curves for bench/quality.py: losses, and each way's difference from the reference."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# A colour-blind safe palette.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
WIDTH, HEIGHT, MARGIN, LEGEND = 480, 320, 60, 190
# Loss of one training by step.
Curve = Mapping[int, float]


class Panel(NamedTuple):
    """A set of axes: origin, and ranges of steps and values."""

    left: float
    steps: tuple[float, float]
    values: tuple[float, float]

    def place(self, step: float, value: float) -> tuple[float, float]:
        low, high = self.steps
        across = (step - low) / (high - low or 1)
        up = (value - self.values[0]) / (self.values[1] - self.values[0] or 1)
        return self.left + MARGIN + across * (WIDTH - MARGIN - 10), HEIGHT - MARGIN / 2 - up * (HEIGHT - MARGIN)

    def line(self, curve: Curve, colour: str, width: float) -> str:
        points = " ".join("{:.1f},{:.1f}".format(*self.place(step, value)) for step, value in curve.items())
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def axes(self, title: str) -> Iterator[str]:
        """Draw labelled axes."""
        yield text(self.left + MARGIN, 18, title)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            value = self.values[0] + share * (self.values[1] - self.values[0])
            x, y = self.place(self.steps[0], value)
            yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{self.left + WIDTH - 10:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
            yield text(x - 52, y + 4, f"{value:.3f}")
            step = self.steps[0] + share * (self.steps[1] - self.steps[0])
            x, y = self.place(step, self.values[0])
            yield text(x - 10, y + 18, f"{step:.0f}")


def text(x: float, y: float, words: str, colour: str = "#000000") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{colour}">{html.escape(words)}</text>'


def draw(results: Sequence[Mapping[str, Any]], reference: str) -> str:
    """Draw the picture: thick lines are means, thin ones single seeds."""
    ways = list(dict.fromkeys([reference, *(str(one["way"]) for one in results)]))
    curves = {way: {one["seed"]: curve_of(one) for one in results if one["way"] == way} for way in ways}
    base = curves[reference]
    apart = {
        way: {
            seed: {step: loss - base[seed][step] for step, loss in curve.items()}
            for seed, curve in curves[way].items()
            if seed in base
        }
        for way in ways[1:]
    }
    colours = dict(zip(ways, COLOURS * len(ways), strict=False))
    lines = [*panel(0, f"loss on held out rows, {len(base)} seeds", curves, colours)]
    lines += panel(WIDTH, f"difference from {reference} of the same seed", apart, colours)
    for number, way in enumerate(ways):
        lines.append(text(2 * WIDTH + 10, 40 + 20 * number, way, colours[way]))
    size = f'width="{2 * WIDTH + LEGEND}" height="{HEIGHT}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    # On white, to be readable on dark pages.
    return "\n".join([begin, '<rect width="100%" height="100%" fill="#ffffff"/>', *lines, "</svg>", ""])


def curve_of(result: Mapping[str, Any]) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in result["losses"].items()}


def panel(
    left: float, title: str, curves: Mapping[str, Mapping[int, Curve]], colours: Mapping[str, str]
) -> Iterator[str]:
    """Axes that fit all curves, with single seeds drawn under the means."""
    every = [curve for by_seed in curves.values() for curve in by_seed.values()]
    if not every:
        return
    steps = [step for curve in every for step in curve]
    values = [value for curve in every for value in curve.values()]
    axes = Panel(left, (min(steps), max(steps)), (min(values), max(values)))
    yield from axes.axes(title)
    for way, by_seed in curves.items():
        for curve in by_seed.values():
            yield axes.line(curve, colours[way], 0.5)
    for way, by_seed in curves.items():
        common = set.intersection(*(set(curve) for curve in by_seed.values())) if by_seed else set()
        mean = {step: statistics.mean(curve[step] for curve in by_seed.values()) for step in sorted(common)}
        yield axes.line(mean, colours[way], 2.0)
