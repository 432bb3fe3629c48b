# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How soon a run goes on after faults, how many steps are made again, and what a storm of faults leaves of its speed.

    python bench/storm.py                           # single faults, three times each
    python bench/storm.py --minutes 10 --seed 7     # drawn faults of all kinds, and the table of the whole storm

Needs root: three network namespaces on this machine, each a host with a disk (tmpfs), session, keeper and rank of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from storm_lab import HOSTS, Lab

Json = dict[str, Any]
DESKTOP, LAPTOP, ATTIC = HOSTS


class Story:
    """Single faults, each from where the one before has ended; how long each takes, and which steps are made again."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.rows: list[Json] = []

    def happen(self, what: str, do: Callable[[], object], *members: str) -> None:
        """Do something in the midst of steps, and note when those that are left went on."""
        lab, witness = self.lab, members[0]
        made = len(lab.events(witness, "step"))
        lab.wait("30 more steps", lambda: len(lab.events(witness, "step")) > made + 30)
        begun = time.time()
        do()
        first = lab.first_step(begun, *members)
        steps = [event for event in lab.events(witness, "step") if event["time"] <= first]
        times = [event["time"] for event in steps if event["time"] > begun - 5]
        start = [event for event in lab.events(witness, "start") if event["time"] < first][-1]
        before = [event["step"] for event in steps if event["time"] < start["time"]][-1]
        row = {
            "what": what,
            "next step": first - begun,
            "still": max(later - sooner for sooner, later in zip(times, times[1:], strict=False)),
            "again": max(0, before + 1 - (start["resumed_from"] or 0)),
            "parts": parts(lab, witness, start, begun, first),
        }
        self.rows.append(row)
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["parts"].items())
        print(f"{what}: {row['next step']:.1f} s ({told}), again {row['again']}", file=sys.stderr, flush=True)

    def once(self) -> None:
        lab, all_hosts = self.lab, HOSTS
        self.happen("kill -9 of a rank", lambda: lab.send(signal.SIGKILL, lab.rank(LAPTOP)), *all_hosts)
        self.happen("a host freezes", lambda: lab.send(signal.SIGSTOP, *lab.processes(ATTIC)), DESKTOP, LAPTOP)
        self.happen("it wakes up", lambda: lab.send(signal.SIGCONT, *lab.processes(ATTIC)), *all_hosts)
        self.happen("the master loses power", lambda: lab.power(DESKTOP, on=False), LAPTOP, ATTIC)
        self.happen("it is back", lambda: lab.power(DESKTOP, on=True), *all_hosts)

    def table(self) -> str:
        lines = ["| what | until the next step: median, all | without a step | steps made again |", "|---|---|---|---|"]
        for what in dict.fromkeys(row["what"] for row in self.rows):
            rows = [row for row in self.rows if row["what"] == what]
            seconds, still = ([row[key] for row in rows] for key in ("next step", "still"))
            each = ", ".join(f"{one:.1f}" for one in seconds)
            again = ", ".join(str(row["again"]) for row in rows)
            lines.append(
                f"| {what} | {statistics.median(seconds):.1f} s ({each}) | {statistics.median(still):.1f} s | {again} |"
            )
        return "\n".join(lines)


def parts(lab: Lab, witness: str, start: Json, begun: float, first: float) -> dict[str, float]:
    """Where the time from a fault to the next step went, as one host saw it."""
    told = [event for event in lab.member_events(witness) if begun < event["time"] < start["time"] and event["host"] == witness]
    times = {"noticed": begun, "ended": begun, "agreed": begun}
    for event in told:
        if event["what"] in ("ending", "idle", "asking") and times["noticed"] == begun:
            times["noticed"] = event["time"]
        if event["what"] == "idle":
            times["ended"] = event["time"]
        if event["what"] == "training":
            times["agreed"] = event["time"]
    times = {**times, "loaded": start["time"], "stepped": first}
    marks = [begun, *times.values()]
    return {name: max(0.0, at - before) for name, at, before in zip(times, times.values(), marks, strict=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="how often each single fault happens")
    parser.add_argument("--write", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storm-") as place:
        lab = Lab(Path(place), min_hosts=1, grace=3)
        try:
            lab.launch()
            lab.first_step(0.0, *HOSTS)
            story = Story(lab)
            for dummy in range(given.times):
                story.once()
            print(story.table())
            if given.write:
                given.write.write_text(json.dumps(story.rows, indent=1) + "\n")
        finally:
            lab.close()


if __name__ == "__main__":
    main()
