# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How soon a run continues after faults, how many steps it repeats, and its speed in a storm of faults.

    python bench/storm.py                           # single faults, three times each
    python bench/storm.py --minutes 10 --seed 7     # random faults of all kinds, and a table of the storm

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from storm_account import back_by, from_scratch, log_of, pauses, rows_of_steps, surviving
from storm_faults import STOPPED, Faults
from storm_lab import HOSTS, Lab

Json = dict[str, Any]
DESKTOP, LAPTOP, ATTIC = HOSTS
CALM_SECONDS = 30.0


class Story:
    """Single faults, one after the other; measures the recovery time and repeated steps of each."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.rows: list[Json] = []

    def happen(self, what: str, do: Callable[[], object], *members: str) -> None:
        """Cause a fault during a step, and record when these hosts continued, as seen by one that trains throughout."""
        lab, witness = self.lab, LAPTOP
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
            "still": max(later - sooner for sooner, later in itertools.pairwise(times)),
            "again": max(0, before + 1 - (start["resumed_from"] or 0)),
            "parts": parts(lab, witness, start),
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


def parts(lab: Lab, witness: str, start: Json) -> dict[str, float]:
    """The parts of the time between two steps, as one host saw it."""
    seen = pauses(lab.member_events(witness), lab.events(witness))
    return next((dict(one["seconds"]) for one in seen if one["time"] > start["time"]), {})


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
            "parts": lost_by_part([pauses(self.lab.member_events(host), told[host]) for host in HOSTS], [hit["begun"] for hit in stops]),
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


def lost_by_part(told: Sequence[Iterable[Json]], launches: Sequence[float]) -> Json:
    """Seconds without a step by their parts, in all generations; of each, as the host knows that stood still for the shortest.

    Each launch numbers its generations anew.
    """
    shortest: dict[tuple[int, int], Json] = {}
    for event in (event for events in told for event in events):
        launch = sum(event["time"] > begun for begun in launches)
        seconds = shortest.setdefault((launch, event["generation"]), event["seconds"])
        if sum(event["seconds"].values()) < sum(seconds.values()):
            shortest[launch, event["generation"]] = event["seconds"]
    names = dict.fromkeys(name for seconds in shortest.values() for name in seconds)
    return {name: sum(seconds.get(name, 0.0) for seconds in shortest.values()) for name in names}


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
            f"Seconds without a step: {', '.join(f'{name} {seconds:.0f}' for name, seconds in told['parts'].items())}.",
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


def story(lab: Lab, times: int) -> tuple[str, Any]:
    lab.first_step(0.0, *HOSTS)
    told = Story(lab)
    for dummy in range(times):
        told.once()
    return told.table(), told.rows


def storm(lab: Lab, given: argparse.Namespace) -> tuple[str, Any]:
    print(f"seed {given.seed}", file=sys.stderr)
    one = Storm(lab, given.seed, given.an_hour)
    one.run(given.minutes)
    told = one.account()
    return storm_table(told), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="how often each single fault happens")
    parser.add_argument("--minutes", type=float, default=0.0, help="of a storm in place of single faults")
    parser.add_argument("--an-hour", type=float, default=85.0, help="faults an hour")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="what is drawn; printed")
    parser.add_argument("--min-hosts", type=int, default=2, help="ddp_min_hosts of a storm; single faults have 1")
    parser.add_argument("--keep", type=Path, help="folder for the hosts' logs and metrics")
    given = parser.parse_args()
    # Take the hosts down even if this process is killed.
    signal.signal(signal.SIGTERM, lambda *dummy: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="storm-") as place:
        lab = Lab(Path(place), min_hosts=given.min_hosts if given.minutes else 1, grace=3)
        try:
            lab.launch()
            table, told = storm(lab, given) if given.minutes else story(lab, given.times)
            print(table)
            if given.minutes and (found := broken(told)):
                raise SystemExit("The storm did harm: " + "; ".join(found) + ".")
        finally:
            if given.keep:
                lab.keep(given.keep)
            lab.close()


if __name__ == "__main__":
    main()
