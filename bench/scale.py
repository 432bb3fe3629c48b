# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The speed of 2 to 1000 hosts: step time and bytes from one host's measured step and a link, by the plan's own formula.

    python bench/scale.py                                     # the machine of lab/performance.md, d4 and d8, 1 Gbit/s and 100 Mbit/s
    python bench/scale.py --measured ~/nanochat-ddp/measured.json --models d8 --rates 2500
    python bench/scale.py --plot lab/images/scale.svg

Every host brings its own rows (the batch grows with the hosts), all hosts are alike, and a switch carries what all of them
send at once. Nothing of this was measured with more than two hosts: the formula (_plan/step_model.py) holds for two, as the
first lines show, and counts above that what each host sends. What it leaves out makes many hosts slower than it says:
the overhead of a message, hosts that are late, and what a larger batch is worth to the training.

"Pays up to" is the number of hosts beyond which twice as many give less than a tenth more tokens a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ansible" / "collections"), str(ROOT / "bench")]

import curves  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import describe  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import Link, Speed, Step, job_of, predict  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape  # noqa: E402

HOSTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 128, 200, 256, 400, 512, 700, 1000)
SHOWN = (2, 8, 32, 100, 1000)
# Of the rate of a line what TCP has, and a delay as between two machines on one switch.
TCP_SHARE, LATENCY_MS = 0.957, 0.1
PAYS = 1.1
ROWS = 2


class Way(NamedTuple):
    """A way of ddp_sync, every step or after so many local steps."""

    sync: str
    local: int

    def __str__(self) -> str:
        return f"{self.sync}/{self.local}" if self.local else self.sync


WAYS = (Way("exact", 0), Way("bf16", 0), Way("bf16", 10), Way("bf16", 100))


class Case(NamedTuple):
    """A model, one host's step of it, and what was measured of two of them (lab/performance.md)."""

    shape: Shape
    speed: Speed
    measured: dict[int, dict[str, float]]


CASES = {
    "d4": Case(
        Shape(4, 64, 64, 512, "SSSL", 32768),
        Speed("", 0.410, 0.020, 0.060),
        {1000: {"exact": 0.600, "bf16": 0.527}, 100: {"exact": 4.260, "bf16": 2.201, "bf16/10": 0.779}},
    ),
    "d8": Case(
        Shape(8, 64, 128, 1024, "SSSL", 32768),
        Speed("", 2.80, 0.11, 1.10),
        {1000: {"exact": 3.65, "bf16": 3.45}, 100: {"exact": 16.7, "bf16": 9.1}},
    ),
}


def plan_of(shape: Shape, hosts: int, head: str) -> dict[str, Any]:
    """As much of a plan as the formula reads."""
    # A way that nobody chose, so that the head of each way is what the plan would take for it.
    training = {"total_batch": hosts * ROWS * shape.sequence, "device_batch": ROWS, "sync": "dense", "head": head}
    training |= {"asked": {"head": head}, "iterations": 1000}
    nodes = [{"host": str(rank), "rows": ROWS, "device": "cpu"} for rank in range(hosts)]
    return {"world": hosts, "model": describe(shape), "training": training, "nodes": nodes}


def step_of(case: Case, hosts: int, mbit: float, way: Way, head: str = "auto") -> Step:
    speeds = [case.speed._replace(host=str(rank)) for rank in range(hosts)]
    link = Link(mbit * TCP_SHARE, LATENCY_MS)
    return predict(job_of(plan_of(case.shape, hosts, head)), speeds, link, [ROWS] * hosts, way.sync, way.local)


def efficiency(case: Case, hosts: int, step: Step) -> float:
    """Tokens a second of one of the hosts against one alone."""
    return case.speed.alone(1) / step.seconds if hosts > 1 else 1.0


def pays_up_to(case: Case, mbit: float, way: Way) -> int:
    """Beyond this many hosts twice as many give less than a tenth more; 1000 where that is never so."""

    def speed(hosts: int) -> float:
        return step_of(case, hosts, mbit, way).tokens_per_second if hosts > 1 else one

    one = ROWS * case.shape.sequence / case.speed.alone(1)
    return next((hosts for hosts in HOSTS if hosts <= 512 and speed(2 * hosts) < PAYS * speed(hosts)), HOSTS[-1])


def check(name: str, case: Case) -> Iterator[str]:
    """The formula against what two hosts took, with the whole head that they had."""
    for mbit, found in case.measured.items():
        for way in WAYS:
            if str(way) in found:
                expected = step_of(case, 2, mbit, way, "whole").seconds
                off = 100 * (expected / found[str(way)] - 1)
                yield f"| {name} | {mbit} | {way} | {found[str(way)]:.3f} | {expected:.3f} | {off:+.0f} % |"


def table(name: str, case: Case, mbit: float) -> Iterator[str]:
    for way in WAYS:
        steps = [(hosts, step_of(case, hosts, mbit, way)) for hosts in SHOWN]
        cells = [
            f"{step.seconds:.2f} s, {step.bytes_sent / 1e6:.0f} MB, {efficiency(case, hosts, step):.0%}"
            for hosts, step in steps
        ]
        limit = pays_up_to(case, mbit, way)
        pays = "never" if limit == 1 else f"{limit} hosts" if limit < HOSTS[-1] else "all 1000"
        yield f"| {name} | {mbit:g} | {way} | " + " | ".join(cells) + f" | {pays} |"


def draw(cases: dict[str, Case], rates: Sequence[float]) -> str:
    """Efficiency over hosts, a panel for each model and rate."""
    panels = {}
    for name, case in cases.items():
        for mbit in rates:
            title = f"{name}, {mbit:g} Mbit/s: share of its own speed that a host keeps, by hosts"
            panels[title] = {
                str(way): {hosts: efficiency(case, hosts, step_of(case, hosts, mbit, way)) for hosts in HOSTS}
                for way in WAYS
            }
    return curves.draw_panels(panels, logarithmic=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="d4,d8", help="of d4 and d8")
    parser.add_argument("--rates", default="1000,100", help="of the link of every host, in Mbit/s")
    parser.add_argument(
        "--measured", type=Path, help="the file measured.json of a host's base folder, of the one model"
    )
    parser.add_argument("--plot", type=Path, help="file for the curves as SVG")
    given = parser.parse_args(words)
    cases = {name: CASES[name] for name in given.models.split(",")}
    rates = [float(rate) for rate in given.rates.split(",")]
    if given.measured:
        kept = json.loads(given.measured.read_text(encoding="utf-8"))
        own = Speed("", kept["pass_seconds"], kept["adamw_seconds"], kept["muon_seconds"])
        cases = {name: case._replace(speed=own, measured={}) for name, case in cases.items()}
    checked = [line for name, case in cases.items() for line in check(name, case)]
    if checked:
        print("| model | Mbit/s | way | two hosts took | expected | off by |\n|---|---|---|---|---|---|")
        print("\n".join(checked), end="\n\n")
    print("| model | Mbit/s | way | " + " | ".join(f"{hosts} hosts" for hosts in SHOWN) + " | pays up to |")
    print("|" + "---|" * (4 + len(SHOWN)))
    for name, case in cases.items():
        for mbit in rates:
            print("\n".join(table(name, case, mbit)), flush=True)
    if given.plot:
        given.plot.write_text(draw(cases, rates), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
