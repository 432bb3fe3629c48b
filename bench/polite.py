# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of a polite trainer to other programs, and of politeness to the trainer (ddp_polite low).

    python bench/polite.py [--rounds 8] [--size d4]

A trainer, started as in a polite session, trains on all cores and is stopped and continued alternately. Other programs run in a second
session, as in a terminal: "compile", a process per core that compiles Python's own library, in seconds; and "requests", one every 20 ms
that takes some milliseconds of a core, as the 95th percentile of the response time. Then, without other programs, a polite and an
ordinary trainer alternate step by step. Figures are medians of neighbouring pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".ansible" / "collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._session.priority import yield_to_others
from one_node import Worker

COMPILED = 60  # library files per process
REQUESTS, EVERY = 150, 0.02
COMPILE = f"""
import glob, os
for path in sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))[:{COMPILED}]:
    compile(open(path, encoding="utf-8", errors="replace").read(), path, "exec")
"""
# A process that sleeps until a request comes, like a web server.
SERVE = """
import sys
for line in sys.stdin:
    print(sum(number * number for number in range(40000)), flush=True)
"""


class Trainer(Worker):
    """A trainer in a separate session."""

    def __init__(self, size: str, polite: bool) -> None:
        yielding = yield_to_others if polite else None
        super().__init__(size, "fp32", os.cpu_count() or 1, start_new_session=True, preexec_fn=yielding)
        self.step()

    def seconds(self) -> float:
        return self.step()["seconds"]

    def go_on(self) -> None:
        """Make steps until the end."""

        def steps() -> None:
            with contextlib.suppress(OSError, ValueError):  # it was killed
                while True:
                    self.step()

        threading.Thread(target=steps, daemon=True).start()

    def switch(self, on: bool) -> None:
        self.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        time.sleep(0.3)


def compiling() -> float:
    """Seconds until all cores have compiled their files."""
    begun = time.perf_counter()
    running = [
        subprocess.Popen([sys.executable, "-c", COMPILE], start_new_session=True)
        for dummy in range(os.cpu_count() or 1)
    ]
    assert not any(one.wait() for one in running)
    return time.perf_counter() - begun


def requests() -> float:
    """95th percentile of the response time in seconds."""
    words = [sys.executable, "-c", SERVE]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdin and server.stdout
        took = []
        for dummy in range(REQUESTS):
            begun = time.perf_counter()
            server.stdin.write("\n")
            server.stdin.flush()
            server.stdout.readline()
            took.append(time.perf_counter() - begun)
            time.sleep(max(0.0, EVERY - took[-1]))
        server.stdin.close()
    return statistics.quantiles(took, n=20)[-1]


def pairs(load: Callable[[], float], trainer: Trainer, rounds: int) -> tuple[float, float, float]:
    """(alone, beside the trainer, ratio)."""
    found = []
    for number in range(rounds):
        pair = {}
        # Alternate the order, so that a drifting machine affects both alike.
        for on in (False, True) if number % 2 else (True, False):
            trainer.switch(on)
            pair[on] = load()
        found.append((pair[False], pair[True]))
    alone, beside = (statistics.median(one) for one in zip(*found, strict=True))
    return alone, beside, statistics.median(with_it / without for without, with_it in found)


def measure(trainers: dict[bool, Trainer], rounds: int) -> None:
    """Measure and print each figure."""
    steps = [[trainers[polite].seconds() for polite in (False, True)] for dummy in range(3 * rounds)]
    ordinary, own = (statistics.median(one) for one in zip(*steps, strict=True))
    ratio = statistics.median(polite / normal for normal, polite in steps)
    print("                         alone    beside   x")
    print(f"a step, nothing beside   {ordinary:7.4f}  {own:7.4f}  {ratio:.3f}  (ordinary, polite)", flush=True)
    for polite in (True, False):
        trainer = trainers[polite]
        trainers[not polite].switch(False)
        trainer.go_on()
        for load in (compiling, requests):
            alone, beside, times = pairs(load, trainer, rounds)
            who = "polite" if polite else "ordinary"
            print(f"{load.__name__:10} ({who:8})    {alone:7.4f}  {beside:7.4f}  {times:.3f}", flush=True)
        trainer.switch(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The cost of a polite trainer to other programs, and of politeness to it."
    )
    parser.add_argument("--rounds", type=int, default=8, help="pairs of each kind")
    parser.add_argument("--size", default="d4", help="the model that is trained")
    given = parser.parse_args()
    trainers = {polite: Trainer(given.size, polite) for polite in (False, True)}
    try:
        measure(trainers, given.rounds)
    finally:
        for trainer in trainers.values():
            trainer.process.kill()


if __name__ == "__main__":
    main()
