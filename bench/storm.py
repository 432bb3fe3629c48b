# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A storm of random faults: how soon a run continues after each, how many steps it repeats, and its speed.

    python bench/storm.py --minutes 10 --seed 7

A storm after which weights differ, a step's rows were not each trained on once, or a host began from scratch, fails.
Needs root: three network namespaces on this machine, each a host with its own disk (tmpfs), session, keeper and rank.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storm_account import back_by, from_scratch, log_of, rows_of_steps, surviving
from storm_faults import STOPPED, Faults
from storm_lab import HOSTS, Lab

Json = dict[str, Any]
CALM_SECONDS = 30.0


class Storm:
    """Random faults of all kinds, and the table of results."""

    def __init__(self, lab: Lab, seed: int, an_hour: float) -> None:
        self.lab, self.chance, self.every = lab, random.Random(seed), 3600 / an_hour
        self.faults = Faults(lab, self.chance)
        self.hits: list[Json] = []

    def run(self, minutes: float) -> None:
        """Run undisturbed for a while, then the storm, then wait until all hosts are back."""
        lab = self.lab
        lab.first_step(0.0, *HOSTS)
        time.sleep(CALM_SECONDS)
        self.begun = time.time()
        while time.time() < self.begun + 60 * minutes:
            due = time.time() + self.every * self.chance.uniform(0.5, 1.5)
            self.hit()
            time.sleep(max(0.0, due - time.time()))
        self.ended = time.time()
        lab.wait("all hosts to train again", lambda: lab.together(*HOSTS))
        self.back = time.time() - self.ended
        lab.first_step(0.0, *HOSTS)
        lab.stop()

    def hit(self) -> None:
        host, lasting, course = self.faults.draw()
        begun = time.time()
        what = next(course)
        print(f"{begun - self.begun:6.0f} s  {host}: {what} ({lasting:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(lasting)
        for dummy in course:
            pass
        self.hits.append({"what": what, "host": host, "begun": begun, "healed": time.time()})

    def account(self) -> Json:
        """All figures."""
        told = {host: self.lab.events(host) for host in HOSTS}
        lines = {host: surviving(events) for host, events in told.items()}
        rows, steps = rows_of_steps(lines), steps_in_time(told)
        calm = [event["time"] for event in steps if self.begun - CALM_SECONDS < event["time"] < self.begun]
        pace = (calm[-1] - calm[0]) / (len(calm) - 1)
        made = {
            step for line in lines.values() for step, event in line.items() if self.begun < event["time"] < self.ended
        }
        ends = [*(hit["begun"] for hit in self.hits[1:]), self.ended]
        for hit, until in zip(self.hits, ends, strict=True):
            hit["still"] = longest_gap(steps, hit["begun"], until)
            hit["back"] = all_back(steps, hit["healed"]) - hit["healed"]
        stops = [hit for hit in self.hits if hit["what"].startswith(STOPPED)]
        stopped = sum(hit["healed"] - hit["begun"] for hit in stops)
        seconds, undisturbed = self.ended - self.begun, len(made) * pace
        digests = [event for events in told.values() for event in events if event["kind"] == "digest"]
        return {
            "efficiency": undisturbed / seconds,
            "wanted": undisturbed / (seconds - stopped),
            "faults an hour": len(self.hits) / seconds * 3600,
            "step ms": 1000 * pace, "steps": len(rows), "hits": self.hits, "again": sum(map(back_by, told.values())), "back": self.back,
            "from scratch": sum(len(from_scratch(events)) for events in told.values()),
            "not once": sum(count != sum(self.lab.plan()["training"]["rows"]) for count in rows.values()) + len(rows) - max(rows) - 1,
            "differing": sum(not event["identical"] for event in digests),
            "last digests": len({[event for event in events if event["kind"] == "digest"][-1]["digest"] for events in told.values()}),
        }  # fmt: skip


def steps_in_time(told: dict[str, list[Json]]) -> list[Json]:
    """Each step of each attempt once, by the host that logged it first."""
    first: dict[tuple[str, int], Json] = {}
    for event in (event for events in told.values() for event in log_of(events) if event["kind"] == "step"):
        key = (event["attempt"], event["step"])
        if key not in first or event["time"] < first[key]["time"]:
            first[key] = event
    return sorted(first.values(), key=lambda event: float(event["time"]))


def longest_gap(steps: Sequence[Json], begun: float, until: float) -> float:
    """The longest time without a step that began within an interval."""
    times = [event["time"] for event in steps]
    gaps = [
        later - max(sooner, begun) for sooner, later in itertools.pairwise(times) if later > begun and sooner < until
    ]
    return max(gaps, default=0.0)


def all_back(steps: Sequence[Json], since: float) -> float:
    """When all hosts first made a common step after a given time."""
    return next((event["time"] for event in steps if event["time"] > since and event["world"] == len(HOSTS)), math.inf)


def storm_table(told: Json) -> str:
    """For people."""
    lines = ["| fault | times | without a step: median, most | until all are back: median, most |", "|---|---|---|---|"]
    kinds = sorted({hit["what"] for hit in told["hits"]})
    groups = [(what, [hit for hit in told["hits"] if hit["what"] == what]) for what in kinds]
    for what, hits in [*groups, ("all", told["hits"])]:
        still, back = ([hit[key] for hit in hits] for key in ("still", "back"))
        cells = [what, str(len(hits)), *(f"{statistics.median(one):.1f} s, {max(one):.1f} s" for one in (still, back))]
        lines.append(f"| {' | '.join(cells)} |")
    still = sorted(hit["still"] for hit in told["hits"])
    return "\n".join(
        [
            *lines,
            "",
            f"{len(still)} faults, {told['faults an hour']:.0f} an hour. Efficiency: {100 * told['efficiency']:.0f} % of the undisturbed "
            f"run before it ({told['step ms']:.0f} ms a step); {100 * told['wanted']:.0f} % without the user's stops.",
            f"Without a step: p90 {still[int(0.9 * (len(still) - 1))]:.1f} s. All back {told['back']:.0f} s after the last fault.",
            f"{told['steps']} steps, {told['again']} made again by all hosts together, {told['from scratch']} starts from scratch, "
            f"{told['not once']} steps whose rows were not each trained on once.",
            f"{told['differing']} differing digests, {told['last digests']} digest(s) at the end.",
        ]
    )


def broken(told: Json) -> list[str]:
    """The promises of docs/membership.md that the storm broke."""
    promises = {
        "a host began from scratch": told["from scratch"],
        "steps are missing, or rows were not trained on once": told["not once"],
        "ranks had different weights": told["differing"] or told["last digests"] != 1,
    }
    return [text for text, is_broken in promises.items() if is_broken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--an-hour", type=float, default=85.0, help="faults an hour")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="what is drawn; printed")
    parser.add_argument("--min-hosts", type=int, default=2, help="ddp_min_hosts")
    given = parser.parse_args()
    # Take the hosts down even if this process is killed.
    signal.signal(signal.SIGTERM, lambda *dummy: sys.exit(1))
    print(f"seed {given.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="storm-") as place:
        lab = Lab(Path(place), given.min_hosts, grace=3)
        try:
            lab.launch()
            storm = Storm(lab, given.seed, given.an_hour)
            storm.run(given.minutes)
            account = storm.account()
            print(storm_table(account))
            if found := broken(account):
                raise SystemExit("The storm did harm: " + "; ".join(found) + ".")
        finally:
            lab.close()


if __name__ == "__main__":
    main()
